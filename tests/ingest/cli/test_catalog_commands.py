"""`lakefeed catalog`: the catalog as a process of its own, and the care of its database, of each kind, beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from lakefeed.catalog.store.postgres import SCHEMA as POSTGRES_SCHEMA
from lakefeed.catalog.store.sqlite import SCHEMA as SQLITE_SCHEMA
from lakefeed.ingest.service import DATABASE_NAME
from tests.catalog.documents import new_table
from tests.catalog_process import catalog_processes
from tests.clients import open_pyiceberg
from tests.lakefeed_process import run_lakefeed
from tests.s3_server import S3Server

# What the writer gives its tables, with fewer old files.
CLEANED_UP = {"write.metadata.delete-after-commit.enabled": "true", "write.metadata.previous-versions-max": "1"}


def run(
    *arguments: str, cwd: Path, database: str = "", settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    chosen = {"catalog.database": database} if database else {}
    return run_lakefeed("catalog", *arguments, directory=cwd, settings=chosen | dict(settings or {}))


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


def make_table(url: str, name: str = "t") -> str:
    with contextlib.closing(open_pyiceberg(url)) as client:
        client.create_namespace_if_not_exists("db")
        schema = Schema(NestedField(1, "id", LongType(), required=False))
        return client.create_table(f"db.{name}", schema, properties=CLEANED_UP).metadata_location


def commit(url: str, times: int) -> str:
    """Commit to the table so often; the catalog deletes all but the newest two metadata files."""
    with contextlib.closing(open_pyiceberg(url)) as client:
        table = client.load_table("db.t")
        for number in range(times):
            table.transaction().set_properties(number=str(number)).commit_transaction()
        return table.metadata_location


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
    assert locations_in(tmp_path / "names.jsonl") == {"t": location}
    refused = run("restore", "names.jsonl", cwd=tmp_path, database=database)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr


def test_backup_of_one_kind_of_database_fills_the_other(make_postgres: Callable[[], str], tmp_path: Path):
    metadata = tmp_path / "v1.metadata.json"
    metadata.write_text(json.dumps(new_table()))
    lines = [
        {"namespace": ["db"], "properties": {"owner": "me"}},
        {"kind": "Table", "namespace": ["db"], "name": "t", "metadata-location": f"file://{metadata}"},
    ]
    version_1 = [{"lakefeed-catalog-backup": 1}, *lines]
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(line) + "\n" for line in version_1))
    source = "first.jsonl"
    for copy, database in (("postgres.jsonl", make_postgres()), ("sqlite.jsonl", "")):
        restored = run("restore", source, cwd=tmp_path, database=database)
        assert restored.returncode == 0, restored.stderr
        assert run("backup", copy, cwd=tmp_path, database=database).returncode == 0
        assert [json.loads(line) for line in (tmp_path / copy).read_text().splitlines()][1:-1] == lines
        source = copy


def test_restore_uses_the_newest_metadata_file_of_a_table_whose_own_was_deleted(
    catalog_url: str, database: str, make_database: Callable[[], str], tmp_path: Path
):
    backed_up = make_table(catalog_url)
    untouched = make_table(catalog_url, "untouched")
    assert run("backup", "names.jsonl", cwd=tmp_path, database=database).returncode == 0
    newest = commit(catalog_url, 4)
    assert not path_of(backed_up).exists()
    copy = make_database()
    restored = run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy)
    assert restored.returncode == 0, restored.stderr
    assert f"Table db.t: Failed to open input stream for file: {backed_up}" in restored.stdout
    assert f"restored from {newest}" in restored.stdout
    assert run("validate", "--data-dir=copy", cwd=tmp_path, database=copy).returncode == 0
    assert run("backup", "again.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy).returncode == 0
    assert locations_in(tmp_path / "again.jsonl") == {"t": newest, "untouched": untouched}


def test_restore_lists_a_table_without_metadata_and_restores_the_others(
    catalog_url: str, database: str, make_database: Callable[[], str], tmp_path: Path
):
    lost = make_table(catalog_url)
    kept = make_table(catalog_url, "kept")
    assert run("backup", "names.jsonl", cwd=tmp_path, database=database).returncode == 0
    path_of(lost).rename(path_of(lost).with_name("00000-not-newer.metadata.json"))
    # A file of another table is not taken for one of this table.
    path_of(lost).with_name("00009-other.metadata.json").write_bytes(path_of(kept).read_bytes())
    copy = make_database()
    restored = run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy)
    assert restored.returncode == 1
    assert f"{lost}: no newer metadata file of it was found" in restored.stderr
    assert "1 tables or views were not restored" in restored.stderr
    assert run("backup", "again.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy).returncode == 0
    assert locations_in(tmp_path / "again.jsonl") == {"kept": kept}


def test_restore_of_a_backup_of_which_nothing_is_left_changes_nothing(
    catalog_url: str, database: str, make_database: Callable[[], str], tmp_path: Path
):
    path = path_of(make_table(catalog_url))
    assert run("backup", "names.jsonl", cwd=tmp_path, database=database).returncode == 0
    elsewhere = path.rename(tmp_path / "moved")
    copy = make_database()
    refused = run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy)
    assert refused.returncode == 1
    assert "nothing was restored" in refused.stderr
    elsewhere.rename(path)
    assert run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path, database=copy).returncode == 0


def test_backup_on_s3_is_validated_and_restored_from_the_newest_metadata(s3_server: S3Server, tmp_path: Path):
    settings = s3_server.new_warehouse()
    with catalog_processes(tmp_path, settings=settings) as (catalog,):
        catalog.start()
        backed_up = make_table(catalog.url)
        assert run("backup", "names.jsonl", cwd=tmp_path, settings=settings).returncode == 0
        assert run("validate", "--backup=names.jsonl", cwd=tmp_path, settings=settings).returncode == 0
        newest = commit(catalog.url, 3)
        assert catalog.stop() == 0, catalog.log_text()
    found = run("validate", "--backup=names.jsonl", "--json", cwd=tmp_path, settings=settings)
    assert found.returncode == 1
    (problem,) = json.loads(found.stdout)["problems"]
    assert (problem["metadataLocation"], problem["newestLocation"]) == (backed_up, newest)
    restored = run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path, settings=settings)
    assert restored.returncode == 0, restored.stderr
    assert f"restored from {newest}" in restored.stdout
    unreachable = {**settings, "storage.s3_secret_access_key": "wrong"}
    refused = run("restore", "names.jsonl", "--data-dir=other", cwd=tmp_path, settings=unreachable)
    assert refused.returncode == 1
    assert run("backup", "other.jsonl", "--data-dir=other", cwd=tmp_path).returncode == 0
    assert len((tmp_path / "other.jsonl").read_text().splitlines()) == 2, "the catalog is not empty"


def test_validate_of_a_backup_finds_a_damaged_backup_and_metadata_of_another_table(
    catalog_url: str, database: str, tmp_path: Path
):
    location = make_table(catalog_url)
    backup = tmp_path / "names.jsonl"
    assert run("backup", "names.jsonl", cwd=tmp_path, database=database).returncode == 0
    assert run("validate", "--backup=names.jsonl", cwd=tmp_path).stdout == "all metadata can be read\n"
    whole = backup.read_text()
    lines = whole.splitlines(keepends=True)
    damages = {
        "File is not a backup": "not a backup",
        "unknown version": whole.replace('backup":2', 'backup":99'),
        "its last line has no checksum": "".join(lines[:-1]),
        "its checksum differs": whole.replace("db", "bd"),
    }
    for reason, text in damages.items():
        backup.write_text(text)
        for command in (("validate", "--backup=names.jsonl"), ("restore", "names.jsonl", "--data-dir=copy")):
            refused = run(*command, cwd=tmp_path)
            assert refused.returncode == 1, command
            assert reason in refused.stderr, command
    backup.write_text(whole)
    raw = path_of(location).read_text()
    path_of(location).write_text(re.sub('"table-uuid":"[^"]*"', '"table-uuid":"another"', raw))
    found = run("validate", "--backup=names.jsonl", cwd=tmp_path)
    assert found.returncode == 1
    assert "is of another table: another" in found.stdout
    assert f"metadata_location={location}: no newer metadata file of it was found" in found.stdout
    newest = path_of(location).with_name("00007-new.metadata.json")
    newest.write_text(raw)
    assert f"restore would use file://{newest}" in run("validate", "--backup=names.jsonl", cwd=tmp_path).stdout


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def locations_in(backup: Path) -> dict[str, str]:
    lines = map(json.loads, backup.read_text().splitlines())
    return {line["name"]: line["metadata-location"] for line in lines if "kind" in line}


def test_validate_finds_a_metadata_file_that_is_gone_or_damaged(catalog_url: str, database: str, tmp_path: Path):
    path = path_of(make_table(catalog_url))
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
