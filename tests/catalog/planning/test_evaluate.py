"""Pruning against brute force: whatever rows, partitions, statistics and filter, no matching row is lost.

Filters are read in both ways that engines read them: by Iceberg's specification of expressions, where a comparison
with null or NaN is false, and by SQL's, where it is unknown.
"""

from __future__ import annotations

from decimal import Decimal
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.transforms import parse_transform

from lakefeed.catalog.planning.evaluate import evaluate, metrics_stats, partition_stats, summary_stats
from lakefeed.catalog.planning.expressions import parse_filter
from tests.catalog.planning.scans import (
    COLUMNS,
    TYPES,
    describe_file,
    image,
    is_nan,
    literal_json,
    make_spec,
    partition_of,
    summarise,
)

_DAY_US = 86_400_000_000
# Few values, close together and at edges of transforms, so that filters hit them.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "number": st.integers(-21, 21),
    "ratio": st.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan")]),
    "text": st.text("ab\U0001f600", max_size=4),
    "moment": st.builds(
        lambda day, offset: day * _DAY_US + offset,
        st.integers(-2, 3),
        st.sampled_from([0, 1, _DAY_US - 1, 3_600_000_000]),
    ),
    "date": st.integers(-400, 400),
    "price": st.integers(-250, 250).map(lambda cents: Decimal(cents).scaleb(-2)),
    "data": st.binary(max_size=3),
    "flag": st.booleans(),
    "point.x": st.integers(-5, 5),
}
TRANSFORMS = {
    "number": ("identity", "bucket[4]", "truncate[10]"),
    "ratio": ("identity",),
    "text": ("identity", "bucket[4]", "truncate[2]"),
    "moment": ("identity", "bucket[4]", "year", "month", "day", "hour"),
    "date": ("identity", "bucket[4]", "year", "month", "day"),
    "price": ("identity", "bucket[4]", "truncate[50]"),
    "data": ("identity", "bucket[4]", "truncate[1]"),
    "flag": ("identity",),
    "point.x": ("identity", "bucket[4]", "truncate[3]"),
}
# Two columns at a time, so that partitions, statistics and filters meet.
PAIRS = st.tuples(st.sampled_from(list(TYPES)), st.sampled_from(list(TYPES)))
BY_ID = {column.field_id: column for column in map(COLUMNS.named, TYPES)}
COMPARISONS = ("lt", "lt-eq", "gt", "gt-eq", "eq", "not-eq")


def is_literal(value: Any) -> bool:
    return value is not None and not is_nan(value)


@cache
def terms(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, str]]:
    return st.sampled_from([(name, transform) for name in names for transform in TRANSFORMS[name]])


@st.composite
def predicates(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, Any]:
    """Draw a predicate as JSON, in the older or in today's form."""
    name, transform = draw(terms(names))
    old = draw(st.booleans())
    literals = VALUES[name].filter(is_literal).map(lambda value: literal_json(name, image(transform, name, value)))
    kinds = ["is-null", "not-null", "in", "not-in", *COMPARISONS]
    kinds += ["is-nan", "not-nan"] if name == "ratio" else []
    kinds += ["starts-with", "not-starts-with"] if name == "text" and transform != "bucket[4]" else []
    kind = draw(st.sampled_from(kinds))
    term = old_term(name, transform) if old else new_term(name, transform)
    if kind in ("is-null", "not-null", "is-nan", "not-nan"):
        return {"type": kind, "term" if old else "child": term}
    if kind in ("in", "not-in"):
        return {"type": kind, "term" if old else "child": term, "values": draw(st.lists(literals, max_size=3))}
    if old:
        return {"type": kind, "term": term, "value": draw(literals)}
    return {"type": kind, "left": term, "right": {"type": "literal", "value": draw(literals)}}


def old_term(name: str, transform: str) -> Any:
    return name if transform == "identity" else {"type": "transform", "transform": transform, "term": name}


def new_term(name: str, transform: str) -> Any:
    reference = {"type": "reference", "name": name}
    if transform == "identity":
        return reference
    function, _, width = transform.rstrip("]").partition("[")
    arguments = [int(width), reference] if width else [reference]
    return {"type": "apply", "function": function, "arguments": arguments}


