"""What is known of a column's values in some rows, and what a predicate may come to there. Core of all pruning.

Facts come from three places and are put together: a manifest's summary of its partitions, a file's partition tuple,
and a file's column statistics. All say the same kind of thing: whether there may be nulls, NaNs or ordinary values,
and that some transform of the ordinary values lies between two bounds (for statistics, the identity):

    day(ts) in [19000, 19000]        a file's partition
    bucket[16](id) in [3, 3]         another one's
    amount in [1.50, 99.00]          statistics

A literal is compared with a column through its own image: if day(ts) is at most 19000 and day(literal) is 19001, then
every ts is less than the literal. So no transform is ever turned around.

Outcomes are sets, over all rows. Where engines differ (a comparison with null or NaN is false by Iceberg's
specification of expressions, unknown by SQL) both are possible: that keeps a file or a filter rather than dropping it.
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
    Operation,
    Predicate,
    join,
)
from lakefeed.iceberg.manifests import column_value
from lakefeed.iceberg.terms import IDENTITY, Transform, parse_transform
from lakefeed.iceberg.transforms import TIME_UNITS, apply_transform, result_type, wraps
from lakefeed.iceberg.values import decode_bound, is_nan

# --- catalog.planning.facts -------------------------------------------------------------------------------------------


# Beyond so many literals of one `in`, only the least and the greatest are looked at, as Iceberg's own planner does.
IN_MAX_LITERALS = 200


# What an expression may come to, for some row or other: a set of bits. Plain numbers, as this is asked of every file
# and Python's own sets of flags take as long as all the rest together.
Outcomes: TypeAlias = int
NONE, TRUE, FALSE, UNKNOWN = 0, 1, 2, 4
EVERY_OUTCOME = TRUE | FALSE | UNKNOWN
NOT_COMPARED = FALSE | UNKNOWN

# How values may stand to a literal, as a set of bits too.
Order: TypeAlias = int
LESS, EQUAL, GREATER = 1, 2, 4
EVERY_ORDER = LESS | EQUAL | GREATER


@dataclass(frozen=True, slots=True)
class Range:
    """All images under a transform are at least `lower` and at most `upper`, where these are given."""

    transform: Transform
    lower: Any
    upper: Any


@dataclass(frozen=True, slots=True)
class Facts:
    """Whether some rows may hold nulls, NaNs and other values, and where the other values lie."""

    nulls: bool
    nans: bool
    values: bool
    ranges: tuple[Range, ...]

    def __and__(self, other: Facts) -> Facts:
        """Put together what two sources know of the same rows."""
        return Facts(
            nulls=self.nulls and other.nulls,
            nans=self.nans and other.nans,
            values=self.values and other.values,
            ranges=self.ranges + other.ranges,
        )


NOTHING_KNOWN = Facts(nulls=True, nans=True, values=True, ranges=())


def make_range(type_: str, transform: Transform, lower: Any, upper: Any) -> tuple[Range, ...]:
    """Make the range of a transform of a column of `type_` from two bounds; none if they tell nothing."""
    if lower is None and upper is None:
        return ()
    # Writers order uuids in two ways, by signed and by unsigned bytes: only two equal bounds mean the same to all.
    if type_ == "uuid" and lower != upper:
        return ()
    if wraps(transform, type_, lower, upper):
        return ()
    # Early versions of Iceberg rounded times before 1970 up, not down.
    if transform.kind in TIME_UNITS and lower is not None and lower <= 0:
        lower -= 1
    return (Range(transform, lower, upper),)


def predicate_outcomes(predicate: Predicate, facts: Facts) -> Outcomes:
    """Find what a predicate may come to, given what is known of its column."""
    known = _facts_of_term(predicate, facts)
    match predicate.operation:
        case Operation.IS_NULL:
            outcomes = _either(known.nulls, known.values or known.nans)
        case Operation.IS_NAN:
            outcomes = _either(known.nans, known.values) | (NOT_COMPARED if known.nulls else NONE)
        case _:
            outcomes = _VALUE_OUTCOMES[predicate.operation](predicate, known) if known.values else NONE
            if known.nulls or known.nans:
                outcomes |= NOT_COMPARED
    # Facts that contradict each other rule out everything: then at least one is wrong, and none is believed.
    outcomes = outcomes or EVERY_OUTCOME
    return negate(outcomes) if predicate.negated else outcomes


def negate(outcomes: Outcomes) -> Outcomes:
    """Give the outcomes of the opposite."""
    turned = outcomes & UNKNOWN
    if outcomes & TRUE:
        turned |= FALSE
    if outcomes & FALSE:
        turned |= TRUE
    return turned


def both(one: Outcomes, other: Outcomes) -> Outcomes:
    """Give the outcomes of `and`, for any pairing of the two."""
    outcomes = (one & other & TRUE) | ((one | other) & FALSE)
    not_false = TRUE | UNKNOWN
    if one & not_false and other & not_false and (one | other) & UNKNOWN:
        outcomes |= UNKNOWN
    return outcomes


def _facts_of_term(predicate: Predicate, facts: Facts) -> Facts:
    """Turn facts of a column into facts of the term that is compared: all its ranges are then of the identity."""
    transform, source = predicate.transform, predicate.column.type_
    nans = facts.nans and predicate.type_ in FLOATS
    nulls = facts.nulls and (predicate.column.nullable or not (facts.values or facts.nans))
    if transform.is_identity:
        return Facts(nulls, nans, facts.values, facts.ranges)
    ranges: tuple[Range, ...] = ()
    for known in facts.ranges:
        if known.transform == transform:
            ranges += (Range(IDENTITY, known.lower, known.upper),)
        elif known.transform.is_identity and (transform.keeps_order or known.lower == known.upper):
            images = (_image(transform, source, bound) for bound in (known.lower, known.upper))
            ranges += (Range(IDENTITY, *images),)
    return Facts(nulls, nans, facts.values, ranges)


def _image(transform: Transform, source: str, value: Any) -> Any:
    return None if value is None else apply_transform(transform, source, value)


def _either(is_true: bool, is_false: bool) -> Outcomes:
    return (TRUE if is_true else NONE) | (FALSE if is_false else NONE)


def _order(predicate: Predicate, facts: Facts, literal: Any) -> Order:
    """Find how ordinary values may stand to a literal."""
    order = EVERY_ORDER
    for known in facts.ranges:
        order &= _order_in_range(known, predicate.type_, literal)
    return order


def _order_in_range(known: Range, type_: str, literal: Any) -> Order:
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
        # Some values share the literal's image, and so may stand to it in any way; but look at its neighbours.
        return _order_within_image(known, type_, literal)
    return order


def _order_within_image(known: Range, type_: str, literal: Any) -> Order:
    """Rule out what a literal at the edge of its image rules out: no ts of its day is less than midnight."""
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
    # What is truncated is never more than the whole. Numbers have neighbours, text and binary have not.
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


def _compare(wanted: Order) -> Callable[[Predicate, Facts], Outcomes]:
    def outcomes(predicate: Predicate, facts: Facts) -> Outcomes:
        order = _order(predicate, facts, predicate.literals[0])
        return _either(bool(order & wanted), bool(order & ~wanted))

    return outcomes


def _is_in(predicate: Predicate, facts: Facts) -> Outcomes:
    literals = predicate.literals
    if not literals:
        return FALSE
    if len(literals) > IN_MAX_LITERALS:
        outside = _order(predicate, facts, min(literals)) == LESS or _order(predicate, facts, max(literals)) == GREATER
        return FALSE if outside else TRUE | FALSE
    orders = [_order(predicate, facts, literal) for literal in literals]
    return _either(any(order & EQUAL for order in orders), EQUAL not in orders)


def _starts_with(predicate: Predicate, facts: Facts) -> Outcomes:
    outcomes = TRUE | FALSE
    for known in facts.ranges:
        outcomes &= _starts_with_in_range(predicate.literals[0], known)
    return outcomes


def _starts_with_in_range(prefix: str, known: Range) -> Outcomes:
    if known.transform.kind not in ("identity", "truncate"):
        return TRUE | FALSE
    compared = prefix if known.transform.is_identity else prefix[: known.transform.width]
    ends = [None if bound is None else bound[: len(compared)] for bound in (known.lower, known.upper)]
    if (ends[0] is not None and ends[0] > compared) or (ends[1] is not None and ends[1] < compared):
        return FALSE
    if ends == [compared, compared] and compared == prefix:
        return TRUE
    return TRUE | FALSE


_VALUE_OUTCOMES: dict[Operation, Callable[[Predicate, Facts], Outcomes]] = {
    Operation.LT: _compare(LESS),
    Operation.LT_EQ: _compare(LESS | EQUAL),
    Operation.GT: _compare(GREATER),
    Operation.GT_EQ: _compare(GREATER | EQUAL),
    Operation.EQ: _compare(EQUAL),
    Operation.IN: _is_in,
    Operation.STARTS_WITH: _starts_with,
}


# --- catalog.planning.judging -----------------------------------------------------------------------------------------
#
# What a whole filter comes to for some rows, and what is left of it for readers to check. Core.
#
# A file is read if some row of it may make the filter true. Of its filter is left what statistics do not settle: parts
# that are true of every row go, so that a reader of one day's partition does not compare the day again.


FactsOf: TypeAlias = Callable[[int], Facts]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a filter may come to, and the JSON of what is left to check."""

    outcomes: Outcomes
    residual: Any

    @property
    def may_match(self) -> bool:
        """Tell whether some row may make the filter true."""
        return bool(self.outcomes & TRUE)


