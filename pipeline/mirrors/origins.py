"""Which change table a mirror, or its tombstones, are made from. Owns the properties that say so, and their check.

A change table that was dropped and made anew has the name of the old one and other rows: its positions begin again, and
old rows with higher ones would keep the new out. So a mirror also keeps the table's uuid, which no other table has.
Mirrors that were made before they did so take it on when they are next brought up to date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import PipelineError

MIRROR_OF = "lakefeed.mirror.of"
MIRROR_OF_UUID = "lakefeed.mirror.of-uuid"


class NotAMirror(PipelineError):
    """A table with the mirror's name is something else: a person has to name another target."""


class OtherChangeTable(PipelineError):
    """The change table is not the one that the mirror was built from: a person has to decide about the mirror."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A change table by name and uuid; None where the uuid cannot be seen, as over Spark Connect."""

    table: str
    uuid: str | None

    def to_properties(self) -> dict[str, str]:
        """Give what a table made from this one says of it."""
        return {MIRROR_OF: self.table} | ({MIRROR_OF_UUID: self.uuid} if self.uuid else {})


def check_origin(present: Mapping[str, str], origin: Origin, *, name: str) -> None:
    """Check by the properties of a mirror, or of its tombstones, that they are of this change table.

    Raises: NotAMirror, OtherChangeTable.
    """
    if present.get(MIRROR_OF) != origin.table:
        raise NotAMirror(
            "the table exists and is no mirror of this one, set target for another name: "
            f"table={origin.table} target={name} mirror_of={present.get(MIRROR_OF)}"
        )
    built_from = present.get(MIRROR_OF_UUID)
    if built_from and origin.uuid and built_from != origin.uuid:
        raise OtherChangeTable(
            "the change table was dropped and made anew since its mirror was built, drop the mirror and its tombstones "
            f"or set target for another name: table={origin.table} mirror={name} built_from={built_from} "
            f"now={origin.uuid}"
        )


def is_of(present: Mapping[str, str], origin: Origin) -> bool:
    """Tell whether a table is made from this change table."""
    try:
        check_origin(present, origin, name="")
    except (NotAMirror, OtherChangeTable):
        return False
    return True
