"""Transforms of single values and of columns, against PyIceberg's."""

from __future__ import annotations

from decimal import localcontext

import pytest
from pyiceberg.transforms import parse_transform as parse_peer

from lakefeed.iceberg.arrow import transform_column
from lakefeed.iceberg.terms import parse_transform
from lakefeed.iceberg.transforms import apply_transform, result_type, wraps
from tests.pyiceberg.samples import EXACT, VALUES, from_peer, peer_type, to_arrow_array, to_peer

TRANSFORMS = (
    *("identity", "bucket[1]", "bucket[16]", "bucket[1000003]", "truncate[1]", "truncate[3]", "truncate[1000]"),
    *("truncate[2147483647]", "year", "month", "day", "hour", "void"),
)


@pytest.mark.parametrize("text", TRANSFORMS)
@pytest.mark.parametrize("type_", VALUES)
def test_transform_takes_the_same_types_and_has_the_same_results(type_, text):
    transform, theirs, peer = parse_transform(text), parse_peer(text), peer_type(type_)
    assert transform is not None
    result = result_type(transform, type_)
    assert (result is not None) == theirs.can_transform(peer)
    if result is None:
        return
    assert result.replace(" ", "") == str(theirs.result_type(peer)).replace(" ", "")
    values = VALUES[type_]
    with localcontext(EXACT):
        compute = theirs.transform(peer)
        expected = [from_peer(type_, compute(to_peer(type_, value))) for value in values]
    assert [apply_transform(transform, type_, value) for value in values] == expected
    column = transform_column(transform, type_, to_arrow_array(type_, [*values, None])).to_pylist()
    stored = [from_peer(type_, value) for value in column]
    assert stored[-1] is None
    for value, ours, exact in zip(values, stored, expected, strict=False):
        # PyIceberg does not wrap around at the ends of the type as Java does.
        assert ours == exact or wraps(transform, type_, ours, ours), value


@pytest.mark.xfail(strict=True, reason="Python's dates end at year 9999, Iceberg's do not")
@pytest.mark.parametrize("text", ["year", "month"])
@pytest.mark.parametrize(("type_", "value"), [("date", 2**31 - 1), ("timestamp", 2**63 - 1), ("date", -(2**31))])
def test_pyiceberg_transforms_dates_beyond_pythons_calendar(type_, value, text):
    transform = parse_transform(text)
    assert transform is not None
    assert parse_peer(text).transform(peer_type(type_))(value) == apply_transform(transform, type_, value)
