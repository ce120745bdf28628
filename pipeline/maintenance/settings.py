"""Settings of maintenance: [pipeline.maintenance], and the settings of single tables that override it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lakefeed.settings import MIB, Settings, check, narrowed, setting, table_settings

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
class MaintenanceSettings(Settings):
    """Settings of one table's maintenance."""

    run: tuple[Step, ...] = setting(tuple(Step), "Steps to run: compact, deletes, manifests, expire, orphans.")
    target_file_bytes: int = setting(
        128 * MIB, "Size that small files are merged to, in bytes. Use the writer's `target_file_bytes`.", minimum=MIB
    )
    min_input_files: int = setting(
        5, "Number of small files of a partition that are worth a rewrite. The newest partition still grows.", minimum=2
    )
    sort: str = setting(
        "", "Order of rewritten rows, such as `id desc, name`. Empty means the table's own order, if it has one."
    )
    zorder: tuple[str, ...] = setting((), "Columns by whose z-order rows are rewritten, in place of a sort order.")
    min_manifests: int = setting(
        20, "Number of manifests that are worth a rewrite. The writer merges its own by the hundred.", minimum=2
    )
    history_s: float = setting(
        0.0,
        "Age in seconds at which snapshots expire. 0 means the table's `history.expire.max-snapshot-age-ms`.",
        minimum=0,
    )
    orphan_age_s: float = setting(
        3 * DAY_S,
        "Age in seconds at which unreferenced files are removed, above the time of any write; at least a day.",
    )
    skip: bool = setting(
        False, "Skip tables when none are named. Set it for all tables, and unset it for some, or the reverse."
    )

    def check(self) -> None:
        """Check that no running write loses files, and that there is one order."""
        check(
            self.orphan_age_s >= ORPHAN_AGE_LEAST_S,
            f"orphan_age_s must be a day at least, so that no running write loses files: {self.orphan_age_s}",
        )
        check(not (self.sort and self.zorder), f"zorder replaces sort, give one of them: {self.sort}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceConfig(MaintenanceSettings):
    """Section [pipeline.maintenance]: settings of all tables, and `tables` for single ones."""

    tables: Mapping[str, Mapping[str, Any]] = table_settings(MaintenanceSettings, "Settings of single tables, by name.")

    def check(self) -> None:
        """Check the settings of every table."""
        MaintenanceSettings.check(self)
        for table in self.tables:
            try:
                self.settings_of(table)
            except ValueError as error:
                raise ValueError(f'tables."{table}".{error}') from error

    def settings_of(self, table: str) -> MaintenanceSettings:
        """Return a table's settings. Its own order replaces the section's, also one of the other kind."""
        own = dict(self.tables.get(table, {}))
        if "sort" in own:
            own.setdefault("zorder", ())
        elif "zorder" in own:
            own["sort"] = ""
        return narrowed(self, MaintenanceSettings, own)
