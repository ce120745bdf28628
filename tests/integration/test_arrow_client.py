"""The client in docs/arrow.md works as it is printed, and its rows are what readers find."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import open_duckdb
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parent.parent.parent / "docs" / "arrow.md"


def _client(service: ServiceProcess) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code.count("ws://127.0.0.1:8182/ws") == 1
    return code.replace("ws://127.0.0.1:8182/ws", service.ws_url)


def _run(service: ServiceProcess, path: Path) -> list[str]:
    path.write_text(_client(service), encoding="utf-8")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_documented_client_pushes_rows_once(tmp_path: Path) -> None:
    with service_process(tmp_path) as service:
        service.start()
        assert _run(service, tmp_path / "client.py") == ["resume after None", "ok"]
        assert _run(service, tmp_path / "client.py") == ["resume after 2", "duplicate"]
        service.flush()
        with contextlib.closing(open_duckdb(service.http_url)) as duckdb:
            query = "SELECT _cdc_sequence, _cdc_operation, id, paid FROM lake.sales.orders ORDER BY 1"
            assert duckdb.execute(query).fetchall() == [(1, "INSERT", 7, False), (2, "UPDATE", 7, True)]
        assert service.stop() == 0
