"""Every recording, folded to rows, is what PostgreSQL had in the end, however it was cut, repeated or interrupted."""

from __future__ import annotations

import pytest

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import Change, DebeziumEvent
from lakefeed.ingest.debezium.positions import Positions, digest_of
from lakefeed.ingest.debezium.transactions import IncompleteReason, TransactionTally
from tests.ingest.debezium import postgres_text
from tests.ingest.debezium.folding import Mirror
from tests.ingest.debezium.recordings import CONFIG, EXPECTED, NAMES, load, load_events

ALL = set(NAMES)

# Unwrapping drops the row before an update, which alone says which of the rows without a key it was.
KEYLESS_UPDATE = ("public.no_key_full", "*")

# What the events cannot tell. The recording lists more: the rest is put right by the keys that the configuration names,
# by carrying values over from the old key, and by the logical types of v1.
GAPS = {
    ("public.metrics", "*"): ALL,
    ("public.to_truncate", "*"): {"v4"},
    ("public.to_truncate_renamed", "*"): {"v4"},
    ("public.generated_cols", "area"): ALL,
    **{("public.null_vs_default", column): ALL - {"v2"} for column in ("n", "t", "b", "d")},
    **{("public.edge_values", column): {"v1"} for column in ("n", "nfree")},
    **{("public.edge_values", column): ALL - {"v1"} for column in ("dt", "ts")},
    ("public.net_array_types", "ia2"): ALL,
    KEYLESS_UPDATE: {"v4"},
}


def is_gap(table: str, column: str, variant: str) -> bool:
    return variant in GAPS.get((table, "*"), ()) or variant in GAPS.get((table, column), ())


def changes_of(requests: list[list[DebeziumEvent]]) -> list[Change]:
    return [event for events in requests for event in events if isinstance(event, Change)]


def differences(mirror: Mirror, variant: str, *, besides: frozenset[tuple[str, str]] = frozenset()) -> list[str]:
    """Compare rows with what PostgreSQL printed, but for the gaps and the columns that are to be left out besides."""
    return [
        difference
        for name, table in EXPECTED["tables"].items()
        if table["rows"] is not None and not is_gap(name, "*", variant)
        for difference in table_differences(mirror, name, variant, besides=besides)
    ]


def table_differences(
    mirror: Mirror, name: str, variant: str, *, besides: frozenset[tuple[str, str]] = frozenset()
) -> list[str]:
    table = EXPECTED["tables"][name]
    columns = [
        column
        for column in table["columns"]
        if not is_gap(name, column["name"], variant) and (name, column["name"]) not in besides
    ]

    def same_row(row: dict, printed: dict) -> bool:
        return all(
            postgres_text.same(row.get(column["name"]), printed[column["name"]], column["type"], variant)
            for column in columns
        )

    left = list(mirror.of(name))
    missing = []
    for printed in table["rows"]:
        found = next((row for row in left if same_row(row, printed)), None)
        if found is None:
            missing.append(f"{name}: no row is {printed}")
        else:
            left.remove(found)
    return missing + [f"{name}: nobody expects {row}" for row in left]


def test_gaps_are_among_those_that_the_recording_lists():
    listed = {(gap["table"], column) for gap in EXPECTED["known_gaps"] for column in gap["columns"]}

    assert GAPS.keys() - {KEYLESS_UPDATE} <= listed


@pytest.mark.parametrize("variant", NAMES)
def test_recording_folds_to_the_rows_of_the_source(variant):
    mirror = Mirror()

    mirror.apply(changes_of(load_events(variant)))

    assert differences(mirror, variant) == []


@pytest.mark.parametrize("variant", ["v1", "v2", "v3a", "v4", "v5"])
@pytest.mark.parametrize("size", [2, 7, 50])
def test_recording_in_batches_folds_to_the_same_rows(variant, size):
    mirror = Mirror()
    requests = load(variant)

    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        body = b"[" + b",".join(request.body for request in batch) + b"]"
        mirror.apply(changes_of([read_events(body, batch[0].headers, CONFIG)]))

    assert differences(mirror, variant) == []


@pytest.mark.parametrize("variant", NAMES)
def test_every_column_of_every_table_is_compared(variant):
    mirror = Mirror()
    mirror.apply(changes_of(load_events(variant)))
    tables = {name: table for name, table in EXPECTED["tables"].items() if table["rows"] and name in mirror.rows}

    for name, table in tables.items():
        for column in (each["name"] for each in table["columns"] if not is_gap(name, each["name"], variant)):
            for row in (row for row in mirror.of(name) if row.get(column) is not None):
                value, row[column] = row[column], None
                assert table_differences(mirror, name, variant)
                row[column] = value


@pytest.mark.parametrize("variant", NAMES)
def test_nothing_of_a_recording_looks_like_a_repeat(variant):
    positions = Positions()

    for request, events in zip(load(variant), load_events(variant), strict=True):
        plan = positions.plan(events, digest=digest_of(request.body))
        assert not plan.is_retry
        assert plan.repeated == ()
        positions = plan.after

    assert positions.taken == len(changes_of(load_events(variant)))


@pytest.mark.parametrize("variant", NAMES)
def test_request_that_is_retried_is_taken_once(variant):
    positions = Positions()
    taken = []

    for request, events in zip(load(variant), load_events(variant), strict=True):
        for _ in range(3):
            plan = positions.plan(events, digest=digest_of(request.body))
            taken += [events[index] for index in plan.fresh]
            positions = plan.after

    assert taken == changes_of(load_events(variant))


@pytest.mark.parametrize("variant", sorted(ALL - {"v4", "v5"}))
def test_every_recorded_transaction_arrived_whole(variant):
    tally = TransactionTally()

    reports = [tally.observe(event) for events in load_events(variant) for event in events]

    assert [report for report in reports if report] == []


def test_truncates_that_unwrapping_drops_are_reported_missing():
    tally = TransactionTally()

    reports = [tally.observe(event) for events in load_events("v4") for event in events]

    found = [(report.reason, dict(report.missing)) for report in reports if report]
    assert found == [
        (IncompleteReason.MISSING, {"public.to_truncate": 1}),
        (IncompleteReason.MISSING, {"public.to_truncate": 1, "public.to_truncate_renamed": 1}),
    ]


def test_events_without_marks_of_transactions_are_not_reported():
    tally = TransactionTally()

    reports = [tally.observe(event) for events in load_events("v5") for event in events]

    assert [report for report in reports if report] == []
