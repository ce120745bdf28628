"""Which sections hold for a table, and which of them wins."""

from __future__ import annotations

import pytest

from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.table_settings import TableSections, per_table_keys

CONFIG = WriterConfig(flush_max_age_s=10.0)


def settings_for(table: str, sections: dict):
    return TableSections(sections).settings_for(table, CONFIG)


def test_table_without_a_section_has_the_writers_settings():
    settings = settings_for("sales.orders", {"other.*": {"sort": "id"}})
    assert settings.config is CONFIG
    assert (settings.properties, settings.given) == ({}, frozenset())


def test_sections_are_laid_over_each_other_and_the_most_specific_wins():
    sections = {
        "sales.orders": {"flush_max_age_s": 1.0},
        "*": {"flush_max_age_s": 99.0, "sort": "id", "keep_before": True},
        "sales.*": {"flush_max_age_s": 5.0, "sort": "region"},
    }
    orders = settings_for("sales.orders", sections)
    assert (orders.config.flush_max_age_s, orders.config.sort, orders.config.keep_before) == (1.0, "region", True)
    assert orders.given == {"flush_max_age_s", "sort", "keep_before"}
    assert settings_for("sales.lines", sections).config.flush_max_age_s == 5.0
    assert settings_for("other.lines", sections).config.flush_max_age_s == 99.0


def test_of_two_patterns_alike_the_one_further_down_wins():
    sections = {"*.aa": {"sort": "first"}, "bb.*": {"sort": "second"}}
    assert settings_for("bb.aa", sections).config.sort == "second"


def test_patterns_match_whole_names_and_only_the_star_is_special():
    sections = {"sales.*": {"sort": "x"}}
    assert not settings_for("xsales.orders", sections).given
    assert not settings_for("salesXorders", sections).given
    assert settings_for("a+b", {"a+*": {"sort": "x"}}).given
    assert settings_for("a.b.c", {"a.*.c": {"sort": "x"}}).given
    assert settings_for("a\nb", {"a*": {"sort": "x"}}).given


def test_patterns_do_not_reach_the_quarantine_and_its_name_does():
    name = "sales.lakefeed_quarantine"
    assert not settings_for(name, {"*": {"partition": "identity(region)"}}).given
    assert settings_for(name, {name: {"flush_max_age_s": 1.0}}).given


def test_properties_of_several_sections_are_joined():
    sections = {"*": {"properties": {"a": "1", "b": "1"}}, "t": {"properties": {"b": "2"}}}
    assert settings_for("t", sections).properties == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"flush_max_changes": 0}, "flush_max_changes must be at least 1"),
        ({"partition": "day"}, "partition must be"),
        ({"partition": "bucket[0](id)"}, "transform is not known"),
        ({"partition": "day(a), day(a)"}, "twice"),
        ({"sort": "a upward"}, "sort must be"),
        ({"properties": {"lakefeed.append-only": "false"}}, "lakefeed.append-only"),
        ({"properties": {"a": 1}}, "properties must be texts"),
    ],
)
def test_section_that_makes_no_sense_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message) as refused:
        TableSections({"sales.*": values}).check(CONFIG)
    assert str(refused.value).startswith('tables."sales.*": ')


def test_only_what_can_differ_between_tables_can_be_said_for_one():
    keys = per_table_keys()
    assert {"partition", "sort", "flush_max_bytes", "format_version", "properties"} <= set(keys)
    assert not {"buffer_max_bytes", "decode_threads", "default_namespace", "flush_check_interval_s"} & set(keys)
