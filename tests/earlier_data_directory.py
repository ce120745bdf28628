"""A data directory that an earlier revision wrote: unpacks it at any path, and says what has to be in it.

Iceberg tables name their files by absolute URIs, so a copy at another path has to be rewritten:

    catalog.sqlite       the location of each table's metadata file
    *.metadata.json      everything below the table's location
    snap-*.avro, *.avro  manifest lists and manifests: paths, and the lengths of manifests, which change with them

Log, data files, checkpoints and the node's id name no path and stay as they are, byte by byte.
"""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
import tarfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import fastavro
from websockets.sync.client import ClientConnection

from tests.clients import open_pyiceberg
from tests.service_process import ServiceProcess

# Where the archive was written. Nothing is there when tests run: a location that was not rewritten leads nowhere.
ROOT = Path("/tmp/lakefeed-fixture")

DIRECTORY = Path(__file__).parent / "data" / "data-directory-1"

_POSITION = ("_cdc_source", "_cdc_epoch", "_cdc_sequence", "_cdc_operation", "_cdc_row_id")
_SHOWN_TEXT_MAX = 100
_ANSWER_TIMEOUT_S = 240.0


def unpack(directory: Path) -> dict[str, Any]:
    """Unpack the data directory to `directory / "data"`, its settings beside it; return expected.json."""
    assert not ROOT.exists(), f"locations that are not rewritten must lead nowhere: {ROOT}"
    with tarfile.open(DIRECTORY / "data-directory.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    (directory / "lakefeed.toml").write_bytes((DIRECTORY / "lakefeed.toml").read_bytes())
    _rebase(directory / "data", str(ROOT), str(directory))
    return json.loads((DIRECTORY / "expected.json").read_text(encoding="utf-8"))


def comparable(value: Any) -> Any:
    """Reduce a value to one that JSON gives back: no nulls, a digest for long text, text for what JSON lacks."""
    if isinstance(value, Mapping):
        return {name: comparable(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, str) and len(value) > _SHOWN_TEXT_MAX:
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"
    return value if isinstance(value, int | float | str | None) else str(value)


def read_rows(service: ServiceProcess, table: str) -> list[Any]:
    """Read a table with PyIceberg, in the form of expected.json: a row's position, then its own columns."""
    with closing(open_pyiceberg(service.http_url)) as catalog:
        rows = catalog.load_table(table).scan().to_arrow().to_pylist()
    return sorted_rows([row_form(row) for row in rows])


def row_form(row: Mapping[str, Any]) -> list[Any]:
    """Bring one row of a change table or a mirror into the form of expected.json."""
    kept = {name: value for name, value in row.items() if name == "_cdc_rescued" or not name.startswith("_cdc_")}
    position = {name: row[name] for name in _POSITION}
    position["_cdc_epoch"] = position["_cdc_epoch"] or 0  # null is 0
    return [*position.values(), comparable(kept)]


def sorted_rows(rows: list[Any]) -> list[Any]:
    """Order rows by their positions."""
    return sorted(rows, key=lambda row: row[: len(_POSITION)])


def resume(socket: ClientConnection, source: str, *, epoch: int) -> dict[str, Any]:
    """Connect a source and return the server's answer, which says where it resumes."""
    socket.send(json.dumps({"type": "connect", "sourceDoId": source, "epoch": epoch}))
    status: dict[str, Any] = json.loads(socket.recv(timeout=_ANSWER_TIMEOUT_S))
    assert status["type"] == "status", status
    return status


def _rebase(data_dir: Path, old: str, new: str) -> None:
    for path in data_dir.rglob("*.metadata.json"):
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    # Manifests before the lists, which have their lengths.
    for path in sorted(data_dir.rglob("*.avro"), key=lambda each: each.name.startswith("snap-")):
        _rebase_avro(path, old, new)
    # SQLite's log is among the files: opening the database applies it.
    with closing(sqlite3.connect(data_dir / "catalog.sqlite")) as db, db:
        db.execute("UPDATE entries SET metadata_location = replace(metadata_location, ?, ?)", (old, new))
        assert db.execute("SELECT count(*) FROM entries WHERE digest <> ''").fetchone() == (0,)


def _rebase_avro(path: Path, old: str, new: str) -> None:
    """Write an Avro file anew with the same schema, metadata and codec."""
    with path.open("rb") as file:
        reader = fastavro.reader(file)
        metadata, records = dict(reader.metadata), [_replaced(record, old, new) for record in reader]
    for record in records:
        if "manifest_length" in record:
            record["manifest_length"] = Path(record["manifest_path"].removeprefix("file:")).stat().st_size
    codec, schema = metadata.pop("avro.codec", "null"), json.loads(metadata.pop("avro.schema"))
    sink = io.BytesIO()
    fastavro.writer(sink, schema, records, codec=codec, metadata=metadata)
    path.write_bytes(sink.getvalue())
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop's checksum of what was there


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {name: _replaced(each, old, new) for name, each in value.items()}
    return [_replaced(each, old, new) for each in value] if isinstance(value, list) else value
