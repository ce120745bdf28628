from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from lakefeed.ingest.config import load_config
from lakefeed.pipeline.spark.session import SessionConfig
from lakefeed.settings import (
    GIB,
    SECTIONS,
    Settings,
    SettingsError,
    check,
    load_section,
    narrowed,
    setting,
    table_settings,
    variable_name,
)


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, kw_only=True)
class OneTable(Settings):
    mode: Mode = setting(Mode.FAST, "Mode.")
    limit_bytes: int = setting(10, "Limit.", minimum=0, maximum=GIB)


@dataclass(frozen=True, kw_only=True)
class Section(OneTable):
    wait_s: float = setting(1.0, "Wait.", above=0)
    share: float = setting(0.5, "Share.", above=0, maximum=1)
    kind: str = setting("a", "Kind.", choices=("a", "b"))
    password: str = setting("", "Password.", choices=("", "hunter2"), secret=True)
    switch: bool = setting(False, "Switch.")
    names: tuple[str, ...] = setting((), "Names.")
    place: Path | None = setting(None, "Place.")
    conf: Mapping[str, str] = setting({}, "Conf.")
    tables: Mapping[str, Mapping[str, Any]] = table_settings(OneTable, "Tables.")

    def check(self) -> None:
        check(self.wait_s < 100 or self.switch, "wait_s needs switch")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str = "", **environ: str) -> Section:
    Path("lakefeed.toml").write_text(text)
    return load_section(None, environ, "pipeline.mirror", Section)


def test_without_file_and_environment_the_defaults_hold():
    assert load_section(None, {}, "pipeline.mirror", Section) == Section()


def test_file_is_read_with_every_kind_of_value():
    settings = load(
        """
        [pipeline.mirror]
        mode = "safe"
        limit_bytes = "2MiB"
        wait_s = 3
        switch = true
        names = ["a", "b"]
        place = "/checkpoints"
        conf = { "spark.ui.enabled" = "true" }
        [pipeline.mirror.tables."sales.orders"]
        mode = "safe"
        """
    )

    assert settings == Section(
        mode=Mode.SAFE,
        limit_bytes=2 << 20,
        wait_s=3.0,
        switch=True,
        names=("a", "b"),
        place=Path("/checkpoints"),
        conf={"spark.ui.enabled": "true"},
        tables={"sales.orders": {"mode": Mode.SAFE}},
    )


def test_environment_wins_over_the_file():
    settings = load(
        '[pipeline.mirror]\nmode = "safe"\nlimit_bytes = 5',
        LAKEFEED_PIPELINE_MIRROR_LIMIT_BYTES="1KiB",
        LAKEFEED_PIPELINE_MIRROR_NAMES="a, b",
        LAKEFEED_PIPELINE_MIRROR_SWITCH="on",
    )

    assert settings == Section(mode=Mode.SAFE, limit_bytes=1024, names=("a", "b"), switch=True)


