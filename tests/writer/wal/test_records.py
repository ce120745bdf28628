"""The bytes of records, and telling a torn tail from corruption."""

from __future__ import annotations

import random

import pytest

from lakefeed.contract.errors import WalCorrupt
from lakefeed.writer.wal.records import (
    MARK_BYTES,
    End,
    encode_group,
    encode_mark,
    find_end,
    find_record,
    good_record,
    record_bytes,
)

SALT = 0x1122334455667788
OTHER_SALT = 0xFEDCBA9876543210
BASE = 5


def group(*payloads: bytes, first_offset: int, synced: int | None = None, salt: int = SALT) -> bytes:
    synced = first_offset if synced is None else synced
    parts = encode_group([(payload,) for payload in payloads], first_offset=first_offset, synced=synced, salt=salt)
    return b"".join(parts)


def mark(offset: int, next_offset: int | None = None) -> bytes:
    return encode_mark(offset, offset if next_offset is None else next_offset, salt=SALT)


def end_of(data: bytes, *, salt: int = SALT) -> End:
    return find_end(memoryview(data), start=0, base_offset=BASE, salt=salt, path="data/log/0000000001.wal")


def test_layout_of_a_group_is_the_one_on_disk_since_version_2():
    parts = encode_group([(b"head", b"body"), (b"x",)], first_offset=7, synced=7, salt=SALT)
    assert b"".join(parts) == bytes.fromhex(
        """
        2e92bf6e 08000000 0700000000000000 8f77665544332211 68656164626f6479
        a7077371 01000000 0800000000000000 8f77665544332211 7800000000000000
        """
    )
    parts = encode_group([(b"x",)], first_offset=8, synced=7, salt=SALT)
    assert b"".join(parts) == bytes.fromhex("a7077371 01000000 0800000000000000 8f77665544332211 7800000000000000")


def test_layout_of_a_mark_is_the_one_on_disk_since_version_2():
    assert encode_mark(7, 9, salt=SALT) == bytes.fromhex("7c9df92f 00000080 0700000000000000 8177665544332211")


def test_payload_parts_are_passed_on_and_not_copied():
    body = bytes(100_000)
    assert any(part is body for part in encode_group([(b"head", body)], first_offset=0, synced=0, salt=SALT))


def test_record_bytes_is_the_size_of_a_record_in_the_segment():
    for length in range(1, 40):
        assert record_bytes((b"a" * length,)) == len(group(b"a" * length, first_offset=0))


def test_records_end_at_the_first_zeros():
    first, second = group(b"one", b"two", first_offset=5), group(b"three", first_offset=7)
    assert end_of(first + second + bytes(4096)) == End(len(first + second), 8, len(first), marked=False)
    assert end_of(first + second) == End(len(first + second), 8, len(first), marked=False)


def test_zeros_are_never_a_record():
    for salt in (0, SALT):
        view = memoryview(bytes(64))
        assert good_record(view, 0, offset=0, synced=0, salt=salt) is None
        assert find_end(view, start=0, base_offset=0, salt=salt, path="") == End(0, 0, 0, marked=True)


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
        with pytest.raises(WalCorrupt, match=r"segment=data/log/0000000001\.wal position=\d+ offset=[567] "):
            end_of(data)


def test_good_record_of_the_same_group_after_a_bad_one_is_a_torn_tail():
    durable, torn = group(b"durable", first_offset=5), bytearray(group(b"one", b"two", b"three", first_offset=6))
    torn[record_bytes((b"one",))] ^= 1
    assert end_of(durable + torn + bytes(64)).offset == 7


def test_damage_is_corruption_although_the_next_good_record_is_of_the_same_group():
    damaged = bytearray(group(b"one", b"two", b"three", first_offset=5))
    damaged[30] ^= 1
    with pytest.raises(WalCorrupt, match=" offset=5 "):
        end_of(damaged + group(b"later", first_offset=8) + bytes(64))


def test_old_records_of_a_recycled_file_are_neither_read_nor_corruption():
    stale = b"".join(group(b"old %d" % offset, first_offset=offset, salt=OTHER_SALT) for offset in range(20))
    new = group(b"new", first_offset=5)
    for shift in range(0, len(stale), 8):
        assert end_of(new + stale[shift:]).offset == 6


