"""The header of a segment and the names of files."""

from __future__ import annotations

import zlib

import pytest

from lakefeed.contract.errors import WalCorrupt, WalVersionUnknown
from lakefeed.writer.wal.records import (
    SEGMENT_SUFFIX,
    SPARE_SUFFIX,
    Header,
    decode_header,
    encode_header,
    numbers_of,
    segment_name,
    spare_name,
)

HEADER = Header(number=42, base_offset=7, file_bytes=2**20, salt=0x1122334455667788, head=b"marks")


def test_layout_of_a_header_is_the_one_on_disk_since_version_2():
    assert encode_header(HEADER) == bytes.fromhex(
        """
        4c414b4557414c0a 7d2e1bb7 02000000 4800000000000000
        2a00000000000000 0700000000000000 0000100000000000 8877665544332211 0500000000000000
        6d61726b73000000
        """
    )


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (1, "log was written by a newer lakefeed, update lakefeed: .*version=3 known=2"),
        (-1, "log was written by an older lakefeed, .*version=1 known=2"),
    ],
)
def test_whole_header_of_another_version_is_not_taken_for_damage(step, words):
    data = bytearray(encode_header(HEADER))
    data[12] += step
    data[8:12] = zlib.crc32(data[12:]).to_bytes(4, "little")
    with pytest.raises(WalVersionUnknown, match=words):
        decode_header(bytes(data), path="data/log/0000000042.wal", number=42)


def test_header_is_read_back():
    assert decode_header(encode_header(HEADER), path="data/log/0000000042.wal", number=42) == HEADER


def test_flipped_bit_anywhere_in_the_header_is_corruption():
    data = encode_header(HEADER)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(WalCorrupt, match=r"segment=data/log/0000000042\.wal"):
            decode_header(bytes(damaged), path="data/log/0000000042.wal", number=42)


def test_header_that_is_cut_off_is_corruption():
    data = encode_header(HEADER)
    for length in range(len(data)):
        with pytest.raises(WalCorrupt, match=r"segment=data/log/0000000042\.wal"):
            decode_header(data[:length], path="data/log/0000000042.wal", number=42)


def test_segment_under_another_name_is_corruption():
    with pytest.raises(WalCorrupt, match=r"segment=data/log/0000000043\.wal found=0000000042\.wal"):
        decode_header(encode_header(HEADER), path="data/log/0000000043.wal", number=43)


def test_numbers_are_found_among_other_names():
    names = ["lock", segment_name(10), segment_name(9), spare_name(3), "0000000001.wal.bak", "1.wal", "notes.txt"]
    assert numbers_of(names, SEGMENT_SUFFIX) == [9, 10]
    assert numbers_of(names, SPARE_SUFFIX) == [3]
