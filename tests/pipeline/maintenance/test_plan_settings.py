from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lakefeed.pipeline.maintenance.commands import parse_steps
from lakefeed.pipeline.maintenance.plan import MaintenanceConfig, Step
from lakefeed.settings import SettingsError, load_section


def load(tmp_path: Path, text: str, **environ: str) -> MaintenanceConfig:
    path = tmp_path / "lakefeed.toml"
    path.write_text(text)
    return load_section(path, environ, "pipeline.maintenance", MaintenanceConfig)


def test_a_tables_own_settings_override_those_of_the_section(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [pipeline.maintenance]
        target_file_bytes = "64MiB"
        sort = "id"
        run = ["compact", "expire"]
        [pipeline.maintenance.tables."sales.orders"]
        zorder = ["customer", "day"]
        skip = true
        """,
        LAKEFEED_PIPELINE_MAINTENANCE_MIN_INPUT_FILES="7",
    )
    orders, others = config.settings_of("sales.orders"), config.settings_of("sales.lines")
    assert (orders.target_file_bytes, others.target_file_bytes) == (64 << 20, 64 << 20)
    assert (orders.sort, orders.zorder, orders.skip) == ("", ("customer", "day"), True)
    assert (others.sort, others.zorder, others.skip) == ("id", (), False)
    assert orders.run == (Step.COMPACT, Step.EXPIRE)
    assert orders.min_input_files == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("orphan_age_s = 3600", "a day at least"),
        ('sort = "a"\nzorder = ["b"]', "give one of them"),
        ("min_input_files = 1", "at least 2"),
        ("target_file_bytes = 1", "at least 1 MiB"),
        ('run = ["compress"]', "compact"),
        ("[pipeline.maintenance.tables.a]\norphan_age_s = 1", "a day at least"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_rule(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(tmp_path, f"[pipeline.maintenance]\n{text}")


def test_steps_are_chosen_by_name() -> None:
    assert parse_steps(None) == frozenset(Step)
    assert parse_steps("expire, compact") == {Step.EXPIRE, Step.COMPACT}
    for wrong in ("", "compress", "compact,"[:0], "expire;orphans"):
        with pytest.raises(SettingsError, match="--only takes compact"):
            parse_steps(wrong)


def test_every_setting_is_documented_with_its_default_and_reason() -> None:
    page = (Path(__file__).parents[3] / "docs" / "maintenance.md").read_text(encoding="utf-8")
    table = page[page.index("| setting | default | what it does |") :].partition("\n\n")[0].splitlines()[2:]
    config = MaintenanceConfig()
    shown = {item.name: repr(getattr(config, item.name)) for item in fields(config)}
    shown["run"] = ", ".join(step.value for step in config.run)
    assert table == [f"| `{item.name}` | `{shown[item.name]}` | {item.metadata['help']} |" for item in fields(config)]
