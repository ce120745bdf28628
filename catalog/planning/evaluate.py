"""Evaluation of filters by statistics: which rows may match, and the residual that readers still have to check.

Statistics of a column come from three sources and are combined: a manifest's partition summaries, a file's partition
tuple, and a file's column metrics. Each says whether there may be nulls, NaNs or other values, and that some transform
of the other values lies between two bounds (for metrics, the identity):

    day(ts) in [19000, 19000]        the partition of a file
    bucket[16](id) in [3, 3]         the partition of another file
    amount in [1.50, 99.00]          column metrics

A literal is compared with a column through its own image: if day(ts) is at most 19000 and day(literal) is 19001, then
every ts is less than the literal. So no transform is ever inverted.

Outcomes are sets, over all rows. Where engines differ (a comparison with null or NaN is false by Iceberg's
specification of expressions, unknown in SQL) both are possible, which keeps a file or a filter rather than dropping
it. A file is read if some row may make the filter true. Parts of the filter that are true of every row are left out of
the residual, so that a reader of one day's partition does not compare the day again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from lakefeed.catalog.metadata.partitioning import source_ids
from lakefeed.catalog.planning.expressions import (
    FLOATS,
    Column,
    Constant,
    Expression,
    Junction,
    Not,
    Opaque,
    Predicate,
    PredicateKind,
    join,
)
from lakefeed.iceberg.manifests import column_value
from lakefeed.iceberg.terms import IDENTITY, Transform, parse_transform
from lakefeed.iceberg.transforms import TIME_UNITS, apply_transform, result_type, wraps
from lakefeed.iceberg.values import decode_bound, is_nan

# Beyond this many literals of one `in`, only the least and the greatest are compared, as in Iceberg's own planner.
IN_MAX_LITERALS = 200


# The outcomes that an expression may have, for some row: a set of bits. Plain numbers, because every file is evaluated
# and enum.Flag takes as long as all the rest together.
Outcomes: TypeAlias = int
NONE, TRUE, FALSE, UNKNOWN = 0, 1, 2, 4
EVERY_OUTCOME = TRUE | FALSE | UNKNOWN
NOT_COMPARED = FALSE | UNKNOWN

# How values may compare with a literal: a set of bits too.
Order: TypeAlias = int
LESS, EQUAL, GREATER = 1, 2, 4
EVERY_ORDER = LESS | EQUAL | GREATER


@dataclass(frozen=True, slots=True)
class ValueRange:
    """All images under a transform are at least `lower` and at most `upper`, where these are given."""

    transform: Transform
    lower: Any
    upper: Any


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """Whether a column may hold nulls, NaNs and other values in some rows, and the ranges of the other values."""

    nulls: bool
    nans: bool
    values: bool
    ranges: tuple[ValueRange, ...]

    def __and__(self, other: ColumnStats) -> ColumnStats:
        """Combine what two sources know of the same rows."""
        return ColumnStats(
            nulls=self.nulls and other.nulls,
            nans=self.nans and other.nans,
            values=self.values and other.values,
            ranges=self.ranges + other.ranges,
        )


NO_STATS = ColumnStats(nulls=True, nans=True, values=True, ranges=())


def make_range(type_: str, transform: Transform, lower: Any, upper: Any) -> tuple[ValueRange, ...]:
    """Return the range of a transform of a column of `type_` from two bounds; none if they say nothing."""
    if lower is None and upper is None:
        return ()
    # Writers order uuids in two ways, by signed and by unsigned bytes: only equal bounds mean the same to all.
    if type_ == "uuid" and lower != upper:
        return ()
    if wraps(transform, type_, lower, upper):
        return ()
    # Early versions of Iceberg rounded times before 1970 up, not down.
    if transform.kind in TIME_UNITS and lower is not None and lower <= 0:
        lower -= 1
    return (ValueRange(transform, lower, upper),)


def predicate_outcomes(predicate: Predicate, stats: ColumnStats) -> Outcomes:
    """Return the possible outcomes of a predicate, given the statistics of its column."""
    known = _term_stats(predicate, stats)
    match predicate.operation:
        case PredicateKind.IS_NULL:
            outcomes = _either(known.nulls, known.values or known.nans)
        case PredicateKind.IS_NAN:
            outcomes = _either(known.nans, known.values) | (NOT_COMPARED if known.nulls else NONE)
        case _:
            outcomes = _VALUE_OUTCOMES[predicate.operation](predicate, known) if known.values else NONE
            if known.nulls or known.nans:
                outcomes |= NOT_COMPARED
    # Contradictory statistics rule out every outcome: at least one is wrong, so all of them are ignored.
    outcomes = outcomes or EVERY_OUTCOME
    return negate(outcomes) if predicate.negated else outcomes


def negate(outcomes: Outcomes) -> Outcomes:
    """Return the outcomes of `not`."""
    turned = outcomes & UNKNOWN
    if outcomes & TRUE:
        turned |= FALSE
    if outcomes & FALSE:
        turned |= TRUE
    return turned


def both(one: Outcomes, other: Outcomes) -> Outcomes:
    """Return the outcomes of `and`, for any pairing of the two."""
    outcomes = (one & other & TRUE) | ((one | other) & FALSE)
    not_false = TRUE | UNKNOWN
    if one & not_false and other & not_false and (one | other) & UNKNOWN:
        outcomes |= UNKNOWN
    return outcomes


def _term_stats(predicate: Predicate, stats: ColumnStats) -> ColumnStats:
    """Turn statistics of a column into those of the term that is compared: its ranges are then of the identity."""
    transform, source = predicate.transform, predicate.column.type_
    nans = stats.nans and predicate.type_ in FLOATS
    nulls = stats.nulls and (predicate.column.nullable or not (stats.values or stats.nans))
    if transform.is_identity:
        return ColumnStats(nulls, nans, stats.values, stats.ranges)
    ranges: tuple[ValueRange, ...] = ()
    for known in stats.ranges:
        if known.transform == transform:
            ranges += (ValueRange(IDENTITY, known.lower, known.upper),)
        elif known.transform.is_identity and (transform.keeps_order or known.lower == known.upper):
            bounds = (known.lower, known.upper)
            images = (None if bound is None else apply_transform(transform, source, bound) for bound in bounds)
            ranges += (ValueRange(IDENTITY, *images),)
    return ColumnStats(nulls, nans, stats.values, ranges)


def _either(is_true: bool, is_false: bool) -> Outcomes:
    return (TRUE if is_true else NONE) | (FALSE if is_false else NONE)


def _order(predicate: Predicate, stats: ColumnStats, literal: Any) -> Order:
    """Return how ordinary values may compare with a literal."""
    order = EVERY_ORDER
    for known in stats.ranges:
        order &= _order_in_range(known, predicate.type_, literal)
    return order


def _order_in_range(known: ValueRange, type_: str, literal: Any) -> Order:
    transform = known.transform
    if transform.is_identity:
        return _order_between(known.lower, known.upper, literal)
    image = apply_transform(transform, type_, literal)
    if image is None:
        return EVERY_ORDER
    order = _order_between(known.lower, known.upper, image)
    if not transform.keeps_order:
        return EVERY_ORDER if order & EQUAL else LESS | GREATER
    if order & EQUAL:
        # Values with the literal's image may compare with it in any way, unless its neighbours rule some out.
        return _order_within_image(known, type_, literal)
    return order


def _order_within_image(known: ValueRange, type_: str, literal: Any) -> Order:
    """Return the order if the literal is at the edge of its image: no ts of its day is less than midnight."""
    order = EVERY_ORDER
    before, after = _neighbours(literal)
    if known.lower is not None and before is not None:
        image = apply_transform(known.transform, type_, before)
        if image is not None and known.lower > image:
            order &= ~LESS
    if known.upper is not None and after is not None:
        image = apply_transform(known.transform, type_, after)
        if image is not None and known.upper < image:
            order &= ~GREATER
    # A truncated value is never more than the whole one. Unlike numbers, text and binary have no neighbours.
    if known.transform.kind == "truncate" and known.lower is not None and known.lower >= literal:
        order &= ~LESS
    return order


def _neighbours(literal: Any) -> tuple[int | None, int | None]:
    """Return the whole numbers next to a literal of a whole-numbered type; no other type has neighbours."""
    if isinstance(literal, Fraction):
        return math.floor(literal), math.ceil(literal)
    if isinstance(literal, int) and not isinstance(literal, bool):
        return literal - 1, literal + 1
    return None, None


def _order_between(lower: Any, upper: Any, literal: Any) -> Order:
    order = EVERY_ORDER
    if lower is not None and lower >= literal:
        order &= GREATER if lower > literal else EQUAL | GREATER
    if upper is not None and upper <= literal:
        order &= LESS if upper < literal else EQUAL | LESS
    return order


def _compare(wanted: Order) -> Callable[[Predicate, ColumnStats], Outcomes]:
    def outcomes(predicate: Predicate, stats: ColumnStats) -> Outcomes:
        order = _order(predicate, stats, predicate.literals[0])
        return _either(bool(order & wanted), bool(order & ~wanted))

    return outcomes


def _is_in(predicate: Predicate, stats: ColumnStats) -> Outcomes:
    literals = predicate.literals
    if not literals:
        return FALSE
    if len(literals) > IN_MAX_LITERALS:
        outside = _order(predicate, stats, min(literals)) == LESS or _order(predicate, stats, max(literals)) == GREATER
        return FALSE if outside else TRUE | FALSE
    orders = [_order(predicate, stats, literal) for literal in literals]
    return _either(any(order & EQUAL for order in orders), EQUAL not in orders)


def _starts_with(predicate: Predicate, stats: ColumnStats) -> Outcomes:
    outcomes = TRUE | FALSE
    for known in stats.ranges:
        outcomes &= _starts_with_in_range(predicate.literals[0], known)
    return outcomes


def _starts_with_in_range(prefix: str, known: ValueRange) -> Outcomes:
    if known.transform.kind not in ("identity", "truncate"):
        return TRUE | FALSE
    compared = prefix if known.transform.is_identity else prefix[: known.transform.width]
    ends = [None if bound is None else bound[: len(compared)] for bound in (known.lower, known.upper)]
    if (ends[0] is not None and ends[0] > compared) or (ends[1] is not None and ends[1] < compared):
        return FALSE
    if ends == [compared, compared] and compared == prefix:
        return TRUE
    return TRUE | FALSE


_VALUE_OUTCOMES: dict[PredicateKind, Callable[[Predicate, ColumnStats], Outcomes]] = {
    PredicateKind.LT: _compare(LESS),
    PredicateKind.LT_EQ: _compare(LESS | EQUAL),
    PredicateKind.GT: _compare(GREATER),
    PredicateKind.GT_EQ: _compare(GREATER | EQUAL),
    PredicateKind.EQ: _compare(EQUAL),
    PredicateKind.IN: _is_in,
    PredicateKind.STARTS_WITH: _starts_with,
}


StatsOf: TypeAlias = Callable[[int], ColumnStats]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The possible outcomes of a filter, and the JSON of its residual."""

    outcomes: Outcomes
    residual: Any

    @property
    def may_match(self) -> bool:
        """Return whether some row may make the filter true."""
        return bool(self.outcomes & TRUE)


