"""A mirror as a table: create it, check where it comes from, alter it to its layout and mode.

A change table that was dropped and recreated has the name of the old one but other rows: its positions start again, and
old rows with higher positions would keep the new ones out. So a mirror also records the uuid of its change table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.layout import Layout, columns_sql, plan_evolution, storage_properties
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorNames, MirrorSettings
from lakefeed.pipeline.spark.tables import exists, load_uuid, properties, property_pairs, quoted, set_properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Properties of a mirror.
MIRROR_OF = "lakefeed.mirror.of"
MIRROR_OF_UUID = "lakefeed.mirror.of-uuid"
MIRROR_KEY = "lakefeed.mirror.key"
MIRROR_MODE = "lakefeed.mirror.mode"


class NotAMirror(PipelineError):
    """The table with the mirror's name is not a mirror: the user has to configure another target."""


class ChangeTableReplaced(PipelineError):
    """The change table is not the one that the mirror was built from: the user has to decide about the mirror."""


@dataclass(frozen=True, slots=True)
class MirrorOrigin:
    """The change table of a mirror, by name and uuid; the uuid is None over Spark Connect."""

    table: str
    uuid: str | None

    def to_properties(self) -> dict[str, str]:
        """Return the properties of a table that is made from this one."""
        return {MIRROR_OF: self.table} | ({MIRROR_OF_UUID: self.uuid} if self.uuid else {})


def check_origin(present: Mapping[str, str], origin: MirrorOrigin, *, name: str) -> None:
    """Check by its properties that a mirror, or its tombstones table, belongs to this change table.

    Raises: NotAMirror, ChangeTableReplaced.
    """
    if present.get(MIRROR_OF) != origin.table:
        raise NotAMirror(
            "a table with the mirror's name exists and is not a mirror of this table, set another target: "
            f"table={origin.table} target={name} mirror_of={present.get(MIRROR_OF)}"
        )
    built_from = present.get(MIRROR_OF_UUID)
    if built_from and origin.uuid and built_from != origin.uuid:
        raise ChangeTableReplaced(
            "the change table was recreated since its mirror was built, drop the mirror and its tombstones or set "
            f"another target: table={origin.table} mirror={name} built_from={built_from} "
            f"now={origin.uuid}"
        )


def is_of(present: Mapping[str, str], origin: MirrorOrigin) -> bool:
    """Return whether a table is made from this change table."""
    try:
        check_origin(present, origin, name="")
    except (NotAMirror, ChangeTableReplaced):
        return False
    return True


class MirrorModeMismatch(PipelineError):
    """The mirror is a history but should have current rows, or vice versa: the user has to decide about it."""


def load_origin(spark: SparkSession, names: MirrorNames) -> MirrorOrigin:
    """Return the present identity of the change table."""
    return MirrorOrigin(str(names.table), load_uuid(spark, names.table_sql))


def load_built_key(spark: SparkSession, names: MirrorNames) -> tuple[str, ...]:
    """Return the key that the mirror was built with; empty if there is no mirror yet.

    Raises: NotAMirror, ChangeTableReplaced.
    """
    if not exists(spark, names.mirror_sql):
        return ()
    found = properties(spark, names.mirror_sql)
    check_origin(found, load_origin(spark, names), name=str(names.mirror))
    return tuple(json.loads(found[MIRROR_KEY]))


def prepare_mirror(
    spark: SparkSession, names: MirrorNames, layout: Layout, settings: MirrorSettings, *, origin: MirrorOrigin
) -> None:
    """Create the mirror, or alter the existing one to the layout and the mode.

    Raises: ColumnMismatch, MirrorModeMismatch.
    """
    wanted = storage_properties(settings) | origin.to_properties()
    wanted |= {MIRROR_MODE: settings.mode.value, MIRROR_KEY: json.dumps(layout.key)}
    if not exists(spark, names.mirror_sql):
        parts = f" PARTITIONED BY (bucket({settings.buckets}, {quoted(layout.key[0])}))" if settings.buckets else ""
        spark.sql(
            f"CREATE TABLE {names.mirror_sql} ({columns_sql(layout.schema)}) USING iceberg{parts} "
            f"TBLPROPERTIES ({property_pairs(wanted)})"
        )
        return
    present = properties(spark, names.mirror_sql)
    check_mode(present, names, settings)
    for statement in plan_evolution(names.mirror_sql, has=spark.table(names.mirror_sql).schema, needs=layout.schema):
        spark.sql(statement)
    changed = {key: value for key, value in wanted.items() if present.get(key) != value}
    # A table's format version cannot be lowered.
    if int(present.get("format-version", "2")) > int(wanted["format-version"]):
        changed.pop("format-version", None)
    set_properties(spark, names.mirror_sql, changed)


def check_mode(present: Mapping[str, str], names: MirrorNames, settings: MirrorSettings) -> None:
    """Check that a mirror which was built for current rows is not configured as a history, or vice versa.

    Raises: MirrorModeMismatch.
    """
    built = present.get(MIRROR_MODE, settings.mode.value)
    if (built == MirrorMode.HISTORY.value) != settings.keeps_history:
        raise MirrorModeMismatch(
            "a history cannot become a mirror of current rows or vice versa, set another target or drop the mirror and "
            f"its tombstones: mirror={names.mirror} built={built} configured={settings.mode.value}"
        )
