from __future__ import annotations

import pytest

from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import (
    MIRROR_MODE,
    MIRROR_OF,
    MIRROR_OF_UUID,
    ChangeTableReplaced,
    MirrorModeMismatch,
    MirrorOrigin,
    NotAMirror,
    check_mode,
    check_origin,
    is_of,
)
from lakefeed.pipeline.spark.tables import TableIdentifier

ORIGIN = MirrorOrigin("default.users", "5f")


def test_a_table_built_from_a_change_table_belongs_to_it() -> None:
    assert is_of(ORIGIN.to_properties(), ORIGIN)


def test_a_recreated_table_is_another_table_and_the_message_says_what_to_do() -> None:
    present = MirrorOrigin("default.users", "a1").to_properties()
    with pytest.raises(ChangeTableReplaced, match=r"drop the mirror .* target: .* mirror=m built_from=a1 now=5f"):
        check_origin(present, ORIGIN, name="m")
    assert not is_of(present, ORIGIN)


def test_a_table_built_from_another_table_or_from_none_is_no_mirror() -> None:
    for present in ({}, {MIRROR_OF: "default.orders", MIRROR_OF_UUID: "5f"}):
        with pytest.raises(NotAMirror, match=r"table=default\.users target=m"):
            check_origin(present, ORIGIN, name="m")


def test_without_both_uuids_the_name_decides() -> None:
    assert is_of({MIRROR_OF: "default.users"}, ORIGIN)
    assert is_of(ORIGIN.to_properties(), MirrorOrigin("default.users", None))
    assert MirrorOrigin("default.users", None).to_properties() == {MIRROR_OF: "default.users"}


@pytest.mark.parametrize("mode", MirrorMode)
@pytest.mark.parametrize("built", MirrorMode)
def test_a_history_stays_a_history_and_other_modes_can_be_changed(built: MirrorMode, mode: MirrorMode) -> None:
    settings = MirrorSettings(mode=mode, target="{table}_mirror")
    names = mirror_names(TableIdentifier.parse("users"), settings, "lake")
    if (built is MirrorMode.HISTORY) == (mode is MirrorMode.HISTORY):
        check_mode({MIRROR_MODE: built.value}, names, settings)
        return
    with pytest.raises(MirrorModeMismatch, match=f"users_mirror built={built.value} configured={mode.value}"):
        check_mode({MIRROR_MODE: built.value}, names, settings)
