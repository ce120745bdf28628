"""Second reader of a table's metadata: PyIceberg plans a snapshot, and its files are compared with our own plan.

    lakefeed verify                                     child process (pyiceberg_plan.py)
      metadata, storage settings, snapshot --stdin-->   PyIceberg plans a full scan, reading by lakefeed.storage
      files: path, rows, partition        <--stdout--

A fault in our manifest reader hides the same file from every check that uses it; an independent reader shows it. It
runs in a process of its own because PyIceberg's decoder is compiled code that may crash on damaged manifests: a crash
is then a finding. Settings go by stdin, since other users can see a process's arguments and secrets are among them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from uuid import UUID

from lakefeed.contract.verification import Finding, Kind, PlannedFile, compare_readers
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.files.scan import LiveFile

# A plan of a million files takes about a minute.
TIMEOUT_S = 1800.0
READER = "PyIceberg"
COMMAND = (sys.executable, "-m", "lakefeed.writer.pyiceberg_plan")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


async def find_disagreements(
    document: Mapping[str, Any], storage: StorageConfig, snapshot_id: int, files: Sequence[LiveFile]
) -> list[Finding]:
    """Compare our plan of a snapshot with PyIceberg's. A reader that fails or crashes is a finding too."""
    request = {"metadata": document, "storage": asdict(storage), "snapshot_id": snapshot_id}
    child = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await child.communicate(json.dumps(request).encode())
    except TimeoutError:
        return [Finding(Kind.READERS, f"{READER} did not plan the table within {TIMEOUT_S:.0f} s", snapshot_id)]
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None, "communicate waits for the end"
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return [Finding(Kind.UNREADABLE, f"{READER} crashed while it planned the table: {name}", snapshot_id)]
    if child.returncode:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return [Finding(Kind.UNREADABLE, f"{READER} cannot plan the table: {last_line}", snapshot_id)]
    # PyIceberg leaves out files without rows.
    own = {file.location: PlannedFile(file.rows, partition_text(file.partition)) for file in files if file.rows}
    other = {path: PlannedFile(*facts) for path, facts in json.loads(output).items()}
    return list(compare_readers(own, other, reader=READER))


def partition_text(values: Iterable[Any]) -> str:
    """Return partition values as text that is the same for both readers, whose Avro decoders use different types."""
    return json.dumps([_plain(value) for value in values])


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
        case date():
            return (value - _EPOCH.date()).days
        case time():
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
        case UUID():
            return value.bytes.hex()
        case bytes():
            return value.hex()
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)
