"""What users see, frozen in text files: settings, metrics, log events, commands, HTTP answers and wire messages.

Each test computes one surface from the product and compares it with a file in this directory. A change of names,
types or defaults fails here, so that it is made on purpose and users are told. Class names, module paths and line
numbers are left out: moving code changes nothing.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import difflib
import enum
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import prometheus_client
import pytest

from lakefeed.catalog.errors import SHARED_ERRORS, CatalogError
from lakefeed.ingest.admission.auth import SUBPROTOCOL, TOKEN_INVALID, TOKEN_MISSING
from lakefeed.ingest.admission.limits import CloseCode, Closing, LoadLevel, RejectReason
from lakefeed.ingest.cli.main import main
from lakefeed.ingest.config import PIPELINE_SECTIONS, SERVICE_SECTIONS
from lakefeed.ingest.http.changes import STATUS_OF_REASON
from lakefeed.ingest.protocol.messages import PROTOCOL_VERSION, ClientMessage, ServerMessage
from lakefeed.ingest.protocol.offers import NackReason
from lakefeed.ingest.service import serving
from lakefeed.settings import TableSettingTypes, setting_types
from lakefeed.writer.rows.table_settings import per_table_keys
from lakefeed.writer.wire.arrow_frame import ArrowFrame
from lakefeed.writer.wire.json_batch import Batch
from tests.golden.log_events import UNRESOLVED, log_events, source_files
from tests.golden.type_texts import path_text, record_in, type_text, value_text
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import DEADLINE_S, connected

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOLDERS = ("ingest", "writer", "catalog", "pipeline", "lakefeed")
HELP_WIDTH = 100

# Names that the test itself chooses; as keys of a JSON object they are data.
TABLE = "golden_table"
SOURCE = "golden_source"


def check_golden(name: str, lines: Iterable[str]) -> None:
    """Compare a surface with its file, or rewrite the file if UPDATE_GOLDEN=1 is set."""
    path = HERE / name
    text = "".join(f"{line}\n" for line in lines)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    frozen = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != frozen:
        changes = difflib.unified_diff(frozen.splitlines(), text.splitlines(), name, "product", lineterm="", n=1)
        diff = "\n".join(changes)
        pytest.fail(
            f"{name} differs from the product: run with UPDATE_GOLDEN=1 to accept the change, and list it in"
            f" docs/changelog.md\n{diff}",
            pytrace=False,
        )


# -- settings


def test_settings_are_unchanged():
    check_golden("settings.txt", _settings())


def _settings() -> Iterator[str]:
    for section, kind in SERVICE_SECTIONS.items():
        yield f"[{section}]"
        yield from _section(kind, section)
    yield '[tables."<pattern>"]'
    for name, kind in per_table_keys().items():
        yield f"tables.<pattern>.{name}: {type_text(kind)}"
    for section, kind in PIPELINE_SECTIONS.items():
        yield f"[{section}]"
        yield from _section(kind, section)


def _section(kind: type, prefix: str) -> Iterator[str]:
    types = setting_types(kind)
    for item in dataclasses.fields(kind):
        type_ = types[item.name]
        if isinstance(type_, TableSettingTypes):
            yield from (f"{prefix}.tables.<name>.{name}: {type_text(each)}" for name, each in type_.settings.items())
            continue
        default = "required"
        if item.default is not dataclasses.MISSING:
            default = value_text(item.default)
        elif item.default_factory is not dataclasses.MISSING:
            default = value_text(item.default_factory())
        secret = " secret" if item.metadata.get("secret") else ""
        yield f"{prefix}.{item.name}: {type_text(type_)} = {default}{secret}"


# -- metrics


async def test_metrics_are_unchanged(tmp_path, monkeypatch):
    registered: list[Any] = []
    really_register = prometheus_client.CollectorRegistry.register

    def register(self: prometheus_client.CollectorRegistry, collector: Any) -> None:
        registered.append(collector)
        really_register(self, collector)

    monkeypatch.setattr(prometheus_client.CollectorRegistry, "register", register)
    async with serving(small_config(tmp_path / "data")):
        check_golden("metrics.txt", sorted(line for each in registered for line in _metrics_of(each)))


def _metrics_of(collector: Any) -> Iterator[str]:
    for metric in getattr(collector, "describe", collector.collect)():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        described = collector if hasattr(collector, "_labelnames") else metric
        labels = ",".join(described._labelnames)
        yield f"{name}{{{labels}}} {metric.type}: {metric.documentation}"


# -- log events


def test_log_events_are_unchanged():
    lines: set[str] = set()
    for path in source_files(ROOT, FOLDERS):
        lines |= log_events(ast.parse(path.read_text(encoding="utf-8")))
    check_golden("log_events.txt", sorted(lines))


def test_scan_for_log_events_resolves_what_product_code_does():
    module = """