def judge(expression: Expression, facts_of: FactsOf) -> Judgement:
    """Judge a filter by the facts of its columns, which are looked up by field id."""
    match expression:
        case Constant():
            outcomes = TRUE if expression.value else FALSE
            return Judgement(outcomes, expression.json)
        case Opaque():
            return Judgement(EVERY_OUTCOME, expression.json)
        case Predicate():
            return _settled(predicate_outcomes(expression, facts_of(expression.column.field_id)), expression.json)
        case Not():
            child = judge(expression.child, facts_of)
            unchanged = child.residual is expression.child.json
            residual = expression.json if unchanged else {"type": "not", "child": child.residual}
            return _settled(negate(child.outcomes), residual)
        case Junction():
            return _judge_junction(expression, facts_of)


def _judge_junction(junction: Junction, facts_of: FactsOf) -> Judgement:
    # One part that can come to `decisive` only decides the whole; one that can come to its opposite only adds nothing.
    combine, decisive, neutral = (both, FALSE, TRUE) if junction.kind == "and" else (_any, TRUE, FALSE)
    outcomes, kept, unchanged = neutral, [], True
    for node in junction.children:
        child = judge(node, facts_of)
        if child.outcomes == decisive:
            return _settled(decisive, None)
        outcomes = combine(outcomes, child.outcomes)
        unchanged = unchanged and child.residual is node.json
        if child.outcomes != neutral:
            kept.append(child.residual)
    return _settled(outcomes, junction.json if unchanged or not kept else join(junction.kind, kept))