def test_bytes_that_a_client_made_look_like_records_are_not_corruption():
    forged = b"".join(group(b"forged", first_offset=offset, salt=0) for offset in range(100))
    torn = bytearray(group(forged, first_offset=5))
    torn[24] ^= 1
    assert end_of(torn + bytes(64)) == End(0, 5, 0, marked=True)


def test_record_out_of_order_does_not_continue_the_log():
    data = group(b"six", first_offset=6)
    view = memoryview(data)
    assert good_record(view, 0, offset=6, synced=6, salt=SALT) == (3, 7, 6)
    assert good_record(view, 0, offset=5, synced=5, salt=SALT) is None
    assert good_record(view, 0, offset=6, synced=6, salt=OTHER_SALT) is None


def test_record_with_a_lower_synced_than_the_one_before_does_not_continue_the_log():
    data = group(b"five", b"six", first_offset=5)
    at = record_bytes((b"five",))
    assert good_record(memoryview(data), at, offset=6, synced=5, salt=SALT) == (3, 7, 5)
    assert good_record(memoryview(data), at, offset=6, synced=4, salt=SALT) == (3, 7, 5)
    assert good_record(memoryview(data), at, offset=6, synced=6, salt=SALT) is None


def test_groups_that_were_not_synced_when_a_later_one_was_written_are_a_torn_tail():
    groups = [group(b"group %d" % offset, first_offset=offset, synced=BASE) for offset in range(BASE, BASE + 4)]
    size = len(groups[0])
    for lost in range(4):
        data = bytearray(b"".join(groups))
        data[lost * size : (lost + 1) * size] = bytes(size)
        assert end_of(data + bytes(64)) == End(lost * size, BASE + lost, 0, marked=lost == 0)


def test_group_that_was_synced_when_a_later_one_was_written_is_corrupt_and_one_that_was_not_is_torn():
    groups = [group(b"group %d" % offset, first_offset=offset, synced=BASE) for offset in range(BASE, BASE + 4)]
    groups.append(group(b"group 9", first_offset=9, synced=7))
    size = len(groups[0])
    for lost, offset in enumerate(range(BASE, 10)):
        data = bytearray(b"".join(groups))
        data[lost * size + 30] ^= 1
        if offset < 7:
            with pytest.raises(WalCorrupt, match=f" offset={offset} "):
                end_of(data)
        else:
            assert end_of(data).offset == offset


def test_records_that_were_not_synced_are_known_from_the_last_one():
    first = group(b"one", b"two", first_offset=5, synced=5)
    second = group(b"three", first_offset=7, synced=6)
    assert end_of(first + second).unsynced_position == record_bytes((b"one",))
    assert end_of(first + second + mark(8)).unsynced_position == len(first + second)
    after = group(b"four", first_offset=8)
    end = end_of(first + second + mark(8) + after)
    assert end.unsynced_position == len(first + second + mark(8))


def test_after_a_clean_close_damage_anywhere_is_corruption():
    data = group(b"one", b"two", first_offset=5) + group(b"three", first_offset=7) + mark(8)
    assert end_of(data + bytes(64)) == End(len(data), 8, len(data) - MARK_BYTES, marked=True)
    for position in range(len(data) - MARK_BYTES):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(WalCorrupt, match=r" offset=[567] "):
            end_of(damaged)


def test_damaged_mark_is_a_torn_tail():
    data = group(b"one", first_offset=5) + mark(6)
    for position in range(len(data) - MARK_BYTES, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        assert end_of(damaged + bytes(64)) == End(len(data) - MARK_BYTES, 6, 0, marked=False)


def test_mark_of_a_gap_says_which_offset_follows():
    data = group(b"one", first_offset=5) + mark(6, 9) + group(b"nine", first_offset=9)
    assert end_of(data).offset == 10
    damaged = bytearray(data)
    damaged[len(group(b"one", first_offset=5))] ^= 1
    with pytest.raises(WalCorrupt, match=" offset=6 "):
        end_of(damaged)


def test_record_after_damage_is_found_however_far_the_offsets_jump():
    far = BASE + 10**9
    data = group(b"one", first_offset=5) + mark(6, far) + group(b"far", first_offset=far)
    found = find_record(memoryview(data), 8, offset=6, synced=5, salt=SALT)
    assert found == len(group(b"one", first_offset=5))
    assert find_record(memoryview(data), found + 8, offset=6, synced=5, salt=SALT) == found + MARK_BYTES
    assert find_record(memoryview(data), found + 8, offset=6, synced=5, salt=SALT, until=far) is None
