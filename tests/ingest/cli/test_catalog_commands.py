"""`lakefeed catalog`: the catalog as a process of its own, and the care of its database, of each kind, beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from lakefeed.catalog.store.postgres import SCHEMA as POSTGRES_SCHEMA
from lakefeed.catalog.store.sqlite import SCHEMA as SQLITE_SCHEMA
from lakefeed.ingest.service import DATABASE_NAME
from tests.catalog_process import catalog_processes
from tests.clients import open_pyiceberg
from tests.lakefeed_process import run_lakefeed


def run(*arguments: str, cwd: Path, database: str = "") -> subprocess.CompletedProcess[str]:
    settings = {"catalog.database": database} if database else {}
    return run_lakefeed("catalog", *arguments, directory=cwd, settings=settings)


@pytest.fixture(params=["sqlite", "postgres"])
def make_database(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Name databases of each kind; of SQLite's it is the data directory that tells one from another."""
    return request.getfixturevalue("make_postgres") if request.param == "postgres" else str


@pytest.fixture
def database(make_database: Callable[[], str]) -> str:
    return make_database()


@pytest.fixture
def catalog_url(tmp_path: Path, database: str) -> Iterator[str]:
    with catalog_processes(tmp_path, database=database) as (catalog,):
        catalog.start()
        yield catalog.url
        assert catalog.stop() == 0, catalog.log_text()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def make_table(url: str) -> str:
    client = open_pyiceberg(url)
    client.create_namespace("db")
    schema = Schema(NestedField(1, "id", LongType(), required=False))
    location = client.create_table("db.t", schema).metadata_location
    client.close()
    return location


def test_catalog_serves_by_itself_without_log_or_data_plane(catalog_url: str, tmp_path: Path):
    make_table(catalog_url)
    assert get(f"{catalog_url}/v1/namespaces/db/tables")["identifiers"] == [{"namespace": ["db"], "name": "t"}]
    assert not (tmp_path / "data" / "log").exists()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{catalog_url}/status")


def test_backup_made_while_serving_is_restored_into_another_catalog(
    catalog_url: str, database: str, make_database: Callable[[], str], tmp_path: Path
):
    location = make_table(catalog_url)
    copy = make_database()
    assert run("backup", "names.jsonl", cwd=tmp_path, database=database).returncode == 0
    assert run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy).returncode == 0
    assert run("backup", "again.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy).returncode == 0
    text = (tmp_path / "names.jsonl").read_text()
    assert (tmp_path / "again.jsonl").read_text() == text
    assert json.loads(text.splitlines()[-1])["metadata-location"] == location
    refused = run("restore", "names.jsonl", cwd=tmp_path, database=database)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr


def test_backup_of_one_kind_of_database_fills_the_other(make_postgres: Callable[[], str], tmp_path: Path):
    lines = [
        {"lakefeed-catalog-backup": 1},
        {"namespace": ["db"], "properties": {"owner": "me"}},
        {"kind": "Table", "namespace": ["db"], "name": "t", "metadata-location": "file:///nowhere"},
    ]
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = "first.jsonl"
    for copy, database in (("postgres.jsonl", make_postgres()), ("sqlite.jsonl", "")):
        assert run("restore", source, cwd=tmp_path, database=database).returncode == 0
        assert run("backup", copy, cwd=tmp_path, database=database).returncode == 0
        assert [json.loads(line) for line in (tmp_path / copy).read_text().splitlines()] == lines
        source = copy


def test_validate_finds_a_metadata_file_that_is_gone_or_damaged(catalog_url: str, database: str, tmp_path: Path):
    path = Path(make_table(catalog_url).removeprefix("file://"))
    assert run("validate", cwd=tmp_path, database=database).returncode == 0
    whole = path.read_bytes()
    for damaged in (None, whole[:100]):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        found = run("validate", cwd=tmp_path, database=database)
        assert found.returncode == 1
        assert "Table db.t" in found.stdout
        assert "1 problems" in found.stdout


def test_migrate_says_what_it_did_and_then_that_there_is_nothing_to_do(database: str, tmp_path: Path):
    (tmp_path / "data").mkdir()
    version = (POSTGRES_SCHEMA if database else SQLITE_SCHEMA).version
    assert run("migrate", cwd=tmp_path, database=database).stdout == f"migrated from version 0 to {version}\n"
    assert run("migrate", cwd=tmp_path, database=database).stdout == f"version {version}, nothing to do\n"


def test_database_of_a_newer_version_is_left_alone(database: str, tmp_path: Path):
    (tmp_path / "data").mkdir()
    assert run("migrate", cwd=tmp_path, database=database).returncode == 0
    set_version(database, tmp_path / "data" / DATABASE_NAME, 99)
    (tmp_path / "names.jsonl").write_text('{"lakefeed-catalog-backup": 1}\n')
    for command in (("migrate",), ("restore", "names.jsonl"), ("serve", "--http-port=0")):
        refused = run(*command, cwd=tmp_path, database=database)
        assert refused.returncode == 1, command
        assert "found=99" in refused.stderr, command


def set_version(database: str, path: Path, version: int) -> None:
    sql = f"UPDATE catalog_schema SET version = {version}"
    if not database:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(sql)
        return

    async def update() -> None:
        connection = await asyncpg.connect(database, server_settings={"search_path": "lakefeed_catalog"})
        await connection.execute(sql)
        await connection.close()

    asyncio.run(update())


def test_postgres_that_does_not_answer_is_a_clear_error(tmp_path: Path):
    for command in ("migrate", "validate"):
        refused = run(command, cwd=tmp_path, database=f"postgresql:///catalog?host={tmp_path}")
        assert refused.returncode == 1
        assert "cannot connect to the catalog's database" in refused.stderr


def test_database_of_an_unknown_kind_is_a_clear_error(tmp_path: Path):
    (tmp_path / "lakefeed.toml").write_text('[catalog]\ndatabase = "mysql://here"\n')
    refused = run("validate", cwd=tmp_path)
    assert refused.returncode == 2
    assert "database must be empty, memory: or begin with postgresql://" in refused.stderr