def evaluate(expression: Expression, stats_of: StatsOf) -> Evaluation:
    """Evaluate a filter by the statistics of its columns, which are looked up by field id."""
    match expression:
        case Constant():
            outcomes = TRUE if expression.value else FALSE
            return Evaluation(outcomes, expression.json)
        case Opaque():
            return Evaluation(EVERY_OUTCOME, expression.json)
        case Predicate():
            return _evaluation(predicate_outcomes(expression, stats_of(expression.column.field_id)), expression.json)
        case Not():
            child = evaluate(expression.child, stats_of)
            unchanged = child.residual is expression.child.json
            residual = expression.json if unchanged else {"type": "not", "child": child.residual}
            return _evaluation(negate(child.outcomes), residual)
        case Junction():
            return _evaluate_junction(expression, stats_of)


def _evaluate_junction(junction: Junction, stats_of: StatsOf) -> Evaluation:
    # A part whose only outcome is `decisive` decides the whole; one whose only outcome is `neutral` adds nothing.
    combine, decisive, neutral = (both, FALSE, TRUE) if junction.kind == "and" else (_any, TRUE, FALSE)
    outcomes, kept, unchanged = neutral, [], True
    for node in junction.children:
        child = evaluate(node, stats_of)
        if child.outcomes == decisive:
            return _evaluation(decisive, None)
        outcomes = combine(outcomes, child.outcomes)
        unchanged = unchanged and child.residual is node.json
        if child.outcomes != neutral:
            kept.append(child.residual)
    return _evaluation(outcomes, junction.json if unchanged or not kept else join(junction.kind, kept))