def _any(one: Outcomes, other: Outcomes) -> Outcomes:
    return negate(both(negate(one), negate(other)))


def _settled(outcomes: Outcomes, residual: Any) -> Judgement:
    if outcomes == TRUE:
        return Judgement(outcomes, True)
    if outcomes == FALSE:
        return Judgement(outcomes, False)
    return Judgement(outcomes, residual)


# --- catalog.planning.partitions --------------------------------------------------------------------------------------
#
# What partitions and statistics say of columns, as facts. Core: owns the reading of specs, tuples and metrics.


FindColumn: TypeAlias = Callable[[int], Column | None]

# Of the values of a transform that we do not know, whose kind only its inventor knows.
_UNKNOWN_TYPE = "string"
_METRICS = ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")


@dataclass(frozen=True, slots=True)
class PartitionField:
    """One field of a spec. Without a transform it tells nothing about its source."""

    source_id: int
    source_type: str
    transform: Transform | None
    type_: str
    is_void: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """A partition spec, with the types of its fields."""

    spec_id: int
    fields: tuple[PartitionField, ...]

    @property
    def is_partitioned(self) -> bool:
        """Tell whether files of this spec are apart by anything."""
        return not all(field.is_void for field in self.fields)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of its partition values."""
        return tuple(field.type_ for field in self.fields)


def read_specs(specs: Iterable[Mapping[str, Any]], find_column: FindColumn) -> dict[int, Spec]:
    """Read a table's specs, whose columns are looked up by field id."""
    return {
        spec["spec-id"]: Spec(spec["spec-id"], tuple(_read_field(field, find_column) for field in spec["fields"]))
        for spec in specs
    }


