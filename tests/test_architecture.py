"""Rules that import-linter cannot state: which folders are pure, and what runs with the standard library alone.

Nothing is imported: the rules read source text. The layers inside and between packages are contracts in pyproject.toml.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lakefeed", "ingest", "writer", "catalog", "pipeline")

# Folders and modules that decide and never act.
PURE = (
    "lakefeed/contract",
    "lakefeed/iceberg",
    "writer/wire",
    "writer/rows",
    "writer/tables/flush_policy.py",
    "writer/tables/memory.py",
    "writer/tables/pending.py",
    "writer/tables/state.py",
    "ingest/protocol",
    "ingest/admission",
    "ingest/debezium",
    "catalog/metadata",
)

# What the pipeline takes along to clusters, where it has the standard library and Spark.
STANDARD_LIBRARY_ONLY = (
    *(
        "lakefeed/contract",
        "lakefeed/settings.py",
        "lakefeed/logs.py",
        "lakefeed/backoff.py",
        "lakefeed/storage/config.py",
    ),
)

# Files, sockets, processes, threads, clocks and randomness, by the name that reaches them.
ACTIONS = (
    *("asyncio", "concurrent", "multiprocessing", "select", "selectors", "signal", "subprocess", "threading"),
    *("aiobotocore", "aiohttp", "asyncpg", "botocore", "http", "requests", "socket", "ssl", "urllib.request"),
    *("fcntl", "glob", "mmap", "os", "pathlib", "shutil", "sqlite3", "tempfile", "websockets"),
    *("pyarrow.OSFile", "pyarrow.fs", "pyarrow.memory_map"),
    *("datetime.date.today", "datetime.datetime.now", "datetime.datetime.today", "datetime.datetime.utcnow", "time"),
    *("numpy.random", "random", "secrets", "uuid.uuid1", "uuid.uuid4"),
)
BUILTIN_ACTIONS = {"__import__", "eval", "exec", "input", "open", "print"}


@dataclass(frozen=True)
class Module:
    """One source file and its path below the root."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def load_modules(*folders: str) -> Iterator[Module]:
    """Yield every module once. The links inside `lakefeed/` lead to folders that are read under their own names."""
    for folder in folders:
        start = ROOT / folder
        for path in [start] if start.is_file() else sorted(start.rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield Module(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def is_within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def imported_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything that is imported, wherever in the module that happens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def bound_names(tree: ast.Module) -> dict[str, str]:
    """Map the local names that imports bind to the full names behind them."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                bound |= {alias.asname: alias.name} if alias.asname else {root: root}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def find_actions(module: Module) -> list[str]:
    """Return what a pure module may not do: act, wait, or look at the clock."""
    found = [*_banned_imports(module.tree), *_banned_uses(module.tree), *_async_syntax(module.tree)]
    return [f"{module.path}:{line} is pure and must not use {what}" for line, what in found]


def _banned_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imported_names(tree) if is_within(name, ACTIONS))


def _banned_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    bound = bound_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTIN_ACTIONS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)) is not None:
            root, _, rest = name.partition(".")
            if root in bound and f"{bound[root]}.{rest}" in ACTIONS:
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


def test_pure_folders_decide_and_never_act():
    assert [finding for module in load_modules(*PURE) for finding in find_actions(module)] == []


@pytest.mark.parametrize("path", [*PURE, *STANDARD_LIBRARY_ONLY])
def test_every_path_of_a_rule_exists(path):
    assert list(load_modules(path))


def test_what_the_pipeline_takes_to_clusters_needs_the_standard_library_only():
    allowed = (*sys.stdlib_module_names, "lakefeed.contract", "lakefeed.settings", "lakefeed.logs")
    found = [
        f"{module.path}:{line} imports {imported}"
        for module in load_modules(*STANDARD_LIBRARY_ONLY)
        for line, imported in imported_names(module.tree)
        if not is_within(imported, allowed)
    ]

    assert found == []


def test_pyiceberg_is_imported_by_the_second_readers_child_process_only():
    modules = load_modules(*PACKAGES)
    found = {m.path for m in modules if any(is_within(name, ("pyiceberg",)) for _, name in imported_names(m.tree))}

    assert found == {"writer/pyiceberg_plan.py"}


def test_every_folder_tells_its_story():
    packages = [module for module in load_modules(*PACKAGES) if module.path.endswith("__init__.py")]

    assert [module.path for module in packages if not ast.get_docstring(module.tree)] == []


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
def test_action_in_a_pure_module_is_found(text):
    assert len(find_actions(Module("writer/rows/values.py", text))) == 1


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
def test_decision_in_a_pure_module_is_not_found(text):
    assert find_actions(Module("writer/rows/values.py", text)) == []
