"""The documentation says what the code does: settings, links, and the tests behind each promise."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lakefeed.ingest.config import SERVICE_SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def settings_table() -> list[str]:
    return [
        f"| `{section}.{item.name}` | `{item.default!r}` | {item.metadata['help']} |"
        for section, cls in SERVICE_SECTIONS.items()
        for item in fields(cls)
    ]


def test_every_setting_is_documented_with_its_default_and_reason() -> None:
    documented = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line for line in documented if line.startswith("| `") and line.count("|") == 4 and "." in line.split("`")[1]
    ]
    assert rows == settings_table()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # not in code
    missing = []
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if "://" not in target and not (linked.exists() and (not anchor or anchor in _anchors(linked))):
            missing.append(target)
    assert not missing


def _anchors(page: Path) -> set[str]:
    """Return the anchors that renderers of Markdown make from a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 8
    missing = [f"{path}::{name}" for path, name in named if name not in _test_names(ROOT / path)]
    assert not missing


def _test_names(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
