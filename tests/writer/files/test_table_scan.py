"""Reading a table back: every file once and in order, only those that can matter, and columns by their ids."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from pyiceberg.types import StringType

from lakefeed.contract.errors import CatalogError
from lakefeed.iceberg.manifests import ListHeader, decode_manifest_list, encode_manifest_list
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.files.scan import find_files, read_columns
from tests.writer.quarantine.bench import USERS, changes_of, lake_bench


async def load(bench) -> TableState:
    return await bench.context.committer.load(USERS)


async def read(bench, *names, **within):
    state = await load(bench)
    files = await find_files(state, bench.context.store, within=within)
    tables = [await read_columns(file, state, bench.context.store, names=names) for file in files]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


async def test_files_come_in_the_order_of_commits_also_after_their_manifests_were_merged(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1}}))
        with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
            catalog.load_table("default.users").transaction().set_properties(
                {"commit.manifest.min-count-to-merge": "3"}
            ).commit_transaction()
        for sequence in range(2, 8):
            await bench.write(USERS, changes_of({sequence: {"id": sequence}}))
        assert await read(bench, "_cdc_sequence") == [(n,) for n in range(1, 8)]


async def test_a_file_whose_bounds_are_elsewhere_is_not_read(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1}, 2: {"id": 2}}))
        await bench.write(USERS, changes_of({5: {"id": 5}}, source="a bank whose name is longer than bounds are"))
        assert await read(bench, "id", _cdc_sequence=(2, 4)) == [(1,), (2,)]
        assert await read(bench, "id", _cdc_sequence=(3, 4)) == []
        assert await read(bench, "id", _cdc_sequence=(5, 5)) == [(5,)]
        assert await read(bench, "id", _cdc_source=("shop", "shop")) == [(1,), (2,)]
        same = "a bank whose name is longer than bounds are"
        assert await read(bench, "id", _cdc_source=(same, same)) == [(5,)]
        assert await read(bench, "id", _cdc_timestamp=(0, 1)) == []


async def test_columns_are_found_by_their_ids_and_are_null_where_a_file_lacks_them(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1, "name": "Ada"}}))
        with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
            table = catalog.load_table("default.users")
            with table.update_schema() as schema:
                schema.rename_column("name", "full_name")
                schema.add_column("town", StringType())
        assert await read(bench, "full_name", "town") == [("Ada", None)]
        assert await read(bench, "town") == [(None,)]
        with pytest.raises(CatalogError, match="table lacks a column"):
            await read(bench, "name")


async def test_a_table_with_delete_files_is_refused(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1}}))
        state, store = await load(bench), bench.context.store
        assert state.manifest_list is not None
        current = decode_manifest_list(await store.read(state.manifest_list), state.manifest_list)
        deletes = {**current.manifests[0], "content": 1}
        location = f"{state.location}/metadata/with-deletes.avro"
        header = ListHeader(state.snapshot_id, None, state.last_sequence_number, state.format_version)
        await store.write(location, encode_manifest_list(replace(current, manifests=(deletes,)), header))
        with pytest.raises(CatalogError, match="table has delete files, which are not read here"):
            await find_files(replace(state, manifest_list=location), store)
