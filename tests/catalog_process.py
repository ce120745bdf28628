"""Runs `lakefeed catalog serve` as a process of its own: started, killed and started again on the same data."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.service_process import LAKEFEED, free_ports

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.02


@dataclass(slots=True)
class CatalogProcess:
    """One catalog's address and data, and the process that serves it now, if any."""

    directory: Path
    port: int
    database: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, program: Sequence[str] = (LAKEFEED,)) -> None:
        """Start a process and wait until it is ready."""
        command = [*program, "catalog", "serve", f"--http-port={self.port}", f"--data-dir={self.directory / 'data'}"]
        environment = {name: text for name, text in os.environ.items() if not name.startswith("LAKEFEED_")}
        environment |= {"LAKEFEED_CATALOG_DATABASE": self.database, "PYTHONPATH": str(ROOT)}
        environment |= {f"LAKEFEED_{key.replace('.', '_').upper()}": text for key, text in self.settings.items()}
        with (self.directory / "catalog.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory, env=environment)
        self._wait_until_ready(self.process)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
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
        self.process.terminate()
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
            if catalog.process is not None and catalog.process.poll() is None:
                catalog.process.kill()
                catalog.process.wait(STOP_TIMEOUT_S)
