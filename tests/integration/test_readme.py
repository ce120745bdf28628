"""The README's tour, as it is written: its rows are pushed with its command, and its queries find them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import open_duckdb
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service after the tour's push."""
    with service_process(tmp_path_factory.mktemp("tour")) as service:
        service.start_installed()
        rows = re.search(r"cat > users\.ndjson <<'END'\n(.*?)\n    END", README, re.DOTALL)
        assert rows is not None
        file = service.directory / "users.ndjson"
        file.write_text(re.sub(r"^    ", "", rows[1], flags=re.MULTILINE) + "\n")
        assert ".venv/bin/lakefeed push users.ndjson --table users" in README
        command = [f"{sysconfig.get_path('scripts')}/lakefeed", "push", str(file), "--table", "users"]
        pushed = subprocess.run([*command, "--url", service.ws_url], capture_output=True, text=True, check=False)
        assert pushed.returncode == 0, pushed.stderr
        assert "acked 4 changes" in pushed.stdout
        assert "committed default.users: snapshot" in pushed.stdout
        yield service


def _block(engine: str, service: ServiceProcess) -> str:
    found = re.search(rf"From {engine}:\n\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1].replace("http://127.0.0.1:8181", service.http_url)


def test_pyiceberg_block_prints_the_rows(toured: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(_block("PyIceberg", toured), "README.md", "exec"), {})
    assert "Grace Hopper" in capsys.readouterr().out


def test_duckdb_block_asks_what_can_be_answered(toured: ServiceProcess) -> None:
    """Its extensions come from packages here, so that the test needs no download; the query is the page's."""
    query = re.search(r'db\.sql\("(.*?)"\)', _block("DuckDB", toured))
    assert query is not None
    with contextlib.closing(open_duckdb(toured.http_url)) as duckdb:
        rows = duckdb.execute(query[1]).fetchall()
    assert rows == [
        ("INSERT", 1, "Ada"),
        ("INSERT", 2, "Grace"),
        ("UPDATE", 2, "Grace Hopper"),
        ("DELETE", 1, "Ada"),
    ]


def test_spark_block_names_what_exists(toured: ServiceProcess) -> None:
    """Spark itself reads these tables in tests/spark; here it is enough that the page's imports and names are right."""
    lines = _block("PySpark", toured).splitlines()
    exec(compile("\n".join(line for line in lines if line.startswith("from ")), "README.md", "exec"), {})
    assert any("build_session(SessionConfig())" in line for line in lines)
    assert any("FROM lake.default.users" in line for line in lines)
