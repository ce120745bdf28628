"""What a whole filter comes to for some rows, and what is left of it for readers to check. Core.

A file is read if some row of it may make the filter true. Of its filter is left what statistics do not settle: parts
that are true of every row go, so that a reader of one day's partition does not compare the day again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from catalog.planning.expressions import Constant, Expression, Junction, Not, Opaque, Predicate, join
from catalog.planning.facts import EVERY_OUTCOME, FALSE, TRUE, Facts, Outcomes, both, negate, predicate_outcomes

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
