"""Runs `lakefeed serve` as a process of its own, as an operator would: started, killed, stopped and started again.

The addresses and the data directory outlive the process, so that clients find the next one where the last one was.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lakefeed.settings import MIB
from tests.lakefeed_process import ForkedProcess, InstalledProcess, LakefeedProcess, Main, clean_environment, run_main

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 240.0
_POLL_S = 0.02

# A service fills two segments of its log with zeros when it starts, by default 128 MiB.
SMALL_LOG = {"log.segment_max_bytes": 8 * MIB, "ingest.frame_max_bytes": 2 * MIB}

# Below the ports that systems give to clients: a client that tries a dead server's port again and again would
# otherwise one day be given that very port for its own end, and be connected to itself.
_PORTS = range(20_000, 32_000)


@dataclass(slots=True)
class ServiceProcess:
    """One service's addresses and data, and the process that serves them now, if any."""

    directory: Path
    http_port: int
    ws_port: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    process: LakefeedProcess | None = None

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        """Standard output and error of all processes, one after the other."""
        return self.directory / "service.log"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.ws_port}/ws"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the service was not started"
        return self.process.pid

    def spawn(self, main: Main = run_main) -> None:
        """Start a process and return at once. `main` runs the command line that it is given."""
        assert not self.is_running, "the service already runs"
        self.process = ForkedProcess(self._arguments(), **self._surroundings({**SMALL_LOG, **self.settings}), main=main)

    def start(self, main: Main = run_main) -> None:
        """Start a process and wait until it is ready."""
        self.spawn(main)
        self.wait_until_ready()

    def start_installed(self) -> None:
        """Start the installed command as an operator does, and wait until it is ready."""
        assert not self.is_running, "the service already runs"
        self.process = InstalledProcess(self._arguments(), **self._surroundings(self.settings))
        self.wait_until_ready()

    def _arguments(self) -> list[str]:
        ports = (f"--http-port={self.http_port}", f"--ws-port={self.ws_port}")
        return ["serve", f"--data-dir={self.data_dir}", *ports]

    def _surroundings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        environ = clean_environment(settings)
        return {"directory": self.directory, "environ": environ, "output": self.log_path}

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.exit_status is None

    def wait_until_ready(self) -> None:
        """Wait until the control plane calls itself ready and the data plane answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self._answers(self.http_port, "/health", 200) and self._answers(self.ws_port, "/", 404)):
            assert self.process is not None
            assert self.is_running, f"the service ended: status={self.process.exit_status}\n{self.log_text()}"
            assert time.monotonic() < deadline, f"the service did not get ready\n{self.log_text()}"
            time.sleep(_POLL_S)

    def _answers(self, port: int, path: str, expected_status: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1.0) as answer:
                return answer.status == expected_status
        except urllib.error.HTTPError as error:
            return error.code == expected_status
        except OSError:
            return False

    def kill(self) -> None:
        """End the process with SIGKILL: it gets no chance to do anything more."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def signal_stop(self) -> None:
        """Send SIGTERM and return at once."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait_for_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the process to end by itself; its exit status."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        """Stop the process in order; its exit status."""
        self.signal_stop()
        return self.wait_for_exit()

    def log_text(self) -> str:
        """Everything that the processes have printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def get(self, path: str) -> Any:
        """Ask the control plane for a JSON document."""
        return json.loads(self.get_text(path))

    def get_text(self, path: str) -> str:
        """Ask the control plane for text."""
        with urllib.request.urlopen(f"{self.http_url}{path}", timeout=REQUEST_TIMEOUT_S) as answer:
            return answer.read().decode()

    def flush(self) -> dict[str, Any]:
        """Commit everything that is durable and wait for it."""
        request = urllib.request.Request(f"{self.http_url}/flush", method="POST")
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def service_process(directory: Path, settings: Mapping[str, Any] | None = None) -> Iterator[ServiceProcess]:
    """Prepare a service under `directory`, not yet started; whatever still runs at the end is killed.

    Settings are given as `section.key`.
    """
    http_port, ws_port = free_ports(2)
    service = ServiceProcess(directory, http_port, ws_port, settings or {})
    try:
        yield service
    finally:
        if service.is_running:
            service.kill()


def free_ports(count: int) -> list[int]:
    """Find ports that are free now; all are held at once, so that none comes twice."""
    with contextlib.ExitStack() as stack:
        return [_hold_free_port(stack) for _ in range(count)]


def _hold_free_port(stack: contextlib.ExitStack) -> int:
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError):
            held = stack.enter_context(socket.socket())
            held.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port was found")
