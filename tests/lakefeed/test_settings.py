from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from lakefeed.ingest.config import load_config
from lakefeed.pipeline.spark.settings import SparkSettings
from lakefeed.settings import SECTIONS, SettingsError, load_section, variable_of


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, kw_only=True)
class OneTable:
    mode: Mode | None = None
    limit_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    mode: Mode = Mode.FAST
    limit_bytes: int = 10
    wait_s: float = 1.0
    switch: bool = False
    names: tuple[str, ...] = ()
    place: Path | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, OneTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.limit_bytes < 0:
            raise ValueError("limit_bytes must not be negative")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str = "", **environ: str) -> Settings:
    Path("lakefeed.toml").write_text(text)
    return load_section(None, environ, "mirror", Settings)


def test_without_file_and_environment_the_defaults_hold():
    assert load_section(None, {}, "mirror", Settings) == Settings()


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

    assert settings == Settings(
        mode=Mode.SAFE,
        limit_bytes=2 << 20,
        wait_s=3.0,
        switch=True,
        names=("a", "b"),
        place=Path("/checkpoints"),
        conf={"spark.ui.enabled": "true"},
        tables={"sales.orders": OneTable(mode=Mode.SAFE)},
    )


def test_environment_wins_over_the_file():
    settings = load(
        '[pipeline.mirror]\nmode = "safe"\nlimit_bytes = 5',
        LAKEFEED_PIPELINE_MIRROR_LIMIT_BYTES="1KiB",
        LAKEFEED_PIPELINE_MIRROR_NAMES="a, b",
        LAKEFEED_PIPELINE_MIRROR_SWITCH="on",
    )

    assert settings == Settings(mode=Mode.SAFE, limit_bytes=1024, names=("a", "b"), switch=True)


def test_other_sections_and_other_variables_are_left_alone():
    text = '[server]\ndata_dir = "x"\n[pipeline.maintenance]\nwhatever = 1\n[pipeline.mirror]\nlimit_bytes = 5'

    assert load(text, LAKEFEED_PIPELINE_BACKFILL_X="1", LAKEFEED_SERVER_HOST="h") == Settings(limit_bytes=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[pipeline.mirror]\nlimit_byte = 1",
            r"key=pipeline\.mirror\.limit_byte .*did you mean limit_bytes\? known=mode,",
        ),
        ("[pipeline.miror]\nmode = 1", r"section=pipeline\.miror did you mean mirror\?"),
        ('[pipeline.mirror.tables."a.b"]\nmod = 1', r'key=pipeline\.mirror\.tables\."a\.b"\.mod .*did you mean mode\?'),
        ("pipeline = 1", r"settings stand in sections such as \[pipeline\.mirror\]"),
        ("[pipeline]\nmirror = 1", r"settings stand in sections: .*key=pipeline\.mirror"),
    ],
)
def test_unknown_key_in_the_file_is_an_error_that_names_it_and_the_known_ones(text, words):
    with pytest.raises(SettingsError, match=words):
        load(text)


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("LAKEFEED_PIPELINE_MIRROR_LIMIT", r"environment=LAKEFEED_PIPELINE_MIRROR_LIMIT did you mean .*_LIMIT_BYTES\?"),
        ("LAKEFEED_PIPELINE_MIROR_MODE", r"environment=LAKEFEED_PIPELINE_MIROR_MODE.* known=LAKEFEED_PIPELINE_SPARK_,"),
    ],
)
def test_unknown_variable_is_an_error_that_names_it_and_the_known_ones(variable, words):
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
        ("limit_bytes = -1", r"pipeline\.mirror\.limit_bytes must not be negative"),
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
        load_section(Path("absent.toml"), {}, "mirror", Settings)


def test_service_passes_over_the_settings_of_the_pipeline():
    Path("lakefeed.toml").write_text('[server]\nhttp_port = 1\n[pipeline.mirror]\nanything = "goes"')

    loaded = load_config(None, {"LAKEFEED_PIPELINE_MIRROR_MODE": "safe"})

    assert loaded.config.server.http_port == 1


def test_every_setting_of_spark_but_its_table_can_come_from_the_environment():
    names = [item.name for item in fields(SparkSettings) if item.name != "conf"]
    environ = {variable_of("spark", name): "http://x" for name in names}

    settings = load_section(None, environ, "spark", SparkSettings)

    assert {name for name in names if getattr(settings, name) in ("http://x", ("http://x",))} == set(names)


def test_sections_have_names_that_the_environment_can_tell_apart():
    assert not [(a, b) for a in SECTIONS for b in SECTIONS if a != b and b.startswith(f"{a}_")]
