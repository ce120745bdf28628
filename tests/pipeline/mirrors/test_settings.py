from __future__ import annotations

import enum
from dataclasses import fields
from pathlib import Path

import pytest

from lakefeed.pipeline.mirrors.follower import cleanup_interval_s
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorMode, MirrorSettings, RowsWithoutKey
from lakefeed.settings import SettingsError, load_section

PAGE = Path(__file__).parents[3] / "docs" / "mirrors.md"
FILE = """
[pipeline.mirror]
mode = "merge-on-read"
buckets = 4

[pipeline.mirror.tables."sales.orders"]
mode = "history"
key = ["region", "id"]
rows_without_key = "skip"
"""


def load(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> MirrorConfig:
    path = tmp_path / "lakefeed.toml"
    path.write_text(text)
    return load_section(path, environ or {}, "pipeline.mirror", MirrorConfig)


def test_a_tables_own_settings_override_those_of_the_section(tmp_path: Path) -> None:
    config = load(tmp_path, FILE, {"LAKEFEED_PIPELINE_MIRROR_BUCKETS": "8"})
    orders, users = config.settings_of("sales.orders"), config.settings_of("default.users")
    assert (orders.mode, orders.key, orders.buckets) == (MirrorMode.HISTORY, ("region", "id"), 8)
    assert orders.rows_without_key is RowsWithoutKey.SKIP
    assert (users.mode, users.key, users.buckets) == (MirrorMode.MERGE_ON_READ, (), 8)
    assert (orders.target_name("orders"), users.target_name("users")) == ("orders_history", "users_current")


@pytest.mark.parametrize(
    "wrong",
    [
        "batch_max_rows = 0",
        'target = "mirror"',
        'mode = "fast"',
        "interval_s = 0",
        "snapshot_age_s = 0",
        'checkpoints = ""',
        '[pipeline.mirror.tables."users"]\nbuckets = -1',
        '[pipeline.mirror.tables."users"]\nkeys = ["id"]',
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(tmp_path: Path, wrong: str) -> None:
    name = wrong.rpartition("\n")[2].split(" ")[0]
    with pytest.raises(SettingsError, match=name):
        load(tmp_path, f"[pipeline.mirror]\n{wrong}")


def test_a_configured_target_names_the_mirror() -> None:
    config = MirrorConfig(target="live_{table}", tables={"a.b": {"target": "{table}_now"}})
    assert config.settings_of("a.c").target_name("c") == "live_c"
    assert config.settings_of("a.b").target_name("b") == "b_now"


@pytest.mark.parametrize(("age_s", "every_s"), [(3600.0, 900.0), (1.0, 60.0), (864_000.0, 3600.0)])
def test_a_mirror_is_cleaned_up_several_times_within_the_age_of_its_snapshots(age_s: float, every_s: float) -> None:
    assert cleanup_interval_s(MirrorSettings(snapshot_age_s=age_s)) == every_s


def test_every_setting_is_documented_with_its_default_and_reason() -> None:
    defaults = {
        item.name: item.default.value if isinstance(item.default, enum.Enum) else item.default
        for item in fields(MirrorConfig)
    }
    expected = [
        f"| `{item.name}` | `{defaults[item.name]!r}` | {item.metadata['help']} |"
        for item in fields(MirrorConfig)
        if item.name != "tables"
    ]
    section = PAGE.read_text(encoding="utf-8").partition("\n## Settings\n")[2]
    assert [line for line in section.splitlines() if line.startswith("| `")] == expected