logger = logging.getLogger(__name__)
class Part:
    def __init__(self): self._facts = {"table": 1}
    def work(self):
        facts = {"rows": 2, **self._facts}
        facts |= {"late": 3}
        logger.warning("a" if self else "b", extra=facts | {"reason": 4})
        logger.info("c", extra=_facts_of(self))
        _fail(self, step=5)
        logger.info("d", extra=unknown)
        other.info("not logged")
def _facts_of(part): return {"path": part}
def _fail(part, **facts): logger.error("e", extra=facts)
"""
    assert log_events(ast.parse(module)) == {
        *("a warning late, reason, rows, table", "b warning late, reason, rows, table"),
        *("c info path", f"d info {UNRESOLVED}", "e error step"),
    }


# -- commands


def test_help_texts_are_unchanged():
    check_golden("commands.txt", _help_texts(main, "lakefeed", None))


def _help_texts(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    command._help_option = None  # click keeps one of a test that called the command without `main`, so without -h
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=HELP_WIDTH,
        max_content_width=HELP_WIDTH,
        color=False,
        help_option_names=main.context_settings["help_option_names"],
    )
    yield f"=== {context.command_path}"
    yield from command.get_help(context).splitlines()
    yield ""
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from _help_texts(found, child, context)


# -- HTTP answers


async def test_http_answers_are_unchanged(tmp_path):
    shapes: dict[str, set[str]] = {}
    async with (
        serving(small_config(tmp_path / "data")) as service,
        aiohttp.ClientSession(service.http_url) as http,
        connected(service.ws_url, SOURCE) as client,
    ):

        async def note(method: str, path: str, **params: str) -> None:
            async with http.request(method, path, params=params) as answer:
                _add_shape(await answer.json(), f"{method} {path} {answer.status} ", shapes)

        await note("GET", "/status")
        assert (await client.batch(1, 2, table=TABLE))["status"] == "ok"
        await note("POST", "/flush")
        await client.receive_receipt(0)
        assert (await client.batch(3, table=TABLE))["status"] == "ok"
        await _until_buffered(http)
        await note("GET", "/status")
        await note("GET", "/explain/flush", table=f"default.{TABLE}")
        await note("POST", "/flush", table=f"default.{TABLE}")
        await client.receive_receipt(1)
        for path in ("/", "/status", "/health", "/health/live", "/health/ready"):
            await note("GET", path)
        await note("GET", "/explain/flush", table=f"default.{TABLE}")
        await note("GET", "/explain/flush", table="no_such_table")
        await note("POST", "/flush", table="no_such_table")
    check_golden("http_answers.txt", sorted(f"{path}: {' or '.join(sorted(kinds))}" for path, kinds in shapes.items()))


async def _until_buffered(http: aiohttp.ClientSession) -> None:
    """Wait until the status shows the last batch in memory; the numbers of the buffer are refreshed with a delay."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with http.get("/status") as answer:
                told = await answer.json()
            is_shown = told["nextFlushTime"] is not None and "oldestBatchTime" in told["buffer"]
            if is_shown and any(table["bufferedRows"] for table in told["tables"]):
                return
            await asyncio.sleep(0.05)


