"""Settings of mirrors: [pipeline.mirror], and the names of the tables that belong to a mirror."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.pipeline.spark.tables import TableIdentifier
from lakefeed.settings import Settings, check, narrowed, setting, table_settings


class MirrorMode(enum.Enum):
    """How a mirror is stored, and what of a row it keeps."""

    COPY_ON_WRITE = "copy-on-write"
    MERGE_ON_READ = "merge-on-read"
    DELETION_VECTORS = "deletion-vectors"
    HISTORY = "history"


class RowsWithoutKey(enum.Enum):
    """What becomes of a change that names no row."""

    STOP = "stop"
    SKIP = "skip"


_CURRENT_TARGET = "{table}_current"
_HISTORY_TARGET = "{table}_history"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings(Settings):
    """Settings of one mirror."""

    mode: MirrorMode = setting(
        MirrorMode.COPY_ON_WRITE, "Kind of mirror. Every engine reads copy-on-write; the others write less per merge."
    )
    key: tuple[str, ...] = setting(
        (), "Columns that identify a row. Empty means the columns declared as key, else `_cdc_row_id`."
    )
    target: str = setting(
        "", "Name of the mirror, with `{table}` in it. Empty means `{table}_current` or `{table}_history`."
    )
    batch_max_rows: int = setting(
        2_000_000,
        "Maximum number of changes in one merge, in whole files. `--once` with Iceberg 1.10 merges all at once.",
        minimum=1,
    )
    batch_max_files: int = setting(1_000, "Maximum number of data files of a change table in one merge.", minimum=1)
    buckets: int = setting(
        0, "Number of partitions of a new mirror by hash of its key, so that a merge reads fewer files.", minimum=0
    )
    tombstone_horizon_s: float = setting(
        7 * 86_400.0,
        "Time in seconds that a deleted row is remembered, so that late reads and replays do not revive it.",
        minimum=0,
    )
    snapshot_age_s: float = setting(
        3_600.0,
        "Age in seconds at which a mirror's snapshots expire with their files. Longer than any query takes.",
        above=0,
    )
    rows_without_key: RowsWithoutKey = setting(
        RowsWithoutKey.STOP, "What a change without a key does: `stop` its table, or `skip` the change."
    )
    skip: bool = setting(
        False, "Skip tables when none are named. Set it for all tables, and unset it for some, or the reverse."
    )

    def check(self) -> None:
        """Check that each table's mirror gets a name of its own."""
        check(not self.target or "{table}" in self.target, f"target needs {{table}} in it: {self.target}")

    @property
    def keeps_history(self) -> bool:
        """Return whether the mirror keeps every version of a row."""
        return self.mode is MirrorMode.HISTORY

    def target_name(self, table: str) -> str:
        """Return the name of a table's mirror."""
        template = self.target or (_HISTORY_TARGET if self.keeps_history else _CURRENT_TARGET)
        return template.replace("{table}", table)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorConfig(MirrorSettings):
    """Section [pipeline.mirror]: settings of all mirrors, and `tables` for single ones."""

    interval_s: float = setting(
        10.0, "Time between two merges of a table, in seconds. A merge of more changes costs little more.", above=0
    )
    checkpoints: str = setting(
        "data/checkpoints", "Directory, or any address that Hadoop takes, of the streams' checkpoints.", required=True
    )
    parallel_tables: int = setting(4, "Number of tables merged at the same time in one Spark application.", minimum=1)
    tables: Mapping[str, Mapping[str, Any]] = table_settings(MirrorSettings, "Settings of single tables, by name.")

    def check(self) -> None:
        """Check the settings of every table."""
        MirrorSettings.check(self)
        for table in self.tables:
            try:
                self.settings_of(table)
            except ValueError as error:
                raise ValueError(f'tables."{table}".{error}') from error

    def settings_of(self, table: str) -> MirrorSettings:
        """Return the settings of a table's mirror: its own, else those of the section."""
        return narrowed(self, MirrorSettings, self.tables.get(table, {}))


@dataclass(frozen=True, slots=True)
class MirrorNames:
    """The tables of a mirror: identifiers, names in SQL with the catalog, and the mirror's name as a consumer."""

    table: TableIdentifier
    mirror: TableIdentifier
    tombstones: TableIdentifier
    table_sql: str
    mirror_sql: str
    tombstones_sql: str
    consumer: str


def mirror_names(table: TableIdentifier, settings: MirrorSettings, catalog: str) -> MirrorNames:
    """Return the names of the tables of a mirror."""
    mirror = table.with_name(settings.target_name(table.name))
    tombstones = table.with_name(f"{mirror.name}_tombstones")
    # Characters that a tag cannot have are replaced by a hyphen.
    kept = (sign if sign.isascii() and (sign.isalnum() or sign == "_") else "-" for sign in mirror.name)
    return MirrorNames(
        table=table,
        mirror=mirror,
        tombstones=tombstones,
        table_sql=table.sql(catalog),
        mirror_sql=mirror.sql(catalog),
        tombstones_sql=tombstones.sql(catalog),
        consumer=f"mirror_{''.join(kept)}"[:100],
    )
