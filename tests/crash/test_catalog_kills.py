"""The catalog is killed around the moment at which a change happens, and its client sends the request again."""

from __future__ import annotations

import functools
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.catalog.documents import append, create_body, require_main
from tests.catalog_process import CatalogProcess, catalog_processes
from tests.crash.crash_points import crash_at_first_call

pytestmark = pytest.mark.crash

STORE = "lakefeed.catalog.store.store"
STORAGE = "lakefeed.storage.local"
# The metadata file exists and is empty; it is complete, and its name may not survive a loss of power; the metadata is
# written; the change and its outcome are written, not yet durable; they are durable, and no client has the reply.
MOMENTS = (
    ("before", f"{STORAGE}:_write_all"),
    ("before", f"{STORAGE}:_sync_directory"),
    ("before", f"{STORE}:_{{method}}"),
    ("after", f"{STORE}:_record_outcome"),
    ("after", f"{STORE}:Store.{{method}}"),
)
# The state of the metadata file after a kill in this function.
LEFT_BEHIND = {f"{STORAGE}:_write_all": ["empty"]}

APPEND = {"requirements": [require_main(None)], "updates": append(1, 1)}
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "swap_pointer": ("POST", "namespaces/db/tables/t", APPEND),
    "create_entry": ("POST", "namespaces/db/tables", create_body("new")),
    "move_pointers": (
        *("POST", "transactions/commit"),
        {"table-changes": [{"identifier": {"namespace": ["db"], "name": name}, **APPEND} for name in ("t", "u")]},
    ),
    "drop_entry": ("DELETE", "namespaces/db/tables/t", None),
}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[CatalogProcess]:
    with catalog_processes(tmp_path) as (only,):
        yield only


def send(catalog: CatalogProcess, method: str, path: str, body: Any, key: str = "") -> requests.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return requests.request(method, f"{catalog.url}/v1/{path}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("method", "moment"),
    [("swap_pointer", moment) for moment in MOMENTS[:-1]]
    + [(name, MOMENTS[1]) for name in ("create_entry", "move_pointers")]
    + [(name, MOMENTS[-1]) for name in REQUESTS],
)
def test_a_request_whose_catalog_was_killed_is_done_once_when_it_is_sent_again(
    catalog: CatalogProcess, method: str, moment: tuple[str, str]
):
    catalog.start()
    send(catalog, "POST", "namespaces", {"namespace": ["db"]})
    for name in ("t", "u"):
        assert send(catalog, "POST", "namespaces/db/tables", create_body(name)).status_code == 200
    assert catalog.stop() == 0

    when, where = moment
    before = metadata_files(catalog)
    key = str(uuid.uuid4())
    catalog.start(functools.partial(crash_at_first_call, when, where.format(method=method)))
    with pytest.raises(requests.ConnectionError):
        send(catalog, *REQUESTS[method], key)
    assert catalog.wait_for_exit() == -signal.SIGKILL
    if method == "swap_pointer":
        assert new_file_sizes(catalog, before) == LEFT_BEHIND.get(where, ["complete"])

    catalog.start()
    again = [send(catalog, *REQUESTS[method], key) for _ in range(2)]
    assert [answer.status_code for answer in again] == [204 if method in ("move_pointers", "drop_entry") else 200] * 2
    assert again[0].content == again[1].content
    check_done_once(catalog, method)


def metadata_files(catalog: CatalogProcess) -> set[Path]:
    return set(catalog.directory.rglob("*.metadata.json"))


def new_file_sizes(catalog: CatalogProcess, before: set[Path]) -> list[str]:
    return ["complete" if path.stat().st_size else "empty" for path in metadata_files(catalog) - before]


def check_done_once(catalog: CatalogProcess, method: str) -> None:
    """Check that the tables are as after one request; no table refers to files that a kill left truncated."""
    tables = send(catalog, "GET", "namespaces/db/tables", None).json()["identifiers"]
    names = [table["name"] for table in tables]
    assert names == {"create_entry": ["new", "t", "u"], "drop_entry": ["u"]}.get(method, ["t", "u"])
    changed = {"swap_pointer": ["t"], "move_pointers": ["t", "u"]}.get(method, [])
    for name in names:
        metadata = send(catalog, "GET", f"namespaces/db/tables/{name}", None).json()["metadata"]
        assert [each["snapshot-id"] for each in metadata["snapshots"]] == ([1] if name in changed else [])
