"""A mirror as a table: made, checked, and brought to the columns and storage that it needs. Owns how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.mirrors.evolution import columns_sql, plan_evolution
from pipeline.mirrors.layout import Layout, storage_properties
from pipeline.mirrors.lineage import load_lineage
from pipeline.mirrors.markers import MIRROR_KEY, MIRROR_MODE, Marker, find_marker
from pipeline.mirrors.names import MirrorNames
from pipeline.mirrors.origins import Origin, check_origin
from pipeline.mirrors.settings import MirrorMode, MirrorSettings
from pipeline.mirrors.sql_text import property_pairs, quoted
from pipeline.table_documents import load_uuid
from pipeline.tables import exists, properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class OtherKindOfMirror(PipelineError):
    """The mirror is a history and should show current rows, or the other way round: a person has to decide."""


def load_origin(spark: SparkSession, names: MirrorNames) -> Origin:
    """Find out which table the change table is now."""
    return Origin(str(names.table), load_uuid(spark, names.table_sql))


def load_built_key(spark: SparkSession, names: MirrorNames) -> tuple[str, ...]:
    """Read the key that the mirror was built with; empty if there is no mirror yet.

    Raises: NotAMirror, OtherChangeTable.
    """
    if not exists(spark, names.mirror_sql):
        return ()
    found = properties(spark, names.mirror_sql)
    check_origin(found, load_origin(spark, names), name=str(names.mirror))
    return tuple(json.loads(found[MIRROR_KEY]))


def prepare_mirror(
    spark: SparkSession, names: MirrorNames, layout: Layout, settings: MirrorSettings, *, origin: Origin
) -> None:
    """Create the mirror, or bring the one that is there to the layout and the mode.

    Raises: ColumnMismatch, OtherKindOfMirror.
    """
    wanted = storage_properties(settings) | origin.to_properties()
    wanted |= {MIRROR_MODE: settings.mode.value, MIRROR_KEY: json.dumps(layout.key)}
    if not exists(spark, names.mirror_sql):
        spark.sql(_create(names, layout, settings, wanted))
        return
    present = properties(spark, names.mirror_sql)
    check_mode(present, names, settings)
    for statement in plan_evolution(names.mirror_sql, has=spark.table(names.mirror_sql).schema, needs=layout.schema):
        spark.sql(statement)
    changed = {key: value for key, value in wanted.items() if present.get(key) != value}
    # A table's format never goes back.
    if int(present.get("format-version", "2")) > int(wanted["format-version"]):
        changed.pop("format-version", None)
    if changed:
        spark.sql(f"ALTER TABLE {names.mirror_sql} SET TBLPROPERTIES ({property_pairs(changed)})")


def check_mode(present: Mapping[str, str], names: MirrorNames, settings: MirrorSettings) -> None:
    """Check that a mirror keeps of each row what it was built to keep: its versions, or its last state.

    Raises: OtherKindOfMirror.
    """
    built = present.get(MIRROR_MODE, settings.mode.value)
    if (built == MirrorMode.HISTORY.value) != settings.keeps_history:
        raise OtherKindOfMirror(
            "a history cannot become a mirror of current rows, nor the other way round, set target for another name or "
            f"drop the mirror and its tombstones: mirror={names.mirror} built={built} configured={settings.mode.value}"
        )


def _create(names: MirrorNames, layout: Layout, settings: MirrorSettings, table_properties: dict[str, str]) -> str:
    parts = f" PARTITIONED BY (bucket({settings.buckets}, {quoted(layout.key[0])}))" if settings.buckets else ""
    return (
        f"CREATE TABLE {names.mirror_sql} ({columns_sql(layout.schema)}) USING iceberg{parts} "
        f"TBLPROPERTIES ({property_pairs(table_properties)})"
    )


def load_marker(spark: SparkSession, names: MirrorNames) -> Marker | None:
    """Read how far the mirror has come."""
    lineage = load_lineage(spark, names.mirror_sql)
    marker = find_marker(lineage, {})
    return marker or find_marker((), properties(spark, names.mirror_sql))
