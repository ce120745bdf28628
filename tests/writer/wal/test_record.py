"""The bytes of records, and telling a torn tail from corruption."""

from __future__ import annotations

import random

import pytest

from writer.errors import WalCorrupt
from writer.wal.record import End, encode_group, find_end, good_record, record_bytes

SALT = 0x1122334455667788
OTHER_SALT = 0xFEDCBA9876543210
BASE = 5


def group(*payloads: bytes, first_offset: int, salt: int = SALT) -> bytes:
    return b"".join(encode_group([(payload,) for payload in payloads], first_offset=first_offset, salt=salt))


def end_of(data: bytes, *, salt: int = SALT) -> End:
    return find_end(memoryview(data), start=0, base_offset=BASE, salt=salt, name="0000000001.wal")


def test_layout_of_a_group_is_the_one_on_disk_since_version_1():
    parts = encode_group([(b"head", b"body"), (b"x",)], first_offset=7, salt=SALT)
    assert b"".join(parts) == bytes.fromhex(
        """
        2e92bf6e 08000000 0700000000000000 8f77665544332211 68656164626f6479
        a7077371 01000000 0800000000000000 8f77665544332211 7800000000000000
        """
    )


def test_payload_parts_are_passed_on_and_not_copied():
    body = bytes(100_000)
    assert any(part is body for part in encode_group([(b"head", body)], first_offset=0, salt=SALT))


def test_record_bytes_tells_what_a_record_takes():
    for length in range(1, 40):
        assert record_bytes((b"a" * length,)) == len(group(b"a" * length, first_offset=0))


def test_records_are_found_up_to_the_zeros_behind_them():
    first, second = group(b"one", b"two", first_offset=5), group(b"three", first_offset=7)
    assert end_of(first + second + bytes(4096)) == End(len(first + second), 8, len(first))
    assert end_of(first + second) == End(len(first + second), 8, len(first))


def test_zeros_are_never_a_record():
    for salt in (0, SALT):
        view = memoryview(bytes(64))
        assert good_record(view, 0, offset=0, group=0, salt=salt) is None
        assert find_end(view, start=0, base_offset=0, salt=salt, name="") == End(0, 0, 0)


@pytest.mark.parametrize("behind", [bytes(512), random.Random(1).randbytes(512)], ids=["zeros", "garbage"])
def test_group_torn_at_any_byte_keeps_the_whole_records_before_it(behind: bytes):
    durable, torn = group(b"durable", first_offset=5), group(b"first", b"second one", b"third", first_offset=6)
    whole = [0]
    for payload in (b"first", b"second one", b"third"):
        whole.append(whole[-1] + record_bytes((payload,)))
    for length in range(len(torn)):
        data = durable + torn[:length] + behind[length:]
        kept = sum(1 for end in whole[1:] if data[len(durable) :][:end] == torn[:end])
        end = end_of(data)
        assert end.offset == 6 + kept
        assert end.position == len(durable) + whole[kept]


def test_flipped_bit_anywhere_before_a_later_group_is_corruption():
    first, second, third = (
        group(b"one", b"other", first_offset=5),
        group(b"two", first_offset=7),
        group(b"three", first_offset=8),
    )
    for position in range(len(first + second)):
        data = bytearray(first + second + third + bytes(64))
        data[position] ^= 1 << position % 8
        with pytest.raises(WalCorrupt, match=r"segment=0000000001\.wal position=\d+ expected_offset=[567] "):
            end_of(data)


def test_good_record_of_the_same_group_behind_a_bad_one_is_a_torn_tail():
    durable, torn = group(b"durable", first_offset=5), bytearray(group(b"one", b"two", b"three", first_offset=6))
    torn[record_bytes((b"one",))] ^= 1
    assert end_of(durable + torn + bytes(64)).offset == 7


def test_damage_is_corruption_although_the_next_good_record_is_of_the_same_group():
    damaged = bytearray(group(b"one", b"two", b"three", first_offset=5))
    damaged[30] ^= 1
    with pytest.raises(WalCorrupt, match="expected_offset=5"):
        end_of(damaged + group(b"later", first_offset=8) + bytes(64))


def test_records_of_the_files_former_life_are_neither_read_nor_corruption():
    stale = b"".join(group(b"old %d" % offset, first_offset=offset, salt=OTHER_SALT) for offset in range(20))
    new = group(b"new", first_offset=5)
    for shift in range(0, len(stale), 8):
        assert end_of(new + stale[shift:]).offset == 6


def test_bytes_that_a_client_dressed_up_as_records_are_not_taken_for_corruption():
    forged = b"".join(group(b"forged", first_offset=offset, salt=0) for offset in range(100))
    torn = bytearray(group(forged, first_offset=5))
    torn[24] ^= 1
    assert end_of(torn + bytes(64)) == End(0, 5, 0)


def test_record_out_of_order_does_not_continue_the_log():
    data = group(b"six", first_offset=6)
    view = memoryview(data)
    assert good_record(view, 0, offset=6, group=6, salt=SALT) == (3, 6)
    assert good_record(view, 0, offset=5, group=5, salt=SALT) is None
    assert good_record(view, 0, offset=6, group=6, salt=OTHER_SALT) is None


def test_record_of_a_group_that_is_over_does_not_continue_the_log():
    data = group(b"five", b"six", first_offset=5)
    at = record_bytes((b"five",))
    assert good_record(memoryview(data), at, offset=6, group=5, salt=SALT) == (3, 5)
    assert good_record(memoryview(data), at, offset=6, group=4, salt=SALT) is None
