from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lakefeed.pipeline.maintenance.commands import parse_steps
from lakefeed.pipeline.maintenance.locations import SharedLocation, check_location_is_own, directories_of
from lakefeed.pipeline.maintenance.settings import MaintenanceConfig, Step
from lakefeed.settings import SettingsError, load_section


def load(tmp_path: Path, text: str, **environ: str) -> MaintenanceConfig:
    path = tmp_path / "lakefeed.toml"
    path.write_text(text)
    return load_section(path, environ, "pipeline.maintenance", MaintenanceConfig)


def test_a_tables_own_settings_lie_over_those_of_all(tmp_path: Path) -> None:
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


A, B = "default.a", "default.a.b"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://lake/a", "s3://lake/a/b"),
        ("s3://lake/a", "s3://lake/a"),
        ("file:///lake/a", "file:/lake/a/"),
        ("file:/lake/a/", "file:///lake/a/b"),
        ("/lake/a", "file:///lake/a/b"),
        ("file://localhost/lake//a", "/lake/x/../a"),
        ("s3a://lake/a", "s3://lake/a/b"),
        ("s3://lake/a", "s3n://lake/a/"),
        ("S3://lake/a", "s3a://lake/a"),
        ("abfs://c@lake/a", "abfss://c@lake/a"),
    ],
)
def test_no_orphans_are_looked_for_where_another_tables_files_lie(first: str, second: str) -> None:
    with pytest.raises(SharedLocation, match=r"default\.a\.b"):
        check_location_is_own(A, {A: [first], B: [second]})


@pytest.mark.parametrize("key", ["write.data.path", "write.metadata.path"])
def test_no_orphans_are_looked_for_where_another_table_puts_its_new_files(key: str) -> None:
    elsewhere = directories_of("s3://lake/b", {"owner": "x", key: "s3a://lake/a/of-b"})
    with pytest.raises(SharedLocation, match=r"other tables have files there.*default\.a\.b"):
        check_location_is_own(A, {A: ["s3://lake/a"], B: elsewhere})
    assert check_location_is_own(A, {A: directories_of("s3://lake/a", {key: "s3://lake/a/data"}), B: ["s3://lake/b"]})


def test_no_orphans_are_looked_for_while_it_is_not_known_where_some_table_lies() -> None:
    for places in ({A: ["s3://lake/a"], B: []}, {A: [], B: ["s3://lake/b"]}, {B: ["s3://lake/b"]}):
        with pytest.raises(SharedLocation, match="location of some tables is unknown"):
            check_location_is_own(A, places)


@pytest.mark.parametrize("other", ["s3://lake/ab", "s3://lake", "s3://other/a", "file:/lake/a", "s3://lake//a"])
def test_a_table_beside_or_above_does_not_matter(other: str) -> None:
    assert check_location_is_own(A, {A: ["s3://lake/a"], B: [other]}) == "s3://lake/a"
