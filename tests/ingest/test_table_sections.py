"""Settings of single tables in the file: how they are read, and which mistakes are found in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakefeed.ingest.cli.main import main
from lakefeed.ingest.config import LoadedConfig, load_config
from lakefeed.settings import MIB, SettingsError

SECTIONS = """
[tables."sales.*"]
flush_max_age_s = 5
target_file_bytes = "64MiB"

[tables."sales.orders"]
partition = "day(_cdc_timestamp), bucket[16](customer_id)"
sort = "customer_id, created_at desc"
properties = { "write.object-storage.enabled" = "true" }
"""


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str) -> LoadedConfig:
    Path("settings.toml").write_text(text, encoding="utf-8")
    return load_config(Path("settings.toml"), {})


def complaint(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(text)
    return str(caught.value)


def test_sections_of_tables_are_read_with_units_and_types():
    loaded = load(SECTIONS)
    orders = loaded.config.tables.settings_for("sales.orders", loaded.config.writer)
    assert (orders.config.flush_max_age_s, orders.config.target_file_bytes) == (5.0, 64 * MIB)
    assert orders.config.sort == "customer_id, created_at desc"
    assert orders.properties == {"write.object-storage.enabled": "true"}
    assert loaded.origins['tables."sales.orders".sort'] == "settings.toml"


def test_unknown_key_of_a_table_is_an_error_that_names_the_nearest():
    found = complaint('[tables."sales.orders"]\npartitions = "none"\n')
    assert found == (
        'unknown setting of a table: key=tables."sales.orders".partitions in=settings.toml; did you mean partition?'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tables]\nusers = "day(x)"\n', 'key=tables."users"'),
        ("[tables.users]\nflush_max_bytes = 1.5\n", 'wrong type: key=tables."users".flush_max_bytes'),
        (
            "[tables.users]\nflush_max_bytes = '512MiB'\n",
            'tables."users": buffer_max_bytes must be at least 4 times flush_max_bytes; ',
        ),
        ("[tables.users]\nbuffer_max_bytes = 1\n", 'unknown setting of a table: key=tables."users".buffer_max_bytes'),
        ('[tables.users]\npartition = "week(a)"\n', 'tables."users": partition transform is not known'),
        ("[tables.users]\nproperties = 5\n", "expected=dict"),
    ],
)
def test_mistake_in_a_tables_section_is_told_by_name(text, message):
    assert message in complaint(text)


def test_config_command_lists_what_tables_are_told():
    Path("lakefeed.toml").write_text(SECTIONS, encoding="utf-8")
    result = CliRunner().invoke(main, ["config", "--json"])
    assert json.loads(result.output)['tables."sales.*".flush_max_age_s'] == 5.0
    assert 'tables."sales.orders".sort' in CliRunner().invoke(main, ["config"]).output