def tuple_facts(spec: Spec, values: Sequence[Any], column: Column) -> Facts:
    """Say what a file's partition tuple tells about a column."""
    facts = NOTHING_KNOWN
    for field, value in zip(spec.fields, values, strict=True):
        if field.source_id == column.field_id and field.transform is not None:
            facts &= _value_facts(field, value)
    return facts


def summary_facts(spec: Spec, summaries: Sequence[Mapping[str, Any]] | None, column: Column) -> Facts:
    """Say what a manifest's summary of its partitions tells about a column."""
    facts = NOTHING_KNOWN
    if summaries is None or len(summaries) != len(spec.fields):
        return facts
    for field, summary in zip(spec.fields, summaries, strict=True):
        if field.source_id == column.field_id and field.transform is not None:
            facts &= _summary_facts(field, summary)
    return facts


def metrics_facts(file: Mapping[str, Any], column: Column) -> Facts:
    """Say what a file's column statistics tell about a column."""
    rows = file["record_count"]
    counted, nulls, nans, lower, upper = (column_value(file, name, column.field_id) for name in _METRICS)
    # Where a struct around the field is null, some writers count nothing: then the field is null more often than told.
    nulls_are_told = not column.nested or counted == rows
    total = counted if counted is not None or column.nested else rows
    return Facts(
        nulls=not (nulls_are_told and nulls == 0),
        nans=nans != 0,
        values=not (total and total == (nulls or 0) + (nans or 0)),
        ranges=make_range(column.type_, IDENTITY, decode_bound(column.type_, lower), decode_bound(column.type_, upper)),
    )


def _read_field(field: Mapping[str, Any], find_column: FindColumn) -> PartitionField:
    name, sources = field["transform"], source_ids(field)
    source = find_column(sources[0])
    source_type = source.type_ if source is not None else _UNKNOWN_TYPE
    transform = parse_transform(name) if len(sources) == 1 else None
    type_ = result_type(transform, source_type) if transform is not None else None
    is_void = name == "void"
    return PartitionField(
        source_id=sources[0],
        source_type=source_type,
        transform=None if type_ is None or is_void else transform,
        type_=type_ or (source_type if is_void else _UNKNOWN_TYPE),
        is_void=is_void,
    )


def _value_facts(field: PartitionField, value: Any) -> Facts:
    assert field.transform is not None
    if value is None or is_nan(value):
        return Facts(nulls=value is None, nans=value is not None, values=False, ranges=())
    ranges = make_range(field.source_type, field.transform, value, value)
    return Facts(nulls=False, nans=False, values=True, ranges=ranges)


def _summary_facts(field: PartitionField, summary: Mapping[str, Any]) -> Facts:
    """Read a summary. Bounds are left out where no value has any, unless nothing explains their absence."""
    assert field.transform is not None
    lower, upper = (decode_bound(field.type_, summary.get(name)) for name in ("lower_bound", "upper_bound"))
    nulls, nans = summary["contains_null"], summary.get("contains_nan")
    explained = summary.get("lower_bound") is None and (nulls or nans)
    ranges = make_range(field.source_type, field.transform, lower, upper)
    return Facts(nulls=nulls, nans=nans is not False, values=not explained, ranges=ranges)