def _any(one: Outcomes, other: Outcomes) -> Outcomes:
    return negate(both(negate(one), negate(other)))


def _evaluation(outcomes: Outcomes, residual: Any) -> Evaluation:
    if outcomes == TRUE:
        return Evaluation(outcomes, True)
    if outcomes == FALSE:
        return Evaluation(outcomes, False)
    return Evaluation(outcomes, residual)


FindColumn: TypeAlias = Callable[[int], Column | None]

# The type of values of an unknown transform.
_UNKNOWN_TYPE = "string"
_METRICS = ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")


@dataclass(frozen=True, slots=True)
class ScanPartitionField:
    """One field of a spec. Without a known transform it says nothing about its source."""

    source_id: int
    source_type: str
    transform: Transform | None
    type_: str
    is_void: bool


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """A partition spec, with the types of its fields."""

    spec_id: int
    fields: tuple[ScanPartitionField, ...]

    @property
    def is_partitioned(self) -> bool:
        """Return whether any field partitions the files of this spec."""
        return not all(field.is_void for field in self.fields)

    @property
    def types(self) -> tuple[str, ...]:
        """Return the types of its partition values."""
        return tuple(field.type_ for field in self.fields)


def read_specs(specs: Iterable[Mapping[str, Any]], find_column: FindColumn) -> dict[int, ScanSpec]:
    """Read a table's specs, whose columns are looked up by field id."""
    return {
        spec["spec-id"]: ScanSpec(spec["spec-id"], tuple(_read_field(field, find_column) for field in spec["fields"]))
        for spec in specs
    }


