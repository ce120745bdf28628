"""Filters as JSON: every form that the specification has, and what is refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.catalog.errors import BadRequest, ValidationFailed
from lakefeed.catalog.planning.expressions import (
    FILTER_MAX_DEPTH,
    Constant,
    Junction,
    Not,
    Opaque,
    Predicate,
    parse_filter,
)
from tests.catalog.planning.scans import COLUMNS, FIELD_IDS

NUMBER = {"type": "reference", "name": "number"}
DAY = {"type": "apply", "function": "day", "arguments": [{"type": "reference", "name": "moment"}]}


def facts_of(filter_: Any) -> tuple[Any, ...]:
    parsed = parse_filter(filter_, COLUMNS)
    assert isinstance(parsed, Predicate)
    name = f"not-{parsed.operation.value}" if parsed.negated else parsed.operation.value
    return name, parsed.column.name, (parsed.transform.kind, parsed.transform.width), parsed.literals


@pytest.mark.parametrize(
    ("filter_", "expected"),
    [
        ({"type": "lt", "term": "number", "value": 5}, ("lt", "number", ("identity", 0), (5,))),
        ({"type": "LT", "term": "number", "value": 5}, ("lt", "number", ("identity", 0), (5,))),
        ({"type": "lt", "left": NUMBER, "right": 5}, ("lt", "number", ("identity", 0), (5,))),
        ({"type": "lt", "left": 5, "right": NUMBER}, ("gt", "number", ("identity", 0), (5,))),
        ({"type": "gt-eq", "left": 5, "right": NUMBER}, ("lt-eq", "number", ("identity", 0), (5,))),
        (
            {
                "type": "eq",
                "left": {"type": "reference", "id": FIELD_IDS["number"]},
                "right": {"type": "literal", "value": 5},
            },
            ("eq", "number", ("identity", 0), (5,)),
        ),
        (
            {
                "type": "eq",
                "term": {"type": "reference", "term": "number"},
                "value": {"type": "literal", "value": 5, "data-type": "long"},
            },
            ("eq", "number", ("identity", 0), (5,)),
        ),
        (
            {"type": "eq", "term": {"type": "transform", "transform": "bucket[8]", "term": "number"}, "value": 5},
            ("eq", "number", ("bucket", 8), (5,)),
        ),
        (
            {
                "type": "eq",
                "left": {
                    "type": "apply",
                    "function": ["truncate"],
                    "arguments": [{"type": "literal", "value": 3}, NUMBER],
                },
                "right": 6,
            },
            ("eq", "number", ("truncate", 3), (6,)),
        ),
        (
            {
                "type": "eq",
                "left": {**DAY, "function": {"catalog": "iceberg_functions", "identifier": ["day"]}},
                "right": "1970-01-02",
            },
            ("eq", "moment", ("day", 0), (1,)),
        ),
        (
            {"type": "not-starts-with", "term": "text", "value": "a"},
            ("not-starts-with", "text", ("identity", 0), ("a",)),
        ),
        (
            {"type": "in", "child": NUMBER, "values": [1, {"type": "literal", "value": 2}]},
            ("in", "number", ("identity", 0), (1, 2)),
        ),
        (
            {"type": "not-in", "child": NUMBER, "values": {"type": "literals", "values": [1], "data-type": "long"}},
            ("not-in", "number", ("identity", 0), (1,)),
        ),
        ({"type": "not-null", "child": NUMBER}, ("not-is-null", "number", ("identity", 0), ())),
        ({"type": "is-nan", "term": "ratio"}, ("is-nan", "ratio", ("identity", 0), ())),
        ({"type": "eq", "term": "point.x", "value": 1}, ("eq", "point.x", ("identity", 0), (1,))),
    ],
)
def test_predicate_is_parsed_in_the_current_and_in_the_older_form(filter_: Any, expected: Any):
    assert facts_of(filter_) == expected


@pytest.mark.parametrize("filter_", [True, {"type": "true"}, {"type": "literal", "value": True}])
def test_constant_is_read_in_every_form(filter_: Any):
    assert parse_filter(filter_, COLUMNS) == Constant(True, True)


@pytest.mark.parametrize(
    "filter_",
    [
        {"type": "lt", "left": NUMBER, "right": {"type": "reference", "name": "point.x"}},
        {"type": "eq", "left": {"type": "apply", "function": "abs", "arguments": [NUMBER]}, "right": 5},
        {"type": "eq", "left": {**DAY, "function": {"catalog": "spark", "identifier": ["day"]}}, "right": 5},
        {"type": "eq", "left": {"type": "apply", "function": "year", "arguments": [DAY]}, "right": 5},
        {"type": "eq", "term": {"type": "transform", "transform": "zorder", "term": "number"}, "value": 5},
        {"type": "starts-with", "left": "abc", "right": {"type": "reference", "name": "text"}},
        {"type": "eq", "left": 1, "right": 1},
        {"type": "is-null", "child": 5},
    ],
)
def test_predicate_that_statistics_cannot_evaluate_is_kept(filter_: Any):
    assert parse_filter(filter_, COLUMNS) == Opaque(filter_)


@pytest.mark.parametrize(
    ("filter_", "message"),
    [
        ({"type": "eq", "term": "none", "value": 5}, "Cannot find field 'none'"),
        ({"type": "eq", "left": {"type": "reference", "id": 99}, "right": 5}, "Cannot find field 99"),
        ({"type": "eq", "term": "number", "value": None}, "Cannot compare with null"),
        ({"type": "eq", "term": "number"}, "Cannot compare with null"),
        ({"type": "in", "term": "number", "values": [1, None]}, "Cannot compare with null"),
        ({"type": "in", "term": "number"}, "Cannot parse values"),
        ({"type": "is-nan", "term": "number"}, "IsNaN cannot be used"),
        ({"type": "starts-with", "term": "number", "value": 1}, "StartsWith cannot be used"),
        ({"type": "eq", "term": "point", "value": 1}, "Cannot compare point of type struct"),
        (
            {"type": "eq", "term": {"type": "transform", "transform": "day", "term": "text"}, "value": 1},
            "Cannot apply day",
        ),
        ({"type": "eq", "term": {"type": "what"}, "value": 1}, "unknown type"),
        ({"type": "eq", "left": {"type": "what"}, "right": 1}, "unknown type"),
        ({"type": "and", "left": True}, "expected an object, found nothing"),
        ({"type": "not"}, "expected an object, found nothing"),
        ({"term": "number"}, "Cannot parse type"),
        ([], "expected an object, found a list"),
    ],
)
def test_invalid_filter_is_rejected(filter_: Any, message: str):
    with pytest.raises((BadRequest, ValidationFailed), match=message):
        parse_filter(filter_, COLUMNS)


_WORDS = ["and", "or", "not", "eq", "lt", "in", "is-null", "starts-with", "reference", "literal", "apply", "transform"]
_WORDS += ["number", "text", "moment", "point", "day", "bucket", "bucket[4]", "1970-01-01", "true"]
_KEYS = [
    "type",
    "left",
    "right",
    "child",
    "term",
    "value",
    "values",
    "name",
    "id",
    "function",
    "arguments",
    "transform",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=1_000, deadline=None)
@given(
    kind=st.sampled_from(["eq", "lt", "in", "is-null", "starts-with", "and", "not"]),
    rest=st.dictionaries(st.sampled_from(_KEYS[1:]), JSON, max_size=4),
)
def test_any_json_is_parsed_as_a_filter_or_rejected(kind: str, rest: dict[str, Any]):
    try:
        parsed = parse_filter({"type": kind, **rest}, COLUMNS)
    except (BadRequest, ValidationFailed):
        return
    # The JSON that goes back to the client means the same as the filter that it sent.
    assert parse_filter(parsed.json, COLUMNS) == parsed


def test_long_chain_becomes_a_shallow_tree():
    parts = [{"type": "eq", "term": "number", "value": number} for number in range(900)]
    chain: Any = parts[0]
    for part in parts[1:]:
        chain = {"type": "or", "left": chain, "right": part}
    parsed = parse_filter(chain, COLUMNS)
    assert isinstance(parsed, Junction)
    assert [child.json for child in parsed.children] == parts
    assert orjson.loads(orjson.dumps(parsed.json)) == parsed.json


def test_filter_that_is_nested_too_deep_is_refused():
    deep: Any = {"type": "eq", "term": "number", "value": 5}
    for _ in range(FILTER_MAX_DEPTH - 2):
        deep = {"type": "not", "child": deep}
    assert isinstance(parse_filter(deep, COLUMNS), Not)
    for _ in range(400):
        deep = {"type": "not", "child": deep}
    with pytest.raises(BadRequest, match="nested deeper than"):
        parse_filter(deep, COLUMNS)
    argument: Any = NUMBER
    for _ in range(200):
        argument = {"type": "apply", "function": "abs", "arguments": [argument]}
    with pytest.raises(BadRequest, match="nested deeper than"):
        parse_filter({"type": "eq", "left": argument, "right": 5}, COLUMNS)
