"""A mirror beside a service that takes changes at a fixed rate: does its lag stay within bounds?

Service, client and Spark (`lakefeed mirror run`, local[2]) share the machine. How far the mirror is behind is read from
the catalog: the mirror's marker names a snapshot of the change table, the two tables' metadata tell the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from websockets.sync.client import connect

from lakefeed.pipeline.mirrors.marker import MARKER, parse_marker
from tests.lakefeed_process import LAKEFEED
from tests.service_process import ServiceProcess

TABLE = "live"
_FRAME_ROWS = 1_000
_LOOK_S = 1.0
_CATCH_UP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFigures:
    """One run. Lag is the time since the oldest commit that was not merged, looked at every second."""

    rate: int
    seconds: float
    pushed: int
    pushed_per_s: float
    merges: int
    lag_p50_s: float
    lag_max_s: float
    lag_max_second_half_s: float
    caught_up_s: float
    spark_cpu_share: float


def measure_live(
    service: ServiceProcess,
    *,
    rate: int,
    seconds: float,
    keys: int,
    interval_s: float,
    directory: Path,
    tell: Callable[[str], None],
) -> LiveFigures:
    """Push for some time while the mirror follows; then wait until it has all."""
    pusher = _Pusher(service, rate=rate, keys=keys)
    pusher.push(_FRAME_ROWS)
    service.flush()
    tell("starting the mirror")
    mirror = _start_mirror(service, interval_s, directory)
    try:
        _wait(lambda: _lag(service) is not None, mirror)
        tell(f"{rate:,} changes a second")
        cpu = psutil.Process(mirror.pid)
        cpu_before_s, started = _cpu_s(cpu), time.monotonic()
        thread = threading.Thread(target=pusher.push_for, args=(seconds,))
        thread.start()
        lags = []
        while thread.is_alive():
            time.sleep(_LOOK_S)
            assert mirror.poll() is None, "the mirror ended"
            lags.append(_lag(service) or 0.0)
        pushing_s, cpu_s = time.monotonic() - started, _cpu_s(cpu) - cpu_before_s
        service.flush()
        ended = time.monotonic()
        _wait(lambda: _is_level(service), mirror)
    finally:
        os.killpg(mirror.pid, signal.SIGTERM)
        mirror.wait(120)
    ordered = sorted(lags)
    return LiveFigures(
        rate=rate,
        seconds=seconds,
        pushed=pusher.pushed,
        pushed_per_s=round(pusher.pushed / pushing_s),
        merges=len(_metadata(service, f"{TABLE}_current")["snapshots"]),
        lag_p50_s=round(ordered[len(ordered) // 2], 1),
        lag_max_s=round(ordered[-1], 1),
        lag_max_second_half_s=round(max(lags[len(lags) // 2 :]), 1),
        caught_up_s=round(time.monotonic() - ended, 1),
        spark_cpu_share=round(cpu_s / pushing_s, 2),
    )


class _Pusher:
    """Arrow frames of ten columns whose keys are drawn from so many."""

    def __init__(self, service: ServiceProcess, *, rate: int, keys: int) -> None:
        self._service = service
        self._rate = rate
        self._keys = keys
        self._random = np.random.default_rng(1)
        self.pushed = 0

    def push(self, rows: int) -> None:
        self._send(rows, pace=False)

    def push_for(self, seconds: float) -> None:
        self._send(int(self._rate * seconds), pace=True)

    def _send(self, rows: int, *, pace: bool) -> None:
        with connect(self._service.ws_url, compression=None, max_size=None) as socket:
            socket.send(json.dumps({"type": "connect", "sourceDoId": "live"}))
            socket.recv(timeout=60)
            started = time.monotonic()
            for number in range(rows // _FRAME_ROWS):
                if pace:
                    time.sleep(max(0.0, started + number * _FRAME_ROWS / self._rate - time.monotonic()))
                socket.send(self._frame(number))
                answer = json.loads(socket.recv(timeout=60))
                while answer.get("status") == "persisted":
                    answer = json.loads(socket.recv(timeout=60))
                assert answer["type"] == "ack", answer

    def _frame(self, number: int) -> bytes:
        count, first = _FRAME_ROWS, self.pushed + 1
        self.pushed += count
        keys = self._random.integers(0, self._keys, count)
        operations = self._random.choice(["UPDATE", "INSERT", "DELETE"], count, p=[0.5, 0.4, 0.1])
        texts = [f"{key:020d}" for key in keys]
        rows = pa.table(
            {
                "_cdc_sequence": pa.array(np.arange(first, first + count)),
                "_cdc_operation": pa.array(operations),
                "_cdc_row_id": pa.array([str(key) for key in keys]),
                "id": pa.array(keys),
                "name": texts,
                "city": texts,
                "note": [text * 3 for text in texts],
                "amount": self._random.random(count),
                "active": pa.array(keys % 2 == 0),
                "created_at": pa.array(keys, pa.timestamp("us", "UTC")),
                "tier": pa.array((keys % 5).astype("int32")),
                "score": pa.array(self._random.integers(0, 1_000_000, count)),
                "size": pa.array(keys % 1_000),
            }
        ).replace_schema_metadata({"lakefeed.table": TABLE, "lakefeed.sequence-number": str(number)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        return sink.getvalue().to_pybytes()


def _start_mirror(service: ServiceProcess, interval_s: float, directory: Path) -> subprocess.Popen[bytes]:
    settings = {"LAKEFEED_PIPELINE_MIRROR_KEY": "id", "LAKEFEED_PIPELINE_MIRROR_INTERVAL_S": str(interval_s)}
    command = [LAKEFEED, "mirror", "run", TABLE, "--url", service.http_url, "--master", "local[2]"]
    with (directory / "mirror.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--checkpoints", str(directory / "checkpoints-live")],
            cwd=directory,
            env=os.environ | settings,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(condition: Callable[[], bool], mirror: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _CATCH_UP_S
    while not condition():
        assert mirror.poll() is None, "the mirror ended"
        assert time.monotonic() < deadline, "the mirror did not catch up"
        time.sleep(_LOOK_S / 4)


def _metadata(service: ServiceProcess, table: str) -> dict[str, Any]:
    url = f"{service.http_url}/v1/namespaces/default/tables/{table}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())["metadata"]


def _merged_snapshot(service: ServiceProcess) -> int | None:
    try:
        mirror = _metadata(service, f"{TABLE}_current")
    except urllib.error.HTTPError:
        return None
    by_id = {each["snapshot-id"]: each for each in mirror.get("snapshots", [])}
    marker = parse_marker(by_id.get(mirror.get("current-snapshot-id"), {}).get("summary", {}).get(MARKER))
    return marker.snapshot if marker else None


def _lag(service: ServiceProcess) -> float | None:
    """Tell since when the oldest commit that is not merged waits; None while there is no mirror."""
    merged = _merged_snapshot(service)
    if merged is None:
        return None
    snapshots = sorted(_metadata(service, TABLE)["snapshots"], key=lambda each: each["sequence-number"])
    ids = [each["snapshot-id"] for each in snapshots]
    behind = snapshots[ids.index(merged) + 1 :] if merged in ids else snapshots
    return max(0.0, time.time() - behind[0]["timestamp-ms"] / 1000) if behind else 0.0


def _is_level(service: ServiceProcess) -> bool:
    return _merged_snapshot(service) == _metadata(service, TABLE)["current-snapshot-id"]


def _cpu_s(process: psutil.Process) -> float:
    every = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in every)
