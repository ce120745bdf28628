"""PyIceberg and DuckDB as real clients, of a catalog on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchTableError,
    NoSuchViewError,
    TableAlreadyExistsError,
    ValidationError,
    ViewAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.statistics import StatisticsFile
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from pyiceberg.view.metadata import SQLViewRepresentation, ViewVersion

from tests.catalog.conftest import Client, Server
from tests.clients import open_duckdb, open_pyiceberg

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "v", StringType(), required=False))
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "v": ["a", "b", "c"]})


@pytest.fixture
def server(start_server: Callable[..., Server], lasting_database: str) -> Server:
    return start_server(database=lasting_database)


@pytest.fixture
def db(pyiceberg: RestCatalog) -> RestCatalog:
    pyiceberg.create_namespace("db")
    return pyiceberg


def test_rows_appended_by_pyiceberg_are_read_back_by_another_client(db: RestCatalog, server: Server):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    table.append(ROWS)
    other = open_pyiceberg(server.url)
    assert other.load_table("db.t").scan().to_arrow().num_rows == 6
    other.close()


def test_rows_are_replaced_and_deleted_by_pyiceberg(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    table.overwrite(ROWS.slice(0, 2))
    table.delete("id = 1")
    assert db.load_table("db.t").scan().to_arrow()["id"].to_pylist() == [2]


def test_schema_evolves_and_old_rows_stay_readable(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    with table.update_schema() as update:
        update.add_column("extra", StringType())
        update.rename_column("v", "w")
    table.append(pa.table({"id": pa.array([4], pa.int64()), "w": ["d"], "extra": ["x"]}))
    loaded = db.load_table("db.t")
    assert [field.name for field in loaded.schema().fields] == ["id", "w", "extra"]
    assert sorted(row["w"] for row in loaded.scan().to_arrow().to_pylist()) == ["a", "b", "c", "d"]


def test_partition_spec_of_a_new_table_follows_its_columns(db: RestCatalog):
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "v"))
    table = db.create_table("db.t", SCHEMA, partition_spec=spec)
    assert [field.source_id for field in table.spec().fields] == [2]
    table.append(ROWS)
    assert table.scan().to_arrow().num_rows == 3


def test_partition_evolution_and_sort_order(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    with table.update_spec() as update:
        update.add_identity("v")
    with table.update_sort_order() as order:
        order.asc("id", transform=BucketTransform(2))
    loaded = db.load_table("db.t")
    assert [field.name for field in loaded.spec().fields] == ["v"]
    assert loaded.sort_order().order_id == 1


def test_properties_are_set_and_removed(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA, properties={"a": "1"})
    with table.transaction() as transaction:
        transaction.set_properties({"b": "2"})
        transaction.remove_properties("a")
    properties = db.load_table("db.t").properties
    assert properties == {"b": "2", "write.parquet.compression-codec": "zstd"}


def test_tags_and_branches(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    first = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_tag(first, "v1").create_branch(first, "dev").commit()
    table.append(ROWS)
    refs = db.load_table("db.t").refs()
    assert (refs["v1"].snapshot_id, refs["dev"].snapshot_id) == (first, first)
    assert refs["main"].snapshot_id != first


def test_staged_create_commits_table_and_rows_at_once(db: RestCatalog):
    with db.create_table_transaction("db.t", SCHEMA) as transaction:
        transaction.append(ROWS)
        with pytest.raises(NoSuchTableError):
            db.load_table("db.t")
    assert db.load_table("db.t").scan().to_arrow().num_rows == 3


def test_table_keeps_its_rows_through_a_rename_and_its_name_is_free_again(db: RestCatalog):
    db.create_namespace("other")
    db.create_table("db.t", SCHEMA).append(ROWS)
    db.rename_table("db.t", "other.t")
    second = db.create_table("db.t", SCHEMA)
    assert db.load_table("other.t").scan().to_arrow().num_rows == 3
    assert second.location() != db.load_table("other.t").location()


def test_dropped_table_is_gone(db: RestCatalog):
    db.create_table("db.t", SCHEMA)
    assert db.table_exists("db.t")
    db.drop_table("db.t")
    assert not db.table_exists("db.t")
    with pytest.raises(NoSuchTableError, match=r"Table does not exist: db\.t"):
        db.load_table("db.t")


def files_of(table: Table) -> set[Path]:
    return {path for path in Path(table.location().removeprefix("file://")).rglob("*") if path.is_file()}


def test_purged_table_leaves_no_file_and_other_tables_keep_theirs(db: RestCatalog):
    purged, other = (db.create_table(name, SCHEMA) for name in ("db.t", "db.other"))
    for table in (purged, other):
        table.append(ROWS)
        table.append(ROWS)
        table.delete("id = 1")
    assert len(files_of(purged)) > 10
    before = files_of(other)
    db.purge_table("db.t")
    assert not db.table_exists("db.t")
    assert files_of(purged) == set()
    assert files_of(other) == before
    assert db.load_table("db.other").scan().to_arrow().num_rows == 4


def test_table_is_not_purged_while_another_name_has_its_files(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    db.register_table("db.alias", table.metadata_location)
    db.load_table("db.alias").append(ROWS)
    before = files_of(table)
    with pytest.raises((BadRequestError, ValidationError), match=r"Cannot purge table: .* db\.alias"):
        db.purge_table("db.t")
    assert files_of(table) == before
    db.drop_table("db.t")
    db.purge_table("db.alias")
    assert not {path for path in files_of(table) if path.suffix == ".parquet"}


def test_register_brings_a_dropped_table_back(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    db.drop_table("db.t")
    again = db.register_table("db.back", table.metadata_location)
    assert again.scan().to_arrow().num_rows == 3


def test_register_takes_the_place_of_a_table_only_if_asked_to(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    empty = table.metadata_location
    table.append(ROWS)
    with pytest.raises(TableAlreadyExistsError):
        db.register_table("db.t", empty)
    assert db.register_table("db.t", empty, overwrite=True).scan().to_arrow().num_rows == 0


def test_rows_are_upserted_and_partitions_replaced(db: RestCatalog):
    schema = Schema(*SCHEMA.fields, identifier_field_ids=[])
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "v"))
    table = db.create_table("db.t", schema, partition_spec=spec)
    table.append(ROWS)
    changed = table.upsert(pa.table({"id": pa.array([3, 4], pa.int64()), "v": ["z", "d"]}), join_cols=["id"])
    assert (changed.rows_updated, changed.rows_inserted) == (1, 1)
    table.dynamic_partition_overwrite(pa.table({"id": pa.array([9], pa.int64()), "v": ["a"]}))
    rows = db.load_table("db.t").scan().to_arrow().to_pylist()
    assert sorted((row["id"], row["v"]) for row in rows) == [(2, "b"), (3, "z"), (4, "d"), (9, "a")]


def test_files_are_added_where_they_are(db: RestCatalog, tmp_path: Path):
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    table = db.create_table("db.t", SCHEMA)
    table.add_files([f"file://{tmp_path}/rows.parquet"])
    assert db.load_table("db.t").scan().to_arrow() == table.scan().to_arrow()
    assert db.load_table("db.t").name_mapping() is not None


def test_the_past_is_read_rolled_back_to_and_expired(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    for _ in range(3):
        table.append(ROWS)
    first, second, third = (snapshot.snapshot_id for snapshot in table.snapshots())
    assert db.load_table("db.t").scan(snapshot_id=first).to_arrow().num_rows == 3
    table.manage_snapshots().rollback_to_snapshot(second).commit()
    assert db.load_table("db.t").scan().to_arrow().num_rows == 6
    table.manage_snapshots().set_current_snapshot(third).commit()
    table.maintenance.expire_snapshots().by_ids([first]).commit()
    assert [each.snapshot_id for each in db.load_table("db.t").snapshots()] == [second, third]


def test_tags_and_branches_are_removed(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    snapshot = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_tag(snapshot, "v1").create_branch(snapshot, "dev").commit()
    table.append(ROWS, branch="dev")
    assert db.load_table("db.t").scan().use_ref("dev").to_arrow().num_rows == 6
    table.manage_snapshots().remove_tag("v1").remove_branch("dev").commit()
    assert db.load_table("db.t").refs().keys() == {"main"}


def test_statistics_are_set_and_removed(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    snapshot = table.current_snapshot().snapshot_id
    statistics = StatisticsFile(
        snapshot_id=snapshot,
        statistics_path=f"{table.location()}/metadata/some.stats",
        file_size_in_bytes=1,
        file_footer_size_in_bytes=1,
        blob_metadata=[],
    )
    with table.update_statistics() as update:
        update.set_statistics(statistics)
    assert db.load_table("db.t").metadata.statistics == [statistics]
    with table.update_statistics() as update:
        update.remove_statistics(snapshot)
    assert db.load_table("db.t").metadata.statistics == []


def test_metadata_tables_show_the_history(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    for _ in range(2):
        table.append(ROWS)
    inspect = db.load_table("db.t").inspect
    assert inspect.snapshots()["operation"].to_pylist() == ["append", "append"]
    assert inspect.history().num_rows == 2
    assert inspect.metadata_log_entries().num_rows == 3
    assert inspect.files()["record_count"].to_pylist() == [3, 3]


def test_tables_are_made_in_every_version_and_upgraded(db: RestCatalog):
    tables = {
        number: db.create_table(f"db.v{number}", SCHEMA, properties={"format-version": number}) for number in "123"
    }
    assert [str(table.format_version) for table in tables.values()] == list(tables)
    with tables["1"].transaction() as transaction:
        transaction.upgrade_table_version(format_version=2)
    assert db.load_table("db.v1").format_version == 2


def test_stale_client_gets_a_conflict_and_succeeds_after_a_refresh(db: RestCatalog):
    fresh = db.create_table("db.t", SCHEMA, properties={"commit.retry.num-retries": "0"})
    stale = db.load_table("db.t")
    fresh.append(ROWS)
    with pytest.raises(CommitFailedException, match="branch main"):
        stale.append(ROWS)
    stale.refresh().append(ROWS)
    assert db.load_table("db.t").scan().to_arrow().num_rows == 6


def test_stale_client_that_tries_again_by_itself_succeeds(db: RestCatalog):
    fresh, stale = db.create_table("db.t", SCHEMA), db.load_table("db.t")
    fresh.append(ROWS)
    stale.append(ROWS)
    assert db.load_table("db.t").scan().to_arrow().num_rows == 6


def test_create_if_not_exists_creates_once(db: RestCatalog):
    db.create_namespace_if_not_exists("db", {"ignored": "yes"})
    first = db.create_table_if_not_exists("db.t", SCHEMA)
    assert db.create_table_if_not_exists("db.t", SCHEMA).metadata.table_uuid == first.metadata.table_uuid
    assert (db.namespace_exists("db"), db.namespace_exists("none")) == (True, False)


def test_views_are_created_loaded_listed_registered_and_dropped(db: RestCatalog, client: Client):
    version = ViewVersion(
        version_id=1,
        schema_id=0,
        timestamp_ms=1,
        summary={"engine-name": "test"},
        representations=[SQLViewRepresentation(type="sql", sql="SELECT 1 AS id", dialect="spark")],
        default_namespace=["db"],
    )
    view = db.create_view("db.v", SCHEMA, version, properties={"comment": "one"})
    assert db.load_view("db.v").metadata == view.metadata
    assert (db.view_exists("db.v"), db.view_exists("db.none")) == (True, False)
    assert (db.list_views("db"), db.list_tables("db")) == ([("db", "v")], [])
    with pytest.raises(ViewAlreadyExistsError):
        db.create_view("db.v", SCHEMA, version)
    with pytest.raises(TableAlreadyExistsError):
        db.create_table("db.v", SCHEMA)
    location = client.get("namespaces/db/views/v")[1]["metadata-location"]
    db.drop_view("db.v")
    assert db.register_view("db.back", location).metadata == view.metadata
    with pytest.raises(NoSuchViewError):
        db.load_view("db.v")


def test_names_in_use_are_rejected(db: RestCatalog):
    db.create_table("db.t", SCHEMA)
    with pytest.raises(TableAlreadyExistsError):
        db.create_table("db.t", SCHEMA)
    with pytest.raises(NamespaceAlreadyExistsError):
        db.create_namespace("db")
    with pytest.raises(NamespaceNotEmptyError):
        db.drop_namespace("db")


def test_nested_namespaces_with_awkward_names(pyiceberg: RestCatalog):
    pyiceberg.create_namespace(("a b",))
    pyiceberg.create_namespace(("a b", "c/d.e"))
    assert pyiceberg.list_namespaces(("a b",)) == [("a b", "c/d.e")]
    table = pyiceberg.create_table(("a b", "c/d.e", "t é/.%"), SCHEMA)
    table.append(ROWS)
    assert pyiceberg.list_tables(("a b", "c/d.e")) == [("a b", "c/d.e", "t é/.%")]
    assert pyiceberg.load_table(("a b", "c/d.e", "t é/.%")).scan().to_arrow().num_rows == 3


def test_namespace_properties(pyiceberg: RestCatalog):
    pyiceberg.create_namespace("db", {"a": "1", "b": "2"})
    summary = pyiceberg.update_namespace_properties("db", removals={"a", "none"}, updates={"c": "3"})
    assert (summary.removed, summary.missing, summary.updated) == (["a"], ["none"], ["c"])
    assert pyiceberg.load_namespace_properties("db") == {"b": "2", "c": "3"}


def test_lists_are_complete_when_the_client_asks_for_small_pages(db: RestCatalog, server: Server):
    for number in range(7):
        db.create_table(f"db.t{number}", SCHEMA)
        db.create_namespace(f"n{number}")
    paging = RestCatalog("paging", uri=server.url, **{"page-size": "2", "rest-page-size": "2"})
    assert len(paging.list_tables("db")) == 7
    assert len(paging.list_namespaces()) == 8
    paging.close()


def test_tables_and_rows_survive_a_restart(start_server: Callable[..., Server], lasting_database: str):
    first = start_server(database=lasting_database)
    before = open_pyiceberg(first.url)
    before.create_namespace("db", {"owner": "me"})
    before.create_table("db.t", SCHEMA).append(ROWS)
    before.close()
    first.stop()

    after = open_pyiceberg(start_server(database=lasting_database).url)
    assert after.load_namespace_properties("db") == {"owner": "me"}
    table = after.load_table("db.t")
    table.append(ROWS)
    assert after.load_table("db.t").scan().to_arrow().num_rows == 6
    after.close()


def test_duckdb_creates_fills_changes_and_drops_a_table(server: Server):
    with open_duckdb(server.url) as duck:
        duck.execute("CREATE SCHEMA lake.db")
        duck.execute("CREATE TABLE lake.db.t AS SELECT range AS id, 'x' AS v FROM range(10)")
        duck.execute("INSERT INTO lake.db.t VALUES (10, 'y')")
        duck.execute("DELETE FROM lake.db.t WHERE id < 5")
        duck.execute("UPDATE lake.db.t SET v = 'z' WHERE id = 7")
        assert duck.execute("SELECT count(*), count_if(v = 'z') FROM lake.db.t").fetchall() == [(6, 1)]
        duck.execute("DROP TABLE lake.db.t")
        assert duck.execute("SHOW ALL TABLES").fetchall() == []


def test_duckdb_commits_to_several_tables_at_once_or_not_at_all(server: Server, db: RestCatalog):
    with open_duckdb(server.url) as duck:
        for name in ("a", "b"):
            duck.execute(f"CREATE TABLE lake.db.{name} AS SELECT 0::BIGINT AS id")
        duck.execute("BEGIN")
        duck.execute("INSERT INTO lake.db.a VALUES (1)")
        duck.execute("UPDATE lake.db.b SET id = 1")
        assert [db.load_table(f"db.{name}").scan().to_arrow()["id"].to_pylist() for name in "ab"] == [[0], [0]]
        duck.execute("COMMIT")
        assert [sorted(db.load_table(f"db.{name}").scan().to_arrow()["id"].to_pylist()) for name in "ab"] == [
            [0, 1],
            [1],
        ]
        duck.execute("BEGIN")
        duck.execute("INSERT INTO lake.db.a VALUES (2)")
        duck.execute("INSERT INTO lake.db.b VALUES (2)")
        db.load_table("db.b").delete("id = 1")  # one of the two loses
        with pytest.raises(duckdb.Error):
            duck.execute("COMMIT")
    assert sorted(db.load_table("db.a").scan().to_arrow()["id"].to_pylist()) == [0, 1]
    assert db.load_table("db.b").scan().to_arrow().num_rows == 0


def test_duckdb_reads_what_pyiceberg_wrote(db: RestCatalog, server: Server):
    db.create_table("db.t", SCHEMA).append(ROWS)
    with open_duckdb(server.url) as duck:
        assert duck.execute("SELECT id, v FROM lake.db.t ORDER BY id").fetchall() == [(1, "a"), (2, "b"), (3, "c")]
