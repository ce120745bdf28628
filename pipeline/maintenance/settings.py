"""Settings of maintenance: [pipeline.maintenance], and how a table's own settings override it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

MIB = 1 << 20
DAY_S = 86_400.0

# What Iceberg's own procedure insists on. The writer commits no file that waited for longer than half of it.
ORPHAN_AGE_LEAST_S = DAY_S


class Step(enum.Enum):
    """What maintenance does to a table, in this order."""

    COMPACT = "compact"
    DELETES = "deletes"
    MANIFESTS = "manifests"
    EXPIRE = "expire"
    ORPHANS = "orphans"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMaintenance:
    """Settings of one table; what is None comes from the section."""

    run: tuple[Step, ...] | None = None
    target_file_bytes: int | None = None
    min_input_files: int | None = None
    sort: str | None = None
    zorder: tuple[str, ...] | None = None
    min_manifests: int | None = None
    history_s: float | None = None
    orphan_age_s: float | None = None
    skip: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceConfig:
    """Section [pipeline.maintenance]: what holds for all, and `tables` for what single ones have of their own."""

    run: tuple[Step, ...] = field(
        default=tuple(Step), metadata={"why": "what is done: compact, deletes, manifests, expire, orphans"}
    )
    target_file_bytes: int = field(
        default=128 * MIB, metadata={"why": "size that small files are joined to, as the writer's target_file_bytes"}
    )
    min_input_files: int = field(
        default=5, metadata={"why": "small files of a partition that are worth a rewrite; the newest grow more anyway"}
    )
    sort: str = field(
        default="",
        metadata={"why": "order of rewritten rows, as 'id desc, name'; empty means the table's own, if it has one"},
    )
    zorder: tuple[str, ...] = field(
        default=(), metadata={"why": "columns by whose z-order rows are rewritten, in place of a sort order"}
    )
    min_manifests: int = field(
        default=20, metadata={"why": "manifests that are worth a rewrite; the writer joins its own by the hundred"}
    )
    history_s: float = field(
        default=0.0,
        metadata={"why": "age at which snapshots expire; 0 means the table's history.expire.max-snapshot-age-ms"},
    )
    orphan_age_s: float = field(
        default=3 * DAY_S,
        metadata={"why": "age at which files that nothing names are removed, above any write; a day at least"},
    )
    skip: bool = field(
        default=False, metadata={"why": "leave tables out when none are named; set it for all, and back for some"}
    )
    tables: Mapping[str, TableMaintenance] = field(
        default_factory=dict, metadata={"why": "settings of single tables, by their names"}
    )

    def __post_init__(self) -> None:
        for settings in (self.settings_of(""), *map(self.settings_of, self.tables)):
            settings.check()

    def settings_of(self, table: str) -> MaintenanceSettings:
        """Lay a table's own settings over those of all."""
        own = self.tables.get(table, TableMaintenance())
        values = {item.name: getattr(own, item.name) for item in fields(own)}
        merged = {name: getattr(self, name) if value is None else value for name, value in values.items()}
        if own.sort is not None and own.zorder is None:
            merged["zorder"] = ()
        if own.zorder is not None and own.sort is None:
            merged["sort"] = ""
        return MaintenanceSettings(**merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceSettings:
    """What holds for one table."""

    run: tuple[Step, ...] = tuple(Step)
    target_file_bytes: int = 128 * MIB
    min_input_files: int = 5
    sort: str = ""
    zorder: tuple[str, ...] = ()
    min_manifests: int = 20
    history_s: float = 0.0
    orphan_age_s: float = 3 * DAY_S
    skip: bool = False

    def check(self) -> None:
        """Check the values.

        Raises: ValueError.
        """
        rules = (
            (self.target_file_bytes >= MIB, f"target_file_bytes must be at least 1 MiB: {self.target_file_bytes}"),
            (self.min_input_files > 1, f"min_input_files must be above 1: {self.min_input_files}"),
            (self.min_manifests > 1, f"min_manifests must be above 1: {self.min_manifests}"),
            (not (self.sort and self.zorder), f"zorder takes the place of sort, give one of them: {self.sort}"),
            (self.history_s >= 0, f"history_s must not be below 0: {self.history_s}"),
            (
                self.orphan_age_s >= ORPHAN_AGE_LEAST_S,
                f"orphan_age_s must be a day at least, lest a running write loses files: {self.orphan_age_s}",
            ),
        )
        for is_kept, message in rules:
            if not is_kept:
                raise ValueError(message)
