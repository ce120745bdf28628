"""Commits that a catalog refuses: planned again if the table has changed, else reported at once."""

from __future__ import annotations

import contextlib

import pytest

from lakefeed.backoff import Backoff
from lakefeed.contract.errors import CatalogError, CommitRefused
from lakefeed.iceberg.avro import FORMAT_WITH_ROW_IDS
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.state import table_state_from
from tests.fakes import BluntCatalog, CatalogFault
from tests.writer.committing import COMMIT_TIMEOUT_S, USERS, Bench, open_bench
from tests.writer.conftest import Lake
from tests.writer.feeding import read_columns, read_sequences, running_feed, shop


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr("lakefeed.writer.tables.state.BACKOFF", Backoff(0.02, 0.05))


@contextlib.asynccontextmanager
async def open_blunt_bench(lake: Lake):
    async with (
        BluntCatalog(lake.catalog_url) as blunt,
        open_store(lake.storage) as store,
        open_catalog(blunt.url, timeout_s=COMMIT_TIMEOUT_S) as catalog,
    ):
        await catalog.load_config()
        yield Bench(lake, store, blunt, Committer(catalog, store))


async def commit_to_branch(lake: Lake) -> None:
    """Commit to another branch, which raises the table's counters and leaves main where it is."""
    async with open_catalog(lake.catalog_url) as catalog:
        state = table_state_from(USERS, await catalog.load_table(USERS))
        snapshot = {
            "snapshot-id": 1,
            "parent-snapshot-id": state.snapshot_id,
            "sequence-number": state.last_sequence_number + 1,
            "timestamp-ms": state.last_updated_ms + 1,
            "manifest-list": state.manifest_list,
            "summary": {"operation": "append"},
            "schema-id": state.schema.schema_id,
        }
        if state.format_version >= FORMAT_WITH_ROW_IDS:
            snapshot |= {"first-row-id": state.next_row_id, "added-rows": 7}
        updates = (
            {"action": "add-snapshot", "snapshot": snapshot},
            {"action": "set-snapshot-ref", "ref-name": "audit", "type": "branch", "snapshot-id": 1},
        )
        await catalog.commit_table(USERS, Request((), updates))


@pytest.mark.parametrize("format_version", [2, 3])
async def test_a_table_whose_other_branch_moves_goes_on_in_a_catalog_that_answers_400(
    tmp_path, local_lake, format_version
):
    async with (
        BluntCatalog(local_lake.catalog_url) as blunt,
        running_feed(tmp_path, local_lake, catalog_url=blunt.url, format_version=format_version) as running,
    ):
        await running.append(range(1, 3))
        await running.flush()
        await commit_to_branch(local_lake)
        before = blunt.commits_seen
        await running.append(range(3, 5))
        await running.flush()
        assert running.status("default.users")["problem"] is None
        assert blunt.commits_seen - before == 2, "refused once, then planned on what the table is"
    assert read_sequences(local_lake) == shop(1, 2, 3, 4)


async def test_a_column_that_is_dropped_comes_back_with_its_values_in_a_catalog_that_answers_400(tmp_path, local_lake):
    async with (
        BluntCatalog(local_lake.catalog_url) as blunt,
        running_feed(tmp_path, local_lake, catalog_url=blunt.url) as running,
    ):
        for n in (1, 2):
            await running.append(range(n, n + 1), row=lambda n: {"id": n, "note": f"n{n}"})
            await running.flush()
            if n == 1:
                with (
                    contextlib.closing(local_lake.open_pyiceberg()) as catalog,
                    catalog.load_table("default.users").update_schema() as update,
                ):
                    update.delete_column("note")
    assert read_columns(local_lake, "id", "note") == [(1, None), (2, "n2")]


async def test_new_columns_that_are_refused_are_asked_for_again_from_what_the_table_is(tmp_path, local_lake):
    async with (
        BluntCatalog(local_lake.catalog_url) as blunt,
        running_feed(tmp_path, local_lake, catalog_url=blunt.url) as running,
    ):
        await running.append(range(1, 2))
        await running.flush()
        with (
            contextlib.closing(local_lake.open_pyiceberg()) as catalog,
            catalog.load_table("default.users").update_schema() as update,
        ):
            update.rename_column("id", "number")
        await running.append(range(2, 3), row=lambda n: {"id": n, "more": True})
        await running.flush()
    assert read_columns(local_lake, "number", "id", "more") == [(1, None, None), (None, 2, True)]


async def test_a_refusal_without_a_known_cause_is_reported_after_one_check(local_lake):
    async with open_bench(local_lake) as bench:
        state = await bench.create()
        state = (await bench.committer.commit(state, await bench.make_flush(state, 1, 3))).state
        seen = bench.flaky.commits_seen
        bench.flaky.broken_tables["users"] = CatalogFault.BAD_REQUEST
        with pytest.raises(CommitRefused, match="status=400"):
            await bench.committer.commit(state, await bench.make_flush(state, 4, 6))
        assert bench.flaky.commits_seen - seen <= 2
        del bench.flaky.broken_tables["users"]
        await bench.committer.commit(state, await bench.make_flush(state, 4, 6))
        assert bench.sequences() == [1, 2, 3, 4, 5, 6]


async def test_a_rejected_credential_is_not_checked_further(local_lake):
    async with open_bench(local_lake) as bench:
        state = await bench.create()
        bench.flaky.commit_faults.append(CatalogFault.FORBIDDEN)
        # Whoever looked would find the catalog down.
        bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE] * 10)
        with pytest.raises(CatalogError, match="status=403"):
            await bench.committer.commit(state, await bench.make_flush(state, 1, 3))


async def test_a_commit_that_landed_unheard_and_is_then_refused_is_found(local_lake):
    async with open_blunt_bench(local_lake) as bench:
        state = await bench.create()
        flush = await bench.make_flush(state, 1, 3)
        bench.flaky.commit_faults.append(CatalogFault.SILENCE_AFTER)
        bench.flaky.load_faults.extend([CatalogFault.ERROR_BEFORE])
        landed = await bench.committer.commit(state, flush)
        again = await bench.committer.commit(state, flush)
        assert landed.snapshot_id == again.snapshot_id == (await bench.committer.load(USERS)).snapshot_id
        assert bench.sequences() == [1, 2, 3]
