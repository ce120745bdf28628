"""What a record of the log says of its frame, also one that an earlier version wrote."""

from __future__ import annotations

from dataclasses import replace

from lakefeed.contract.changes import SourceId
from lakefeed.writer.rows.runs import cut_run
from lakefeed.writer.wal.payload import Encoding, Frame, decode_frame, encode_frame, open_transaction_of, payload_facts
from lakefeed.writer.wal.records import Record

PLAIN = Frame(SourceId("shop"), 1, 7, 9, 5, Encoding.JSON_BATCH, b"{}")
DECLARING = Frame(
    SourceId("shop"), 1, 7, 9, 5, Encoding.JSON_BATCH, b"{}", expanded_bytes=99, declared='{"users":{"columns":{}}}'
)


def payload(frame: Frame) -> bytes:
    return b"".join(encode_frame(frame))


def test_a_frame_comes_back_as_it_was_written():
    assert [decode_frame(payload(frame)) for frame in (PLAIN, DECLARING)] == [PLAIN, DECLARING]


def test_frames_of_earlier_versions_declare_nothing():
    header = b'["shop",1,7,9,5]'
    written = b"\x01" + len(header).to_bytes(4, "little") + header + b"{}"
    assert decode_frame(written) == PLAIN


def test_the_header_has_the_expanded_size_and_whether_columns_are_declared():
    plain, declaring = payload_facts(payload(PLAIN)), payload_facts(payload(DECLARING))
    assert (plain.decoded_max_bytes, plain.declares) == (len(payload(PLAIN)), False)
    assert (declaring.decoded_max_bytes, declaring.declares) == (99, True)


def test_a_run_is_cut_before_a_record_that_declares_columns():
    frames = [PLAIN, PLAIN, DECLARING, PLAIN, DECLARING]
    records = [Record(10 + number, payload(frame)) for number, frame in enumerate(frames)]
    parts = cut_run(records, max_bytes=10_000, next_offset=15)
    assert [([record.offset for record in part], behind) for part, behind in parts] == [
        ([10, 11], 12),
        ([12, 13], 14),
        ([14], 15),
    ]


def test_the_header_names_the_transaction_that_is_open_after_a_frame():
    inside = replace(PLAIN, open_transaction="t-1")
    header = b'["shop",1,7,9,5,"",0,"","t-1"]'
    assert payload(inside) == b"\x01" + len(header).to_bytes(4, "little") + header + b"{}"
    assert open_transaction_of(payload(inside)) == ("shop", "t-1")
    assert decode_frame(payload(inside)) == inside


def test_frames_of_earlier_versions_leave_no_transaction_open():
    header = b'["shop",1,7,9,5,"",0,""]'
    written = b"\x01" + len(header).to_bytes(4, "little") + header + b"{}"
    assert open_transaction_of(written) == ("shop", "")
