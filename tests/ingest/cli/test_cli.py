"""The command line: help that reads well, errors without tracebacks, exit codes, and each command on a real service."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from lakefeed.ingest.cli.main import COMMANDS, main
from lakefeed.ingest.cli.push import PushReport
from lakefeed.ingest.config import PIPELINE_SECTIONS, SERVICE_SECTIONS
from lakefeed.ingest.service import serving
from lakefeed.settings import setting_types
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.log import FileLog
from tests.ingest.conftest import small_config
from tests.serving import serve_in_thread

UNREACHABLE = "http://127.0.0.1:1"
KEYS = [
    f"{section}.{name}"
    for section, kind in {**SERVICE_SECTIONS, **PIPELINE_SECTIONS}.items()
    for name in setting_types(kind)
]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(main, arguments, **options)


def lakefeed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a shell would."""
    root = Path(__file__).parents[3]
    program = "import sys; from lakefeed.ingest.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )


# -- help


def test_help_names_every_command_with_what_it_does():
    result = run("--help")
    assert result.exit_code == 0
    for name, place in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(place.help)}$", result.output, re.MULTILINE)
    assert "lakefeed serve" in result.output
    assert "lakefeed push" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_names_its_options_and_what_they_do(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    command = main.get_command(click.Context(main), name)
    if COMMANDS[name].module.startswith("lakefeed.ingest"):
        assert command.help.startswith(COMMANDS[name].help)
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.opts[0] in result.output
            assert option.help or isinstance(option.type, click.Choice), option.name
    assert "\\b" not in result.output
    assert "\x08" not in result.output


def test_h_is_help_too():
    assert run("-h").exit_code == 0


def test_unknown_command_and_unknown_option_exit_with_2():
    assert run("sevre").exit_code == 2
    assert run("status", "--wat").exit_code == 2


def test_version_is_printed():
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"lakefeed, version \d+\.\d+\.\d+\n", result.output)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_command(option):
    program = f"""
import sys
from lakefeed.ingest.cli.main import main
try:
    main([{option!r}])
except SystemExit:
    print(sorted({{name.split('.')[0] for name in sys.modules}} & {{'aiohttp', 'numpy', 'pyarrow', 'pyspark', 'rich'}}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


# -- config


def test_config_prints_every_setting_with_its_origin_and_reason(monkeypatch):
    Path("lakefeed.toml").write_text("[server]\nhttp_port = 9999\n", encoding="utf-8")
    monkeypatch.setenv("LAKEFEED_SERVER_WS_PORT", "9998")
    result = run("config")
    assert result.exit_code == 0
    for key in KEYS:
        assert key in result.output
    lines = result.output.splitlines()
    (http_port,) = [line for line in lines if " server.http_port " in line]
    assert "9999" in http_port
    assert "lakefeed.toml" in http_port
    (ws_port,) = [line for line in lines if " server.ws_port " in line]
    assert "LAKEFEED_SERVER_WS_PORT" in ws_port
    (host,) = [line for line in lines if " server.host " in line]
    assert "default" in host
    assert "loopback" in result.output


def test_config_as_json_holds_every_value_and_no_secret(monkeypatch):
    monkeypatch.setenv("LAKEFEED_STORAGE_S3_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("LAKEFEED_STORAGE_S3_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("LAKEFEED_AUTH_TOKENS", "hush-hush-hush-hush")
    values = json.loads(run("config", "--json").output)
    assert set(values) == set(KEYS)
    assert values["server.http_port"] == 8181
    assert values["storage.s3_secret_access_key"] == values["auth.tokens"] == "(set)"
    assert "hush" not in run("config").output


@pytest.mark.parametrize("command", ["config", "serve"])
def test_wrong_setting_is_a_usage_error_without_a_traceback(command, monkeypatch):
    monkeypatch.setenv("LAKEFEED_SERVER_HTTP_PROT", "1")
    result = run(command)
    assert result.exit_code == 2
    assert "did you mean LAKEFEED_SERVER_HTTP_PORT?" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["config", "serve"])
def test_missing_settings_file_is_a_usage_error(command):
    result = run(command, "--config", "missing.toml")
    assert result.exit_code == 2
    assert "cannot read the configuration: file=missing.toml" in result.output


# -- no service


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--url", UNREACHABLE),
        ("flush", "--url", UNREACHABLE),
        ("flush", "--table", "t", "--url", UNREACHABLE),
    ],
)
def test_service_that_does_not_run_is_said_to_be_so(arguments):
    result = run(*arguments)
    assert result.exit_code == 1
    assert "cannot reach the service, is `lakefeed serve` running?" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1/ws", "nonsense"])
def test_push_without_a_service_is_an_error_without_a_traceback(url):
    result = run("push", "-", "--table", "t", "--url", url, input='{"id": 1}\n')
    assert result.exit_code == 1
    assert f"cannot reach the service: url={url}" in result.output
    assert "Traceback" not in result.output


def test_push_of_a_file_that_is_not_there_exits_with_2():
    assert run("push", "missing.ndjson", "--table", "t").exit_code == 2


@pytest.mark.parametrize("body", ["<html>", "[]", "null", '"x"'])
@pytest.mark.parametrize("command", ["status", "flush"])
def test_something_else_at_the_address_is_said_to_be_so(command, body):
    async def answer(request: web.Request) -> web.Response:
        del request
        return web.Response(text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serve_in_thread(app) as url:
        result = run(command, "--url", url)
    assert result.exit_code == 1
    assert f"not a Lakefeed service: url={url}/{command}" in result.output


# -- serve


def test_port_that_is_taken_is_an_error_without_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = lakefeed("serve", "--http-port", str(taken.getsockname()[1]), "--ws-port", "0", "--data-dir", "data")
    assert result.returncode != 0
    assert "http_port" in result.stderr
    assert "Traceback" not in result.stderr


def test_data_directory_that_another_service_uses_is_an_error_without_a_traceback():
    log = FileLog.open(Path("data/log").absolute(), LogConfig())
    try:
        result = lakefeed("serve", "--http-port", "0", "--ws-port", "0", "--data-dir", "data")
    finally:
        close_log(log)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "Error: " in result.stderr


def close_log(log: FileLog) -> None:
    asyncio.run(log.close())


# -- against a running service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A service in a thread of its own; its WebSocket and its HTTP address."""
    started, stop = threading.Event(), asyncio.Event()
    found = {}

    async def serve() -> None:
        async with serving(small_config(tmp_path / "data")) as addresses:
            found["addresses"] = (addresses.ws_url, addresses.http_url)
            found["loop"] = asyncio.get_running_loop()
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="service")
    thread.start()
    assert started.wait(30)
    yield found["addresses"]
    found["loop"].call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()


