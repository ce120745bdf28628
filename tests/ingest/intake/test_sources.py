"""Durable state of sources: texts of adapters, and the head of a segment."""

from __future__ import annotations

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.sources import AdapterStates, decode_head, encode_head

SHOP, BANK = SourceId("shop"), SourceId("bank")


def test_newest_text_of_each_source_is_kept():
    states = AdapterStates(max_bytes=100)
    for source, text in ((SHOP, "one"), (BANK, "two"), (SHOP, "three"), (BANK, "")):
        states.record(source, text)
    assert states.texts() == {SHOP: "three", BANK: "two"}
    assert states.get(SourceId("unknown")) == ""


def test_room_counts_names_and_texts_and_what_is_replaced():
    states = AdapterStates(max_bytes=14)
    states.record(SHOP, "12345")
    assert states.has_room_for(SHOP, "1234567890")
    assert not states.has_room_for(SHOP, "12345678901")
    assert states.has_room_for(BANK, "1")
    assert not states.has_room_for(BANK, "12")


def test_head_of_a_segment_survives_encoding():
    marks = {SourceId('quo"te'): Position(0, 7), SourceId("größe"): Position(9, 2**63 - 1)}
    states = {SourceId("größe"): '{"key":[1,2]}'}
    assert decode_head(encode_head(marks, states)) == (marks, states)
    assert decode_head(encode_head({}, {})) == ({}, {})
