"""Runs `lakefeed catalog serve` as a process of its own: started, killed and started again on the same data."""

from __future__ import annotations

import contextlib
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.lakefeed_process import ForkedProcess, Main, clean_environment, run_main
from tests.service_process import free_ports

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 240.0
_POLL_S = 0.02


@dataclass(slots=True)
class CatalogProcess:
    """One catalog's address and data, and the process that serves it now, if any."""

    directory: Path
    port: int
    database: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    process: ForkedProcess | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, main: Main = run_main) -> None:
        """Start a process and wait until it is ready. `main` runs the command line that it is given."""
        self.process = ForkedProcess(
            ["catalog", "serve", f"--http-port={self.port}", f"--data-dir={self.directory / 'data'}"],
            directory=self.directory,
            environ=clean_environment({"catalog.database": self.database, **self.settings}),
            output=self.directory / "catalog.log",
            main=main,
        )
        self._wait_until_ready(self.process)

    def _wait_until_ready(self, process: ForkedProcess) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.exit_status is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=1.0):
                return
            time.sleep(_POLL_S)
        raise AssertionError(f"the catalog did not get ready\n{self.log_text()}")

    def wait_for_exit(self) -> int:
        """Wait for the process to end by itself; its exit status."""
        assert self.process is not None
        return self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """Stop the process in order; its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait_for_exit()

    def log_text(self) -> str:
        """Everything that the processes have printed so far."""
        return (self.directory / "catalog.log").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def catalog_processes(
    directory: Path, count: int = 1, *, database: str = "", settings: Mapping[str, str] | None = None
) -> Iterator[list[CatalogProcess]]:
    """Name catalogs over the same data, not yet started; all that still run at the end are killed.

    Settings are given as `section.key`.
    """
    catalogs = [CatalogProcess(directory, port, database, settings or {}) for port in free_ports(count)]
    try:
        yield catalogs
    finally:
        for catalog in catalogs:
            if catalog.process is not None and catalog.process.exit_status is None:
                catalog.process.send_signal(signal.SIGKILL)
                catalog.process.wait(STOP_TIMEOUT_S)
