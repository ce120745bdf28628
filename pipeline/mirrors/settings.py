"""Settings of mirrors. Owns defaults, their checks, and how a table's own settings lie over those of all."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from lakefeed.pipeline.spark.tables import TableName

# --- pipeline.mirrors.settings ----------------------------------------------------------------------------------------


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


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


_CURRENT_TARGET = "{table}_current"
_HISTORY_TARGET = "{table}_history"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMirror:
    """Settings of one table's mirror; what is None comes from the section."""

    mode: MirrorMode | None = None
    key: tuple[str, ...] | None = None
    target: str | None = None
    batch_max_rows: int | None = None
    batch_max_files: int | None = None
    buckets: int | None = None
    tombstone_horizon_s: float | None = None
    snapshot_age_s: float | None = None
    rows_without_key: RowsWithoutKey | None = None
    skip: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorConfig:
    """Section [pipeline.mirror]: what holds for all mirrors, and `tables` for what single ones have of their own."""

    mode: MirrorMode = field(
        default=MirrorMode.COPY_ON_WRITE,
        metadata={"why": "copy-on-write is read by every engine; the others write less per merge"},
    )
    key: tuple[str, ...] = field(
        default=(), metadata={"why": "columns that name a row; empty means those declared as key, else _cdc_row_id"}
    )
    target: str = field(
        default="", metadata={"why": "name of the mirror with {table} in it; empty means {table}_current or _history"}
    )
    interval_s: float = field(
        default=10.0, metadata={"why": "between two merges of a table; one of more changes costs little more"}
    )
    batch_max_rows: int = field(
        default=2_000_000,
        metadata={"why": "changes in one merge, in whole files; --once with Iceberg 1.10 takes all at once"},
    )
    batch_max_files: int = field(default=1_000, metadata={"why": "data files of a change table in one merge"})
    checkpoints: str = field(
        default="data/checkpoints",
        metadata={"why": "where streams keep their place: a directory, or any address that Hadoop takes"},
    )
    buckets: int = field(
        default=0, metadata={"why": "parts of a new mirror by hash of its key, so that a merge reads fewer files"}
    )
    tombstone_horizon_s: float = field(
        default=7 * 86_400.0,
        metadata={"why": "how long a deleted row is remembered, against reads and replays that come late"},
    )
    snapshot_age_s: float = field(
        default=3_600.0,
        metadata={"why": "age at which old versions of a mirror go, with their files; above any query of it"},
    )
    rows_without_key: RowsWithoutKey = field(
        default=RowsWithoutKey.STOP, metadata={"why": "a change that names no row stops its table, or is passed over"}
    )
    parallel_tables: int = field(
        default=4, metadata={"why": "tables that are merged at the same time, in one Spark application"}
    )
    skip: bool = field(
        default=False, metadata={"why": "leave tables out when none are named; set it for all, and back for some"}
    )
    tables: Mapping[str, TableMirror] = field(
        default_factory=dict, metadata={"why": "settings of single tables, by their names"}
    )

    def __post_init__(self) -> None:
        _check(self.interval_s > 0, f"interval_s must be above 0: {self.interval_s}")
        _check(bool(self.checkpoints), "checkpoints must name a directory")
        _check(self.parallel_tables > 0, f"parallel_tables must be above 0: {self.parallel_tables}")
        for settings in (self.settings_of(""), *map(self.settings_of, self.tables)):
            settings.check()

    def settings_of(self, table: str) -> MirrorSettings:
        """Lay a table's own settings over those of all."""
        own = self.tables.get(table, TableMirror())
        values = {item.name: getattr(own, item.name) for item in fields(own)}
        merged = {name: getattr(self, name) if value is None else value for name, value in values.items()}
        return MirrorSettings(**merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    """What holds for one mirror."""

    mode: MirrorMode = MirrorMode.COPY_ON_WRITE
    key: tuple[str, ...] = ()
    target: str = ""
    batch_max_rows: int = 2_000_000
    batch_max_files: int = 1_000
    buckets: int = 0
    tombstone_horizon_s: float = 7 * 86_400.0
    snapshot_age_s: float = 3_600.0
    rows_without_key: RowsWithoutKey = RowsWithoutKey.STOP
    skip: bool = False

    @property
    def keeps_history(self) -> bool:
        """Whether every version of a row is kept, and not its last one alone."""
        return self.mode is MirrorMode.HISTORY

    def check(self) -> None:
        """Check the values.

        Raises: ValueError.
        """
        _check(self.batch_max_rows > 0, f"batch_max_rows must be above 0: {self.batch_max_rows}")
        _check(self.batch_max_files > 0, f"batch_max_files must be above 0: {self.batch_max_files}")
        _check(self.buckets >= 0, f"buckets must not be below 0: {self.buckets}")
        _check(self.tombstone_horizon_s >= 0, f"tombstone_horizon_s must not be below 0: {self.tombstone_horizon_s}")
        _check(self.snapshot_age_s > 0, f"snapshot_age_s must be above 0: {self.snapshot_age_s}")
        _check(not self.target or "{table}" in self.target, f"target needs {{table}} in it: {self.target}")

    def target_name(self, table: str) -> str:
        """Name the mirror of a table."""
        template = self.target or (_HISTORY_TARGET if self.keeps_history else _CURRENT_TARGET)
        return template.replace("{table}", table)


# --- pipeline.mirrors.names -------------------------------------------------------------------------------------------
#
# The tables that belong together: a change table, its mirror, and the mirror's tombstones. Owns their names.


_TOMBSTONES = "_tombstones"
_CONSUMER = "mirror_"


@dataclass(frozen=True, slots=True)
class MirrorNames:
    """Names without the catalog, and `sql` names with it."""

    table: TableName
    mirror: TableName
    catalog: str

    @property
    def table_sql(self) -> str:
        """Name the change table in SQL."""
        return self.table.sql(self.catalog)

    @property
    def mirror_sql(self) -> str:
        """Name the mirror in SQL."""
        return self.mirror.sql(self.catalog)

    @property
    def tombstones(self) -> TableName:
        """Name the table of the mirror's tombstones."""
        return self.mirror.with_name(self.mirror.name + _TOMBSTONES)

    @property
    def tombstones_sql(self) -> str:
        """Name the table of the mirror's tombstones in SQL."""
        return self.tombstones.sql(self.catalog)

    @property
    def consumer(self) -> str:
        """Name the mirror as a consumer of its change table; signs that a tag cannot have become '-'."""
        kept = (sign if sign.isascii() and (sign.isalnum() or sign == "_") else "-" for sign in self.mirror.name)
        return (_CONSUMER + "".join(kept))[:100]


def mirror_names(table: TableName, settings: MirrorSettings, catalog: str) -> MirrorNames:
    """Name the tables of a mirror."""
    return MirrorNames(table, table.with_name(settings.target_name(table.name)), catalog)