def _add_shape(value: Any, path: str, shapes: dict[str, set[str]]) -> None:
    """Note the JSON types of a value and of all inside it, by path."""
    shapes.setdefault(path.rstrip(), set()).add(_json_type(value))
    if isinstance(value, Mapping):
        for key, each in value.items():
            shown = "<table>" if TABLE in key else "<source>" if key == SOURCE else key
            _add_shape(each, f"{path}.{shown}", shapes)
    elif isinstance(value, list):
        for each in value:
            _add_shape(each, f"{path}[]", shapes)


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


# -- wire messages


def test_wire_messages_are_unchanged():
    check_golden("wire.txt", _wire())


def _wire() -> Iterator[str]:
    yield f"protocol version {PROTOCOL_VERSION}"
    yield f"subprotocol {SUBPROTOCOL}"
    yield from _messages("client", [*typing.get_args(ClientMessage), Batch])
    yield from _messages("server", typing.get_args(ServerMessage))
    yield from sorted(f"arrow metadata {key}" for key in _arrow_keys())
    yield from sorted(f"ack status {status}" for status in _ack_statuses())
    yield from _values("nack reason", NackReason)
    yield from _values("connection refused", RejectReason)
    yield from (f"authentication refused {each.message}" for each in (TOKEN_MISSING, TOKEN_INVALID))
    yield from _values("load level", LoadLevel)
    yield from (f"close code {code.value} {code.name.lower()}" for code in CloseCode)
    closings = [each for each in vars(sys.modules[Closing.__module__]).values() if isinstance(each, Closing)]
    yield from sorted(f"close reason {each.code.value} {each.reason}" for each in closings)
    yield from (f"http ingest {status} {reason}" for reason, status in sorted(STATUS_OF_REASON.items()))
    kinds = (*_catalog_errors(CatalogError), *(model for _, model in SHARED_ERRORS))
    yield from sorted({f"catalog error {kind.status} {kind.type}" for kind in kinds})


def _values(title: str, kind: type[enum.Enum]) -> Iterator[str]:
    return (f"{title} {member.value}" for member in kind)


def _messages(side: str, kinds: Iterable[type[msgspec.Struct]]) -> list[str]:
    """Return the fields of all messages, once each: several structs may read one message."""
    lines = (line for kind in kinds for line in _struct(kind, f"{side} {kind.__struct_config__.tag}"))
    return sorted(dict.fromkeys(lines))


def _struct(kind: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for item in msgspec.structs.fields(kind):
        yield f"{prefix}.{item.encode_name}: {type_text(item.type)}{_struct_default(item)}"
        nested = record_in(item.type)
        if nested is not None:
            yield from _struct(nested, f"{prefix}.{path_text(item.encode_name, item.type)}")


def _struct_default(item: msgspec.structs.FieldInfo) -> str:
    if item.required:
        return " required"
    default = item.default_factory() if item.default is msgspec.NODEFAULT else item.default
    return " optional" if isinstance(default, msgspec.Raw) else f" = {value_text(default)}"


def _arrow_keys() -> set[str]:
    """Return the metadata keys of an Arrow frame: constants of its module that end in _KEY."""
    module = vars(sys.modules[ArrowFrame.__module__])
    return {value.decode() for name, value in module.items() if name.endswith("_KEY") and isinstance(value, bytes)}


def _ack_statuses() -> set[str]:
    """Return the literals that product code gives to the field `status` of an ack."""
    return {
        literal.value
        for path in source_files(ROOT, FOLDERS)
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Ack", "protocol.Ack")
        for keyword in call.keywords
        if keyword.arg == "status"
        for literal in ast.walk(keyword.value)
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str)
    }


def _catalog_errors(kind: type[CatalogError]) -> Iterator[type[CatalogError]]:
    """Yield the class and its subclasses of the same module; others depend on what was imported."""
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == kind.__module__:
            yield from _catalog_errors(each)
