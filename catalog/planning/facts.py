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
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from catalog.planning.columns import FLOATS
from catalog.planning.expressions import Operation, Predicate
from catalog.planning.transforms import IDENTITY, TIME_KINDS, Transform, apply_transform

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

_GREATEST = {"int": 2**31 - 1, "long": 2**63 - 1}


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
    # Near the least number of its type, truncating wraps around to the greatest.
    if (
        transform.kind == "truncate"
        and type_ in _GREATEST
        and (upper is None or upper > _GREATEST[type_] - transform.width)
    ):
        return ()
    # Early versions of Iceberg rounded times before 1970 up, not down.
    if transform.kind in TIME_KINDS and lower is not None and lower <= 0:
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