def partition_stats(spec: ScanSpec, values: Sequence[Any], column: Column) -> ColumnStats:
    """Return the statistics of a column from a file's partition tuple."""
    stats = NO_STATS
    for field, value in zip(spec.fields, values, strict=True):
        if field.source_id == column.field_id and field.transform is not None:
            stats &= _value_stats(field, value)
    return stats


def summary_stats(spec: ScanSpec, summaries: Sequence[Mapping[str, Any]] | None, column: Column) -> ColumnStats:
    """Return the statistics of a column from a manifest's partition summaries."""
    stats = NO_STATS
    if summaries is None or len(summaries) != len(spec.fields):
        return stats
    for field, summary in zip(spec.fields, summaries, strict=True):
        if field.source_id == column.field_id and field.transform is not None:
            stats &= _field_summary_stats(field, summary)
    return stats


def metrics_stats(file: Mapping[str, Any], column: Column) -> ColumnStats:
    """Return the statistics of a column from a file's column metrics."""
    rows = file["record_count"]
    counted, nulls, nans, lower, upper = (column_value(file, name, column.field_id) for name in _METRICS)
    # Some writers do not count a field inside a null struct: it is null more often than its count says.
    nulls_are_counted = not column.nested or counted == rows
    total = counted if counted is not None or column.nested else rows
    return ColumnStats(
        nulls=not (nulls_are_counted and nulls == 0),
        nans=nans != 0,
        values=not (total and total == (nulls or 0) + (nans or 0)),
        ranges=make_range(column.type_, IDENTITY, decode_bound(column.type_, lower), decode_bound(column.type_, upper)),
    )


def _read_field(field: Mapping[str, Any], find_column: FindColumn) -> ScanPartitionField:
    name, sources = field["transform"], source_ids(field)
    source = find_column(sources[0])
    source_type = source.type_ if source is not None else _UNKNOWN_TYPE
    transform = parse_transform(name) if len(sources) == 1 else None
    type_ = result_type(transform, source_type) if transform is not None else None
    is_void = name == "void"
    return ScanPartitionField(
        source_id=sources[0],
        source_type=source_type,
        transform=None if type_ is None or is_void else transform,
        type_=type_ or (source_type if is_void else _UNKNOWN_TYPE),
        is_void=is_void,
    )


def _value_stats(field: ScanPartitionField, value: Any) -> ColumnStats:
    assert field.transform is not None
    if value is None or is_nan(value):
        return ColumnStats(nulls=value is None, nans=value is not None, values=False, ranges=())
    ranges = make_range(field.source_type, field.transform, value, value)
    return ColumnStats(nulls=False, nans=False, values=True, ranges=ranges)


def _field_summary_stats(field: ScanPartitionField, summary: Mapping[str, Any]) -> ColumnStats:
    """Read a summary. Without bounds there are no ordinary values, if nulls or NaNs explain their absence."""
    assert field.transform is not None
    lower, upper = (decode_bound(field.type_, summary.get(name)) for name in ("lower_bound", "upper_bound"))
    nulls, nans = summary["contains_null"], summary.get("contains_nan")
    explained = summary.get("lower_bound") is None and (nulls or nans)
    ranges = make_range(field.source_type, field.transform, lower, upper)
    return ColumnStats(nulls=nulls, nans=nans is not False, values=not explained, ranges=ranges)
