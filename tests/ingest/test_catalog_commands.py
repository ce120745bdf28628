"""`lakefeed catalog`: the catalog as a process of its own, and the care of its database beside it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from tests.clients import open_pyiceberg
from tests.service_process import LAKEFEED, free_ports

START_TIMEOUT_S = 30.0


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LAKEFEED, "catalog", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def catalog_url(tmp_path: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "catalog.log").open("wb") as log:
        process = subprocess.Popen(
            [LAKEFEED, "catalog", "serve", f"--http-port={port}"], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        wait_until_ready(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "catalog.log").read_text()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if get(f"{url}/health")["status"] == "ready":
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the catalog did not get ready")


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


def test_backup_made_while_serving_is_restored_into_another_catalog(catalog_url: str, tmp_path: Path):
    location = make_table(catalog_url)
    assert run("backup", "names.jsonl", cwd=tmp_path).returncode == 0
    assert run("restore", "names.jsonl", "--data-dir=copy", cwd=tmp_path).returncode == 0
    assert run("backup", "again.jsonl", "--data-dir=copy", cwd=tmp_path).returncode == 0
    text = (tmp_path / "names.jsonl").read_text()
    assert (tmp_path / "again.jsonl").read_text() == text
    assert json.loads(text.splitlines()[-1])["metadata-location"] == location
    refused = run("restore", "names.jsonl", cwd=tmp_path)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr


def test_validate_finds_a_metadata_file_that_is_gone_or_damaged(catalog_url: str, tmp_path: Path):
    path = Path(make_table(catalog_url).removeprefix("file://"))
    assert run("validate", cwd=tmp_path).returncode == 0
    whole = path.read_bytes()
    for damaged in (None, whole[:100]):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        found = run("validate", cwd=tmp_path)
        assert found.returncode == 1
        assert "Table db.t" in found.stdout
        assert "1 problems" in found.stdout


def test_migrate_says_what_it_did_and_a_newer_database_is_left_alone(tmp_path: Path):
    (tmp_path / "data").mkdir()
    assert run("migrate", cwd=tmp_path).stdout == "migrated from version 0 to 3\n"
    assert run("migrate", cwd=tmp_path).stdout == "version 3, nothing to do\n"


def test_database_of_an_unknown_kind_is_a_clear_error(tmp_path: Path):
    (tmp_path / "lakefeed.toml").write_text('[catalog]\ndatabase = "mysql://here"\n')
    refused = run("validate", cwd=tmp_path)
    assert refused.returncode == 2
    assert "database must be empty, memory: or begin with postgresql://" in refused.stderr