def test_other_sections_and_other_variables_are_left_alone():
    text = '[server]\ndata_dir = "x"\n[pipeline.maintenance]\nwhatever = 1\n[pipeline.mirror]\nlimit_bytes = 5'

    assert load(text, LAKEFEED_PIPELINE_BACKFILL_X="1", LAKEFEED_SERVER_HOST="h", LAKEFEED_TOKEN="t") == Section(
        limit_bytes=5
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[pipeline.mirror]\nlimit_byte = 1",
            r"key=pipeline\.mirror\.limit_byte .*did you mean pipeline\.mirror\.limit_bytes\?",
        ),
        ("[pipeline.miror]\nmode = 1", r"section=pipeline\.miror; did you mean pipeline\.mirror\?"),
        ('[pipeline.mirror.tables."a.b"]\nmod = 1', r'key=pipeline\.mirror\.tables\."a\.b"\.mod .*did you mean mode\?'),
        ("pipeline = 1", r"setting outside a section: .*key=pipeline"),
        ("[pipelin.mirror]\nmode = 1", r"unknown section: .*section=pipelin"),
        ("[pipeline]\nmirror = 1", r"setting outside a section: .*key=pipeline\.mirror"),
    ],
)
def test_unknown_key_in_the_file_is_an_error_that_names_the_nearest(text, words):
    with pytest.raises(SettingsError, match=words):
        load(text)


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (
            "LAKEFEED_PIPELINE_MIRROR_LIMIT",
            r"environment=LAKEFEED_PIPELINE_MIRROR_LIMIT; did you mean .*_LIMIT_BYTES\?",
        ),
        (
            "LAKEFEED_PIPELINE_MIROR_MODE",
            r"environment=LAKEFEED_PIPELINE_MIROR_MODE; did you mean LAKEFEED_PIPELINE_MIRROR_MODE\?",
        ),
    ],
)
def test_unknown_variable_is_an_error_that_names_the_nearest(variable, words):
    with pytest.raises(SettingsError, match=words):
        load(**{variable: "1"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mode = "slow"', r"wrong value: key=pipeline\.mirror\.mode .*expected=fast\|safe"),
        ('switch = "yes"', r"wrong type: .*expected=bool got=str"),
        ("limit_bytes = 1.5", r"wrong type: .*expected=int got=float"),
        ('limit_bytes = "many"', r"wrong value: .*expected=int"),
        ("names = 1", r"wrong type: .*expected=list of text got=int"),
        ("tables = 1", r"wrong type: .*expected=section got=int"),
        ('tables = { "a" = 1 }', r"wrong type: .*expected=section got=int"),
        ("limit_bytes = -1", r"pipeline\.mirror\.limit_bytes must be between 0 and 1024 MiB: -1"),
        ("wait_s = nan", r"pipeline\.mirror\.wait_s must be above 0: nan"),
        ("share = 2", r"pipeline\.mirror\.share must be above 0 and at most 1: 2\.0"),
        ('kind = "c"', r"pipeline\.mirror\.kind must be one of a, b: c"),
        ('password = "letmein"', r"pipeline\.mirror\.password must be one of empty, hunter2$"),
        ("wait_s = 100", r"pipeline\.mirror\.wait_s needs switch"),
    ],
)
def test_value_that_does_not_fit_is_named_with_what_is_expected(text, words):
    with pytest.raises(SettingsError, match=words):
        load(f"[pipeline.mirror]\n{text}")


def test_value_of_the_environment_that_does_not_fit_is_not_repeated():
    with pytest.raises(SettingsError) as caught:
        load(LAKEFEED_PIPELINE_MIRROR_LIMIT_BYTES="hunter2")

    assert "LAKEFEED_PIPELINE_MIRROR_LIMIT_BYTES" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_file_that_was_named_and_is_not_there_is_an_error():
    with pytest.raises(SettingsError, match=r"cannot read the configuration: file=absent\.toml"):
        load_section(Path("absent.toml"), {}, "pipeline.mirror", Section)


def test_service_reports_unknown_settings_of_the_pipeline():
    Path("lakefeed.toml").write_text('[pipeline.mirror]\nanything = "goes"')

    with pytest.raises(SettingsError, match=r"unknown setting: key=pipeline\.mirror\.anything"):
        load_config(None, {})


def test_settings_of_a_table_override_those_of_its_section():
    section = Section(mode=Mode.SAFE, limit_bytes=5, tables={"t": {"limit_bytes": 6}})

    assert narrowed(section, OneTable, section.tables["t"]) == OneTable(mode=Mode.SAFE, limit_bytes=6)


def test_every_setting_of_spark_but_its_table_can_come_from_the_environment():
    names = [item.name for item in fields(SessionConfig) if item.name != "conf"]
    values = dict.fromkeys(names, "x") | {"url": "http://x", "remote": "sc://x"}
    environ = {variable_name("pipeline.spark", name): value for name, value in values.items()}

    settings = load_section(None, environ, "pipeline.spark", SessionConfig)

    assert {name for name in names if getattr(settings, name) in (values[name], (values[name],))} == set(names)


def test_sections_have_names_that_the_environment_can_tell_apart():
    names = [section.replace(".", "_") for section in SECTIONS]
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(f"{a}_")]