@cache
def filters(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    return st.recursive(
        predicates(names) | st.booleans(),
        lambda inner: (
            st.builds(lambda child: {"type": "not", "child": child}, inner)
            | st.builds(
                lambda kind, left, right: {"type": kind, "left": left, "right": right},
                st.sampled_from(["and", "or"]),
                inner,
                inner,
            )
        ),
        max_leaves=4,
    )


def holds(filter_: Any, row: dict[str, Any], *, sql: bool) -> bool | None:
    """Evaluate a filter for a row, literally by its definition."""
    if isinstance(filter_, bool):
        return filter_
    kind = filter_["type"]
    if kind == "not":
        inner = holds(filter_["child"], row, sql=sql)
        return None if inner is None else not inner
    if kind in ("and", "or"):
        sides = [holds(filter_[side], row, sql=sql) for side in ("left", "right")]
        decisive = kind == "or"
        if decisive in sides:
            return decisive
        return None if None in sides else not decisive
    return predicate_holds(kind, filter_, row, sql=sql)


def predicate_holds(kind: str, predicate: dict[str, Any], row: dict[str, Any], *, sql: bool) -> bool | None:
    name, transform = read_term(predicate.get("term", predicate.get("child", predicate.get("left"))))
    value = image(transform, name, row[name])
    if kind in ("is-null", "not-null"):
        return (value is None) == (kind == "is-null")
    if kind in ("is-nan", "not-nan"):
        return None if sql and value is None else is_nan(value) == (kind == "is-nan")
    negative = kind.startswith("not-")
    if value is None or is_nan(value):
        return None if sql else negative
    shown = literal_json(name, value)
    if kind in ("in", "not-in"):
        return (shown in predicate["values"]) != negative
    literal = predicate["value"] if "value" in predicate else predicate["right"]["value"]
    if "starts-with" in kind:
        return value.startswith(literal) != negative
    other = read_literal(value, literal)
    answers = {"lt": value < other, "lt-eq": value <= other, "gt": value > other, "gt-eq": value >= other}
    return answers.get(kind, (value == other) != negative)


def read_term(term: Any) -> tuple[str, str]:
    if isinstance(term, str):
        return term, "identity"
    if term["type"] == "transform":
        return term["term"], term["transform"]
    if term["type"] == "reference":
        return term["name"], "identity"
    *widths, reference = term["arguments"]
    return reference["name"], term["function"] + "".join(f"[{width}]" for width in widths)


def read_literal(value: Any, literal: Any) -> Any:
    if isinstance(value, Decimal):
        return Decimal(literal)
    return bytes.fromhex(literal) if isinstance(value, bytes) else literal


@st.composite
def filtered_tables(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[list[dict[str, Any]]], Any, frozenset[Any]]:
    """Draw a spec, rows divided into files by partition, a filter, and which statistics are missing."""
    names = draw(PAIRS)
    fields = draw(st.lists(terms(names), max_size=2))
    files: dict[Any, list[dict[str, Any]]] = {}
    rows = st.fixed_dictionaries({name: st.none() | VALUES[name] for name in names})
    for row in draw(st.lists(rows, min_size=1, max_size=5)):
        files.setdefault(repr(partition_of(row, fields)), []).append(dict.fromkeys(TYPES) | row)
    kinds = ["value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds"]
    left_out = draw(st.frozensets(st.tuples(st.sampled_from(kinds), st.sampled_from(names)), max_size=4))
    return fields, list(files.values()), draw(filters(names)), left_out


@settings(max_examples=600, deadline=None)
@given(drawn=filtered_tables())
def test_no_file_with_a_matching_row_is_dropped_and_residuals_select_the_same_rows(drawn: Any):
    fields, files, filter_, left_out = drawn
    spec, bound = make_spec(fields), parse_filter(filter_, COLUMNS)
    tuples = [partition_of(rows[0], fields) for rows in files]
    for rows, values in zip(files, tuples, strict=True):
        file = describe_file(rows, left_out=left_out)
        evaluation = evaluate(
            bound, lambda i, v=values, f=file: partition_stats(spec, v, BY_ID[i]) & metrics_stats(f, BY_ID[i])
        )
        for row in rows:
            for sql in (False, True):
                matches = holds(filter_, row, sql=sql) is True
                assert evaluation.may_match or not matches
                assert (holds(evaluation.residual, row, sql=sql) is True) == matches
    types = [parse_transform(transform).result_type(TYPES[name]) for name, transform in fields]
    summaries = summarise(spec, types, tuples)
    matching = any(holds(filter_, row, sql=sql) is True for rows in files for row in rows for sql in (False, True))
    assert evaluate(bound, lambda i: summary_stats(spec, summaries, BY_ID[i])).may_match or not matching


def judge_one(
    fields: list[tuple[str, str]], row: dict[str, Any], filter_: Any, *, left_out: Any = frozenset(), **other: Any
) -> Any:
    """Judge a file of one row (or of that row and another) by its partition and statistics; give what is left."""
    rows = [dict.fromkeys(TYPES) | row, *([dict.fromkeys(TYPES) | other] if other else [])]
    spec, values, file = make_spec(fields), partition_of(rows[0], fields), describe_file(rows, left_out=left_out)
    evaluation = evaluate(
        parse_filter(filter_, COLUMNS),
        lambda i: partition_stats(spec, values, BY_ID[i]) & metrics_stats(file, BY_ID[i]),
    )
    return evaluation.residual if evaluation.may_match else "dropped"


@pytest.mark.parametrize(
    ("fields", "row", "filter_", "left"),
    [
        ([], {"number": 5}, {"type": "gt", "term": "number", "value": 5}, "dropped"),
        ([], {"number": 5}, {"type": "gt", "term": "number", "value": 4}, True),
        ([], {"number": 5}, {"type": "gt", "term": "number", "value": 4.5}, True),
        ([], {"number": 5}, {"type": "in", "term": "number", "values": [4, 6]}, "dropped"),
        ([], {"number": 5}, {"type": "not-eq", "term": "number", "value": 5}, "dropped"),
        ([], {"number": None}, {"type": "lt", "term": "number", "value": 5}, "dropped"),
        ([], {"text": "abc"}, {"type": "starts-with", "term": "text", "value": "b"}, "dropped"),
        ([], {"text": "abc"}, {"type": "not-starts-with", "term": "text", "value": "ab"}, "dropped"),
        ([], {"ratio": float("nan")}, {"type": "not-nan", "term": "ratio"}, "dropped"),
        ([], {"moment": _DAY_US}, {"type": "eq", "left": new_term("moment", "day"), "right": 2}, "dropped"),
        ([], {"number": 7}, {"type": "eq", "left": 8, "right": new_term("number", "identity")}, "dropped"),
    ],
)
def test_files_are_dropped_by_statistics(fields: Any, row: Any, filter_: Any, left: Any):
    assert judge_one(fields, row, filter_) == left


def judge_by_partition(fields: list[tuple[str, str]], row: dict[str, Any], filter_: Any) -> Any:
    spec, values = make_spec(fields), partition_of(row, fields)
    evaluation = evaluate(parse_filter(filter_, COLUMNS), lambda i: partition_stats(spec, values, BY_ID[i]))
    return evaluation.residual if evaluation.may_match else "dropped"


DAY_TWO = {"moment": 2 * _DAY_US + 5}


@pytest.mark.parametrize(
    ("field", "row", "filter_", "left"),
    [
        (("moment", "day"), DAY_TWO, {"type": "lt", "term": "moment", "value": 2 * _DAY_US}, "dropped"),
        (("moment", "day"), DAY_TWO, {"type": "gt-eq", "term": "moment", "value": 2 * _DAY_US}, True),
        (("moment", "day"), DAY_TWO, {"type": "gt-eq", "term": "moment", "value": "1970-01-03T00:00:00"}, True),
        (("moment", "day"), DAY_TWO, {"type": "gt-eq", "term": "moment", "value": 3 * _DAY_US}, "dropped"),
        (("moment", "day"), DAY_TWO, {"type": "lt", "term": "moment", "value": 3 * _DAY_US}, True),
        (("moment", "day"), DAY_TWO, {"type": "eq", "left": new_term("moment", "day"), "right": "1970-01-03"}, True),
        (("number", "bucket[4]"), {"number": 1}, {"type": "eq", "term": "number", "value": 3}, "dropped"),
        (("number", "truncate[10]"), {"number": 15}, {"type": "lt", "term": "number", "value": 10}, "dropped"),
        (("number", "truncate[10]"), {"number": 15}, {"type": "lt", "term": "number", "value": 20}, True),
        (("text", "truncate[2]"), {"text": "abc"}, {"type": "starts-with", "term": "text", "value": "b"}, "dropped"),
        (("text", "truncate[2]"), {"text": "abc"}, {"type": "starts-with", "term": "text", "value": "a"}, True),
        (("text", "truncate[2]"), {"text": "abc"}, {"type": "lt", "term": "text", "value": "ab"}, "dropped"),
        (("number", "identity"), {"number": None}, {"type": "not-null", "term": "number"}, "dropped"),
        (("number", "identity"), {"number": None}, {"type": "is-null", "term": "number"}, True),
        (
            ("price", "truncate[50]"),
            {"price": Decimal("1.20")},
            {"type": "gt", "term": "price", "value": "1.49"},
            "dropped",
        ),
    ],
)
def test_files_are_dropped_and_residuals_reduced_by_partition(field: Any, row: Any, filter_: Any, left: Any):
    assert judge_by_partition([field], row, filter_) == left


def test_residual_is_the_part_that_the_partition_does_not_decide():
    by_day = {"type": "gt-eq", "term": "moment", "value": 2 * _DAY_US}
    by_number = {"type": "eq", "term": "number", "value": 7}
    filter_ = {"type": "and", "left": by_day, "right": by_number}
    assert judge_by_partition([("moment", "day")], DAY_TWO, filter_) == by_number
    assert judge_by_partition([], DAY_TWO, filter_) == filter_


def test_nulls_and_nans_keep_the_filter():
    below = {"type": "lt", "term": "ratio", "value": 5.0}
    assert judge_one([], {"ratio": 1.0}, below) is True
    assert judge_one([], {"ratio": 1.0}, below, ratio=float("nan")) == below
    assert judge_one([], {"ratio": 1.0}, below, ratio=None) == below


def test_column_may_hold_nan_unless_statistics_exclude_it():
    is_nan = {"type": "is-nan", "term": "ratio"}
    assert judge_one([], {"ratio": 1.0}, is_nan) == "dropped"
    assert judge_one([], {"ratio": 1.0}, is_nan, left_out=frozenset({("nan_value_counts", "ratio")})) == is_nan


def test_prefix_longer_than_what_is_truncated_is_left_to_the_reader():
    longer = {"type": "starts-with", "term": "text", "value": "abc"}
    assert judge_by_partition([("text", "truncate[2]")], {"text": "abd"}, longer) == longer


def test_statistics_that_contradict_each_other_drop_nothing():
    file = describe_file([dict.fromkeys(TYPES)], left_out=frozenset())
    column = COLUMNS.named("number")
    stats = metrics_stats(file, column) & partition_stats(make_spec([("number", "identity")]), (5,), column)
    assert evaluate(parse_filter({"type": "eq", "term": "number", "value": 7}, COLUMNS), lambda _: stats).may_match


@pytest.mark.parametrize(("contains_null", "kept"), [(True, False), (False, True)])
def test_summary_without_bounds_says_that_there_are_no_values_only_where_it_says_what_there_is(
    contains_null: bool, kept: bool
):
    spec, filter_ = make_spec([("ratio", "identity")]), {"type": "eq", "term": "ratio", "value": 2.5}
    summaries = [{"contains_null": contains_null, "contains_nan": None, "lower_bound": None, "upper_bound": None}]
    evaluation = evaluate(
        parse_filter(filter_, COLUMNS), lambda _: summary_stats(spec, summaries, COLUMNS.named("ratio"))
    )
    assert evaluation.may_match == kept


@pytest.mark.parametrize("wrapped", [2**63 - 8, 2**63 - 16])
def test_least_number_whose_truncation_wrapped_around_is_not_lost(wrapped: int):
    spec = make_spec([("number", "truncate[16]")])
    column = COLUMNS.named("number")
    filter_ = parse_filter({"type": "lt", "term": "number", "value": 0}, COLUMNS)
    kept = evaluate(filter_, lambda _: partition_stats(spec, (wrapped,), column)).may_match
    assert kept == (wrapped > 2**63 - 1 - 16)


def test_time_before_1970_that_early_versions_rounded_up_is_not_lost():
    spec = make_spec([("moment", "day")])
    filter_ = parse_filter({"type": "lt", "term": "moment", "value": 0}, COLUMNS)
    assert evaluate(filter_, lambda _: partition_stats(spec, (0,), COLUMNS.named("moment"))).may_match
    assert not evaluate(filter_, lambda _: partition_stats(spec, (1,), COLUMNS.named("moment"))).may_match


def test_long_in_list_is_evaluated_by_its_least_and_greatest_literal():
    values = list(range(1000, 3000))
    assert judge_one([], {"number": 5}, {"type": "in", "term": "number", "values": values}) == "dropped"
    assert judge_one([], {"number": 5}, {"type": "not-in", "term": "number", "values": values}) is True
    assert judge_one([], {"number": 1500}, {"type": "in", "term": "number", "values": values}) != "dropped"
