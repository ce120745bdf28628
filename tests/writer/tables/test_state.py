"""Lifecycle of a table, walked exhaustively: every reachable state, every event, every rule. And its retry state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest

from lakefeed.writer.tables.state import (
    BACKOFF,
    FLUSH,
    HEALTH,
    PAUSED_AFTER_ATTEMPTS,
    READING,
    Event,
    FlushPhase,
    Health,
    Lifecycle,
    Reading,
    RetryState,
)

UNOPENED = (Reading.OPENING, Reading.REOPENING)


def product(state: Lifecycle) -> tuple[Reading, FlushPhase, Health]:
    return state.reading, state.flush, state.health


def after(state: Lifecycle, *events: Event) -> Lifecycle | None:
    """Advance a copy; None if an event is not expected."""
    copied = copy.copy(state)
    try:
        for event in events:
            copied.advance(event)
    except AssertionError:
        return None
    return copied


# What table.py does in one step. Its eviction and its draining are several events.
STEPS: dict[str, Callable[[Lifecycle], tuple[Event, ...]]] = {
    **{
        event.name: lambda _, event=event: (event,)
        for event in Event
        if event not in (Event.LOG_SHARE_EXCEEDED, Event.LOG_SHARE_FREED, Event.EMPTIED)
    },
    "evict all, with rows": lambda _: (Event.CLOSED, Event.ROWS_EVICTED),
    "start draining": lambda _: (Event.CLOSED, Event.ROWS_EVICTED, Event.LOG_SHARE_EXCEEDED),
    "stop draining": lambda _: (Event.LOG_SHARE_FREED, Event.CLOSED),
    "emptied": lambda s: (Event.EMPTIED, Event.CLOSED) if s.health is Health.QUARANTINING else (Event.EMPTIED,),
}


def walk() -> Iterator[tuple[Lifecycle, str, Lifecycle]]:
    """Yield every step from every state that can be reached."""
    seen, todo = {product(Lifecycle())}, [Lifecycle()]
    while todo:
        state = todo.pop()
        for name, events in STEPS.items():
            following = after(state, *events(state))
            if following is None:
                continue
            yield state, name, following
            if product(following) not in seen:
                seen.add(product(following))
                todo.append(following)


REACHED = {product(state) for _, _, state in walk()}


def test_28_of_48_products_are_reachable():
    assert len(REACHED) == 28
    assert {reading for reading, _, _ in REACHED} == set(Reading)
    assert {flush for _, flush, _ in REACHED} == set(FlushPhase)
    assert {health for _, _, health in REACHED} == set(Health)


def test_a_table_without_marks_has_no_flush():
    assert not [each for each in REACHED if each[0] in UNOPENED and each[1] is not FlushPhase.IDLE]


def test_a_table_that_drains_to_quarantine_has_no_flush():
    assert not [each for each in REACHED if each[2] is Health.QUARANTINING and each[1] is not FlushPhase.IDLE]


def test_only_eviction_takes_a_table_behind_and_only_catching_up_brings_it_back():
    for before, step, state in walk():
        if state.is_behind and not before.is_behind:
            assert step in ("ROWS_EVICTED", "evict all, with rows", "start draining")
        if before.is_behind and not state.is_behind:
            assert step == "CAUGHT_UP"


def test_marks_are_loaded_again_after_every_abandoned_flush_and_after_draining():
    for before, step, state in walk():
        if before.flush is not FlushPhase.IDLE and state.flush is FlushPhase.IDLE and step != "FLUSH_COMMITTED":
            assert state.reading in UNOPENED
        if before.health is Health.QUARANTINING and state.health is not Health.QUARANTINING:
            assert state.reading in UNOPENED


def test_only_a_commit_or_an_empty_table_makes_a_failing_table_healthy():
    for before, step, state in walk():
        if before.health is not Health.OK and state.health is Health.OK:
            assert step in ("FLUSH_COMMITTED", "emptied")


def test_every_state_leads_to_a_healthy_live_table():
    forward: dict[tuple[Reading, FlushPhase, Health], set[tuple[Reading, FlushPhase, Health]]] = {}
    for before, _, state in walk():
        forward.setdefault(product(state), set()).add(product(before))
    found, todo = set(), [(Reading.LIVE, FlushPhase.IDLE, Health.OK)]
    while todo:
        state = todo.pop()
        if state not in found:
            found.add(state)
            todo += forward.get(state, ())
    assert found == REACHED


def test_every_row_of_every_table_is_used():
    for transitions, machine in ((READING, 0), (FLUSH, 1), (HEALTH, 2)):
        for state, row in transitions.items():
            for event in row:
                starts = [Lifecycle(*each) for each in REACHED if each[machine] is state]
                assert any(after(start, event) is not None for start in starts), (state, event)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (Lifecycle(), Event.FLUSH_STARTED),
        (Lifecycle(Reading.LIVE), Event.CAUGHT_UP),
        (Lifecycle(Reading.LIVE), Event.OPENED),
        (Lifecycle(Reading.LIVE), Event.FLUSH_COMMITTED),
        (Lifecycle(Reading.LIVE, FlushPhase.WRITING), Event.FLUSH_STARTED),
        (Lifecycle(Reading.LIVE, FlushPhase.WRITING), Event.EMPTIED),
        (Lifecycle(Reading.BEHIND), Event.EMPTIED),
        (Lifecycle(Reading.LIVE, FlushPhase.COMMITTING, Health.PAUSED), Event.LOG_SHARE_EXCEEDED),
        (Lifecycle(Reading.LIVE, health=Health.RETRYING), Event.LOG_SHARE_EXCEEDED),
        (Lifecycle(Reading.BEHIND, health=Health.QUARANTINING), Event.FLUSH_STARTED),
    ],
)
def test_an_event_that_must_not_happen_is_found_and_changes_nothing(state, event):
    before = product(state)
    with pytest.raises(AssertionError):
        state.advance(event)
    assert product(state) == before


# -- retry state


def failing(*commits: int) -> tuple[RetryState, list[Event]]:
    retry = RetryState()
    events = [
        retry.note_failure(f"failure {number}", now=float(number), jitter=0.5, commits=count)
        for number, count in enumerate(commits)
    ]
    return retry, events


def test_one_failure_is_retried_and_several_in_a_row_pause_the_table():
    retry, events = failing(*[0] * (PAUSED_AFTER_ATTEMPTS + 1))
    assert events == [Event.FAILED] * (PAUSED_AFTER_ATTEMPTS - 1) + [Event.FAILED_AT_LIMIT] * 2
    assert (retry.reason, retry.since) == (f"failure {PAUSED_AFTER_ATTEMPTS}", 0.0)
    state = Lifecycle()
    for event in events:
        state.advance(event)
    assert state.health is Health.PAUSED


def test_delays_grow_to_a_limit_however_long_it_lasts():
    delays = [failing(*[0] * count)[0].retry_at - (count - 1) for count in (1, 2, 3, 20, 2_000)]
    assert delays == sorted(delays)
    assert delays[-1] <= BACKOFF.max_s


def test_success_clears_all_failures():
    retry, _ = failing(0, 5, 5)
    retry.clear()
    assert retry == RetryState()


def test_failures_are_local_to_a_table_once_others_commit_between_them():
    assert not failing(7)[0].is_local
    assert not failing(7, 7, 7)[0].is_local, "no table commits: storage or catalog are down for all"
    assert failing(7, 8)[0].is_local
