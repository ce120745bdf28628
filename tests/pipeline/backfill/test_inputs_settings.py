"""The settings of backfills are those that their page lists."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lakefeed.pipeline.backfill.inputs import BackfillConfig

PAGE = Path(__file__).parents[3] / "docs" / "backfill.md"


def test_every_setting_is_documented_with_its_default_and_reason() -> None:
    rows = [f"| `{item.name}` | `{item.default!r}` | {item.metadata['help']} |" for item in fields(BackfillConfig)]
    section = PAGE.read_text(encoding="utf-8").partition("## Settings")[2]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize("name", ["chunk_max_bytes", "chunk_max_rows", "parallel_reads"])
def test_limits_of_zero_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BackfillConfig(**{name: 0})
