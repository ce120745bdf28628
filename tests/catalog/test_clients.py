"""PyIceberg and DuckDB as real clients."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from tests.catalog.conftest import Server
from tests.clients import open_duckdb, open_pyiceberg

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "v", StringType(), required=False))
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "v": ["a", "b", "c"]})


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


def test_register_brings_a_dropped_table_back(db: RestCatalog):
    table = db.create_table("db.t", SCHEMA)
    table.append(ROWS)
    db.drop_table("db.t")
    again = db.register_table("db.back", table.metadata_location)
    assert again.scan().to_arrow().num_rows == 3


def test_names_that_are_taken_are_refused(db: RestCatalog):
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


def test_tables_and_rows_survive_a_restart(start_server: Callable[..., Server]):
    first = start_server()
    before = open_pyiceberg(first.url)
    before.create_namespace("db", {"owner": "me"})
    before.create_table("db.t", SCHEMA).append(ROWS)
    before.close()
    first.stop()

    after = open_pyiceberg(start_server().url)
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


def test_duckdb_reads_what_pyiceberg_wrote(db: RestCatalog, server: Server):
    db.create_table("db.t", SCHEMA).append(ROWS)
    with open_duckdb(server.url) as duck:
        assert duck.execute("SELECT id, v FROM lake.db.t ORDER BY id").fetchall() == [(1, "a"), (2, "b"), (3, "c")]
