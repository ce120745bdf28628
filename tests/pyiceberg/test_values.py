"""Single values: binary form, JSON form and bounds, against PyIceberg's conversions."""

from __future__ import annotations

import math
import struct
from uuid import UUID

import pytest
from pyiceberg.conversions import from_bytes, from_json, to_bytes, to_json
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string, truncate_upper_bound_text_string

from lakefeed.iceberg.values import (
    decode_bound,
    encode_single_value,
    parse_literal,
    upper_binary_bound,
    upper_text_bound,
    value_to_json,
)
from tests.pyiceberg.samples import EXACT, RANDOM, SAMPLES, VALUES, from_peer, peer_type, texts, to_peer

NO_JSON = {"timestamp_ns", "timestamptz_ns"}


@pytest.mark.parametrize("type_", VALUES)
def test_binary_form_is_pyicebergs_both_ways(type_):
    peer = peer_type(type_)
    for value in VALUES[type_]:
        encoded = encode_single_value(type_, value)
        assert encoded == to_bytes(peer, to_peer(type_, value))
        assert decode_bound(type_, encoded) == value
        assert from_peer(type_, from_bytes(peer, encoded)) == value


@pytest.mark.parametrize("type_", sorted(VALUES.keys() - NO_JSON))
def test_json_form_that_we_write_is_read_by_pyiceberg(type_):
    peer = peer_type(type_)
    for value in VALUES[type_]:
        if type_ in ("float", "double") and not math.isfinite(value):
            continue
        written = value_to_json(type_, value)
        assert parse_literal(type_, written) == value
        assert from_peer(type_, from_json(peer, written)) == value


@pytest.mark.parametrize("type_", ["boolean", "int", "long", "date", "time", "timestamp", "timestamptz", "string"])
def test_json_form_that_pyiceberg_writes_is_read_by_us(type_):
    peer = peer_type(type_)
    for value in VALUES[type_]:
        assert parse_literal(type_, to_json(peer, to_peer(type_, value))) == value


def test_json_forms_that_pyiceberg_spells_otherwise_mean_the_same():
    for type_ in ("binary", "fixed[5]", "decimal(9,2)", "decimal(38,10)", "uuid"):
        for value in VALUES[type_]:
            assert parse_literal(type_, to_json(peer_type(type_), to_peer(type_, value))) == value


def test_upper_bounds_are_pyicebergs_or_closer():
    for text in texts("az\x7f\ue000\U0010ffff\U0001f40b", 22):
        ours, theirs = upper_text_bound(text), truncate_upper_bound_text_string(text, 16)
        assert (ours is None) == (theirs is None)
        assert ours is None or text <= ours <= theirs
    for _ in range(SAMPLES):
        data = bytes(RANDOM.choices([0, 1, 254, 255], k=RANDOM.randint(10, 20)))
        bound, their_bound = upper_binary_bound(data), truncate_upper_bound_binary_string(data, 16)
        assert (bound is None) == (their_bound is None)
        assert bound is None or data <= bound <= their_bound


@pytest.mark.xfail(strict=True, raises=UnicodeEncodeError, reason="PyIceberg steps from U+D7FF into the surrogates")
def test_pyiceberg_raises_text_bounds_over_the_surrogates():
    assert truncate_upper_bound_text_string("z" * 15 + "\ud7ff" + "x", 16).encode() == ("z" * 15 + "\ue000").encode()


@pytest.mark.xfail(strict=True, reason="PyIceberg has no JSON form of nanoseconds")
@pytest.mark.parametrize("type_", sorted(NO_JSON))
def test_pyiceberg_writes_nanoseconds_as_json(type_):
    assert to_json(peer_type(type_), 1) == value_to_json(type_, 1)


@pytest.mark.xfail(strict=True, raises=OverflowError, reason="Python's dates end at year 9999, Iceberg's do not")
def test_pyiceberg_writes_dates_beyond_year_9999_as_json():
    assert to_json(peer_type("date"), 3_700_000) == value_to_json("date", 3_700_000)


@pytest.mark.xfail(strict=True, reason="PyIceberg does not read bounds from before a date was widened (format 3)")
def test_pyiceberg_reads_bounds_of_dates_that_were_widened():
    assert from_bytes(peer_type("timestamp"), struct.pack("<i", 1)) == decode_bound("timestamp", struct.pack("<i", 1))


def test_values_of_the_sample_reach_the_ends_of_their_types():
    assert decode_bound("long", encode_single_value("long", min(VALUES["long"]))) == -(2**63)
    assert to_peer("decimal(38,10)", 10**38 - 1).scaleb(10, EXACT) == 10**38 - 1
    assert isinstance(to_peer("uuid", VALUES["uuid"][0]), UUID)
