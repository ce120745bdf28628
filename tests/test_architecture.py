"""Holds the code to its architecture by reading it: import directions, pure core modules, sizes and names.

Nothing is imported. Every rule is a function from source text to findings, and is itself tried on bad snippets below.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("ingest", "writer", "catalog", "pipeline")

FUNCTION_MAX_LINES = 60
MODULE_MAX_LINES = 500
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}

# Modules of the writer that the pipeline takes along to clusters, where it has the standard library and Spark.
STANDARD_LIBRARY_ONLY = (
    "lakefeed.contract.changes",
    "lakefeed.contract.changes",
    "lakefeed.contract.errors",
    "lakefeed.contract.progress",
    "lakefeed.contract.properties",
    "lakefeed.contract.progress",
    "lakefeed.contract.ledger",
    "lakefeed.contract.verification",
    "lakefeed.contract.verification",
    "lakefeed.contract.ledger",
    "lakefeed.contract.verification",
)

# Who may import what of another package; all other crossings are refused. The catalog is reached over HTTP, also
# inside one process: the service only mounts it, the settings only contain its settings, and its commands are ours.
ALLOWED_CROSSINGS = {
    "ingest": ("writer",),
    "lakefeed.ingest.config": ("lakefeed.catalog.config",),
    "lakefeed.ingest.cli.catalog": ("catalog",),
    "lakefeed.ingest.service": ("lakefeed.catalog.app", "lakefeed.catalog.config", "lakefeed.storage.local"),
    "lakefeed.ingest.cli.main": ("lakefeed.pipeline.cli",),
    "lakefeed.ingest.cli.verify": ("lakefeed.pipeline.verification.commands",),
    "pipeline": STANDARD_LIBRARY_ONLY,
}

# Modules that decide and never act, and with them all that they import. A package stands for the modules in it.
CORE = (
    "lakefeed.iceberg.manifest_reads",
    "lakefeed.catalog.metadata",
    "lakefeed.catalog.planning.expressions",
    "lakefeed.catalog.planning.tasks",
    "lakefeed.catalog.planning.tasks",
    "lakefeed.catalog.planning.expressions",
    "lakefeed.catalog.planning.evaluate",
    "lakefeed.catalog.planning.evaluate",
    "lakefeed.iceberg.manifest_reads",
    "lakefeed.catalog.planning.tasks",
    "lakefeed.catalog.planning.evaluate",
    "lakefeed.catalog.planning.planner",
    "lakefeed.catalog.planning.tasks",
    "lakefeed.iceberg.transforms",
    "lakefeed.iceberg.values",
    "lakefeed.catalog.names",
    "lakefeed.ingest.admission.addresses",
    "lakefeed.ingest.admission.limits",
    "lakefeed.ingest.admission.auth",
    "lakefeed.ingest.admission.limits",
    "lakefeed.ingest.intake.dedup",
    "lakefeed.ingest.intake.dedup",
    "lakefeed.ingest.http.bodies",
    "lakefeed.ingest.intake.rows",
    "lakefeed.ingest.admission.limits",
    "lakefeed.ingest.admission.budget",
    "lakefeed.ingest.protocol.messages",
    "lakefeed.ingest.admission.budget",
    "lakefeed.ingest.websocket.client",
    "lakefeed.ingest.protocol.session",
    "lakefeed.ingest.protocol.batch",
    "lakefeed.pipeline.backfill.types",
    "lakefeed.pipeline.backfill.inputs",
    "lakefeed.pipeline.backfill.inputs",
    "lakefeed.pipeline.backfill.rows",
    "lakefeed.pipeline.backfill.rows",
    "lakefeed.pipeline.backfill.inputs",
    "lakefeed.pipeline.backfill.types",
    "lakefeed.pipeline.backfill.types",
    "lakefeed.contract.consumers",
    "lakefeed.pipeline.maintenance.plan",
    "lakefeed.pipeline.maintenance.plan",
    "lakefeed.pipeline.maintenance.plan",
    "lakefeed.pipeline.maintenance.plan",
    "lakefeed.pipeline.maintenance.steps",
    "lakefeed.pipeline.mirrors.fold",
    "lakefeed.pipeline.mirrors.table",
    "lakefeed.pipeline.mirrors.history",
    "lakefeed.pipeline.mirrors.table",
    "lakefeed.pipeline.mirrors.marker",
    "lakefeed.pipeline.mirrors.merge",
    "lakefeed.pipeline.mirrors.table",
    "lakefeed.pipeline.mirrors.fold",
    "lakefeed.pipeline.mirrors.settings",
    "lakefeed.pipeline.spark.tables",
    "lakefeed.pipeline.mirrors.marker",
    "lakefeed.pipeline.mirrors.fold",
    "lakefeed.pipeline.spark.conf",
    "lakefeed.pipeline.spark.conf",
    "lakefeed.pipeline.verification.scan",
    "lakefeed.pipeline.verification.mirrors",
    "lakefeed.pipeline.verification.scan",
    "lakefeed.pipeline.verification.scan",
    "lakefeed.writer.tables.pending",
    "lakefeed.writer.tables.status",
    "lakefeed.contract.changes",
    "lakefeed.contract.changes",
    "lakefeed.writer.commit.plan",
    "lakefeed.writer.tables.status",
    "lakefeed.writer.rows.json_strict",
    "lakefeed.writer.wire.json_batch",
    "lakefeed.writer.files.write",
    "lakefeed.writer.tables.flush_policy",
    "lakefeed.writer.wal.payload",
    "lakefeed.contract.consumers",
    "lakefeed.writer.commit.expiry",
    "lakefeed.writer.commit.manifests",
    "lakefeed.iceberg.manifests",
    "lakefeed.iceberg.layout",
    "lakefeed.contract.progress",
    "lakefeed.iceberg.layout",
    "lakefeed.iceberg.terms",
    "lakefeed.iceberg.transform_arrays",
    "lakefeed.contract.progress",
    "lakefeed.writer.commit.plan",
    "lakefeed.writer.rows.merge",
    "lakefeed.writer.tables.state",
    "lakefeed.writer.quarantine.store",
    "lakefeed.contract.properties",
    "lakefeed.writer.quarantine.replay",
    "lakefeed.writer.tables.quarantine",
    "lakefeed.writer.files.write",
    "lakefeed.writer.rows.json_exact",
    "lakefeed.writer.rows.runs",
    "lakefeed.writer.tables.memory",
    "lakefeed.writer.rows.table_settings",
    "writer.transactions",
    "lakefeed.writer.tables.state",
    "lakefeed.iceberg.types",
    "lakefeed.contract.ledger",
    "lakefeed.writer.verify",
    "lakefeed.contract.verification",
    "lakefeed.contract.verification",
    "lakefeed.contract.ledger",
    "lakefeed.writer.files.row_hash",
    "lakefeed.contract.verification",
    "lakefeed.writer.files.row_hash",
    "lakefeed.writer.files.xxh64",
    "lakefeed.writer.files.row_hash",
    "lakefeed.writer.files.xxh64",
    "lakefeed.writer.files.xxh64",
    "lakefeed.writer.wal.records",
)

# Files, sockets, processes, threads, clocks and randomness, by the name that reaches them.
NOT_IN_CORE = (
    *("asyncio", "concurrent", "multiprocessing", "select", "selectors", "signal", "subprocess", "threading"),
    *("aiobotocore", "aiohttp", "asyncpg", "botocore", "http", "requests", "socket", "ssl", "urllib.request"),
    *("fcntl", "glob", "mmap", "os", "pathlib", "shutil", "sqlite3", "tempfile", "websockets"),
    *("pyarrow.OSFile", "pyarrow.fs", "pyarrow.memory_map"),
    *("datetime.date.today", "datetime.datetime.now", "datetime.datetime.today", "datetime.datetime.utcnow", "time"),
    *("numpy.random", "random", "secrets", "uuid.uuid1", "uuid.uuid4"),
)
BUILTINS_NOT_IN_CORE = {"__import__", "eval", "exec", "input", "open", "print"}


@dataclass(frozen=True)
class Module:
    """One source file under the name it is imported by."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.name.split(".")[0]