def test_push_status_and_flush_tell_what_happened(service):
    ws_url, http_url = service
    result = run("push", "-", "--table", "users", "--source", "file", "--url", ws_url, input='{"id": 1}\n{"id": 2}\n')
    assert result.exit_code == 0, result.output
    assert "acked 2 changes (0 duplicates, 0 lines skipped)" in result.output
    assert "committed default.users: snapshot " in result.output
    assert "2 rows in this flush" in result.output

    again = run("push", "-", "--table", "users", "--source", "file", "--url", ws_url, input='{"id": 1}\n{"id": 2}\n')
    assert again.exit_code == 0
    assert "acked 0 changes (0 duplicates, 2 lines skipped)" in again.output
    assert "this file was pushed before as source file: --again sends it anyway" in again.output

    other = run("push", "-", "--table", "users", "--source", "file", "--url", ws_url, input='{"id": 3}\n{"id": 4}\n')
    assert other.exit_code == 1
    assert "another file was pushed under this source" in other.output

    status = run("status", "--url", http_url)
    assert status.exit_code == 0
    assert "idle, 0 connections" in status.output
    assert "file" in status.output
    assert "default.users" in status.output
    as_json = json.loads(run("status", "--json", "--url", http_url).output)
    assert as_json["tables"][0]["committedRows"] == 2

    flush = run("flush", "--table", "users", "--url", http_url)
    assert flush.exit_code == 0
    assert "default.users" in flush.output


def test_flush_with_nothing_to_do_says_so_and_of_an_unknown_table_fails(service):
    _, http_url = service
    assert "nothing to commit" in run("flush", "--url", http_url).output
    result = run("flush", "--table", "nowhere", "--url", http_url)
    assert result.exit_code == 1
    assert "no such table here: table=nowhere" in result.output


def test_push_of_a_bad_line_names_the_line_and_exits_with_1(service):
    ws_url, _ = service
    result = run("push", "-", "--table", "users", "--url", ws_url, input='{"id": 1}\n{"id": \n')
    assert result.exit_code == 1
    assert "not valid JSON: line=2" in result.output
    result = run("push", "-", "--url", ws_url, input='{"id": 1}\n')
    assert result.exit_code == 1
    assert "no table: give --table" in result.output
    result = run("push", "-", "--table", "t", "--url", ws_url, input='{"operation": "upsert", "after": {"id": 1}}\n')
    assert result.exit_code == 1
    assert "unknown operation: line=1 expected=INSERT,UPDATE,DELETE" in result.output


def test_push_with_lines_that_the_service_took_for_duplicates_exits_with_1(monkeypatch):
    async def push_file(*_: object) -> PushReport:
        return PushReport("shop", sent=3, acked=1, duplicates=2, committed=True)

    monkeypatch.setattr("lakefeed.ingest.cli.push.push_file", push_file)
    result = run("push", "-", "--table", "users", input='{"id": 1}\n')
    assert result.exit_code == 1
    assert "lines were not accepted" in result.output
    assert "source=shop lines=2" in result.output