def load_modules(*directories: str) -> Iterator[Module]:
    for directory in directories:
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield Module(name, path.read_text(encoding="utf-8"))


def is_within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything imported, wherever in the module that happens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{_origin(node)}.{alias.name}") for alias in node.names)


def bound_names(tree: ast.Module) -> dict[str, str]:
    """Map the local names that imports bind to the full names behind them."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                bound |= {alias.asname: alias.name} if alias.asname else {root: root}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{_origin(node)}.{alias.name}" for alias in node.names}
    return bound


def _origin(node: ast.ImportFrom) -> str:
    return "." * node.level + (node.module or "")


def find_crossings(module: Module) -> list[str]:
    """Find imports of another package that the directions do not allow."""
    allowed = tuple(
        target
        for importer, targets in ALLOWED_CROSSINGS.items()
        if is_within(module.name, (importer,))
        for target in targets
    )
    return [
        f"{module.name}:{line} must not import {name}"
        for line, name in imported_names(module.tree)
        if name.startswith(".") or (is_within(name, _others(module)) and not is_within(name, allowed))
    ]


def _others(module: Module) -> tuple[str, ...]:
    return tuple(package for package in PACKAGES if package != module.package)


def core_modules(modules: Iterable[Module]) -> list[Module]:
    """Pick the core and everything of ours that it imports, directly or not."""
    by_name = {module.name: module for module in modules}
    reached = {name for name in by_name if is_within(name, CORE)}
    unread = set(reached)
    while unread:
        imported = {name for _, name in imported_names(by_name[unread.pop()].tree)}
        # What is imported is a module, or something inside one.
        found = (imported | {name.rpartition(".")[0] for name in imported}) & by_name.keys() - reached
        reached |= found
        unread |= found
    return [by_name[name] for name in sorted(reached)]


def find_actions(module: Module) -> list[str]:
    """Find what the core may not do: act, wait, or look at the clock."""
    found = [*_banned_imports(module.tree), *_banned_uses(module.tree), *_async_syntax(module.tree)]
    return [f"{module.name}:{line} is core and must not use {what}" for line, what in found]


def _banned_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imported_names(tree) if is_within(name, NOT_IN_CORE))


def _banned_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    bound = bound_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS_NOT_IN_CORE:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)) is not None:
            root, _, rest = name.partition(".")
            if root in bound and f"{bound[root]}.{rest}" in NOT_IN_CORE:
                yield node.lineno, name


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := _dotted(node.value)) is not None:
        return f"{value}.{node.attr}"
    return None


def _async_syntax(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await):
            yield node.lineno, "async"


def find_oversize(module: Module) -> list[str]:
    """Find functions and modules that no longer fit in view; docstrings do not count."""
    found = [
        f"{module.name}:{node.lineno} {node.name} has {_body_lines(node)} lines, allowed are {FUNCTION_MAX_LINES}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _body_lines(node) > FUNCTION_MAX_LINES
    ]
    lines = len(module.text.splitlines())
    if lines > MODULE_MAX_LINES:
        found.append(f"{module.name} has {lines} lines, allowed are {MODULE_MAX_LINES}")
    return found


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def find_empty_names(module: Module) -> list[str]:
    """Find modules and packages whose name tells nothing of what is inside."""
    return [
        f"{module.name} needs a name that says what it owns"
        for part in module.name.split(".")
        if part in NAMES_THAT_SAY_NOTHING
    ]


@pytest.mark.parametrize("rule", [find_crossings, find_oversize, find_empty_names])
def test_code_keeps_to_the_architecture(rule):
    assert [finding for module in load_modules(*PACKAGES) for finding in rule(module)] == []


def test_core_decides_and_never_acts():
    assert [finding for module in core_modules(load_modules(*PACKAGES)) for finding in find_actions(module)] == []


def test_what_the_pipeline_takes_along_needs_the_standard_library_only():
    modules = {module.name: module for module in load_modules("writer")}
    allowed = (*sys.stdlib_module_names, *STANDARD_LIBRARY_ONLY)
    found = [
        f"{name}:{line} imports {imported}"
        for name in STANDARD_LIBRARY_ONLY
        for line, imported in imported_names(modules[name].tree)
        if not is_within(imported, allowed)
    ]

    assert found == []


def test_tests_have_names_that_say_something():
    assert [finding for module in load_modules("tests") for finding in find_empty_names(module)] == []


def test_all_packages_were_read():
    assert {module.package for module in load_modules(*PACKAGES)} == set(PACKAGES)


def test_every_core_module_listed_exists():
    names = {module.name for module in load_modules(*PACKAGES)}

    assert [name for name in CORE if name not in names] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lakefeed.storage.store", "import lakefeed.ingest.websocket.server"),
        ("lakefeed.storage.store", "def late():\n    from lakefeed.catalog import app"),
        ("lakefeed.storage.store", "from . import decode"),
        ("lakefeed.catalog.service.tables", "from lakefeed.iceberg.types import Schema"),
        ("lakefeed.pipeline.spark.session", "from lakefeed.iceberg.types import Schema"),
        ("lakefeed.pipeline.spark.session", "import writer"),
        ("lakefeed.ingest.websocket.server", "from lakefeed.catalog.app import build_catalog"),
        ("lakefeed.ingest.service", "from lakefeed.catalog.store.sqlite import SqliteStore"),
        ("lakefeed.ingest.cli.main", "from lakefeed.pipeline.spark.session import build_session"),
    ],
)
def test_import_against_the_direction_is_found(name, text):
    assert len(find_crossings(Module(name, text))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lakefeed.ingest.websocket.server", "from lakefeed.writer.wal.payload import Frame"),
        ("lakefeed.ingest.service", "from lakefeed.catalog.app import build_catalog"),
        ("lakefeed.ingest.config", "from lakefeed.catalog import config"),
        ("pipeline.jobs.merge_mirror", "from lakefeed.contract import changes as columns"),
        ("lakefeed.pipeline.spark.session", "import lakefeed.contract.changes as columns"),
        ("lakefeed.writer.rows.json_strict", "import writers"),
    ],
)
def test_import_along_the_direction_is_not_found(name, text):
    assert find_crossings(Module(name, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from pathlib import Path",
        "import os.path",
        "from uuid import uuid4",
        "import uuid\nx = uuid.uuid4()",
        "import datetime as dt\nx = dt.datetime.now()",
        "from datetime import datetime\nx = datetime.now",
        "import pyarrow as pa\nx = pa.memory_map('f')",
        "x = open('f')",
        "async def f(): pass",
    ],
)
def test_action_in_a_core_module_is_found(text):
    assert len(find_actions(Module("lakefeed.writer.rows.json_strict", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from datetime import datetime, time\nx = datetime.fromtimestamp(0)",
        "from uuid import UUID",
        "import pyarrow as pa\nx = pa.array([])",
        "import time_machine",
        "def f(self, time): return self.open(time)",
    ],
)
def test_decision_in_a_core_module_is_not_found(text):
    assert find_actions(Module("lakefeed.writer.rows.json_strict", text)) == []


def test_what_the_core_imports_counts_as_core():
    modules = [
        Module(
            "lakefeed.writer.rows.json_strict",
            "from lakefeed.writer.rows import groups\nfrom writer.errors import WriterError",
        ),
        Module("lakefeed.writer.rows.groups", "import writer.bounds"),
        Module("writer.bounds", ""),
        Module("lakefeed.contract.errors", ""),
        Module("lakefeed.storage.store", "from writer.decode import decode"),
    ]

    core = {module.name for module in core_modules(modules)}

    assert core == {
        "lakefeed.writer.rows.json_strict",
        "lakefeed.writer.rows.groups",
        "writer.bounds",
        "lakefeed.contract.errors",
    }


def test_function_over_the_limit_is_found_and_its_docstring_is_not_counted():
    body = "    pass\n" * (FUNCTION_MAX_LINES - 1)
    docstring = '    """One.\n\n    Two.\n    """\n'

    assert find_oversize(Module("lakefeed.writer.rows.json_strict", f"def f():\n{docstring}{body}")) == []
    assert len(find_oversize(Module("lakefeed.writer.rows.json_strict", f"def f():\n{docstring}{body}    pass\n"))) == 1


def test_module_over_the_limit_is_found():
    assert find_oversize(Module("lakefeed.writer.rows.json_strict", "x = 1\n" * MODULE_MAX_LINES)) == []
    assert len(find_oversize(Module("lakefeed.writer.rows.json_strict", "x = 1\n" * (MODULE_MAX_LINES + 1)))) == 1


@pytest.mark.parametrize("name", ["writer.utils", "ingest.common.times", "tests.helpers"])
def test_name_that_says_nothing_is_found(name):
    assert len(find_empty_names(Module(name, ""))) == 1
