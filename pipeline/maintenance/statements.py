"""Iceberg's procedures as SQL. Core: owns their names, arguments and quoting.

A table is given as SQL has it, with its catalog first: `lake`.`sales`.`orders`. Moments carry their zone, because Spark
would read them in the session's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from pipeline.maintenance.settings import MaintenanceSettings
from pipeline.maintenance.sizes import TableFacts

SORT_ORDER = "sort-order"

# A rewrite of more than this is committed in parts, so that a failure does not lose all of it.
PARTS_FROM_BYTES = 8 << 30
PARTS_MAX = 10


def rewrite_data_files(table: str, settings: MaintenanceSettings, facts: TableFacts, *, rewrite_bytes: int) -> str:
    """Spell a compaction: in the order that is set, else in the table's own, else as the rows come."""
    arguments = {"table": literal(table)}
    if settings.zorder:
        arguments |= {"strategy": "'sort'", "sort_order": literal(f"zorder({', '.join(settings.zorder)})")}
    elif settings.sort:
        arguments |= {"strategy": "'sort'", "sort_order": literal(settings.sort)}
    elif SORT_ORDER in facts.properties:
        arguments |= {"strategy": "'sort'"}
    options = {
        "target-file-size-bytes": str(settings.target_file_bytes),
        "min-input-files": str(settings.min_input_files),
    }
    if facts.sizes.delete_files:
        options["remove-dangling-deletes"] = "true"
    if rewrite_bytes > PARTS_FROM_BYTES:
        options |= {"partial-progress.enabled": "true", "partial-progress.max-commits": str(PARTS_MAX)}
    return call(table, "rewrite_data_files", {**arguments, "options": _map(options)})


def rewrite_position_delete_files(table: str, settings: MaintenanceSettings) -> str:
    """Spell the joining of small position-delete files."""
    options = {"min-input-files": str(settings.min_input_files)}
    return call(table, "rewrite_position_delete_files", {"table": literal(table), "options": _map(options)})


def rewrite_manifests(table: str) -> str:
    """Spell the joining of small manifests. Without the cache: it would hold all entries in memory."""
    return call(table, "rewrite_manifests", {"table": literal(table), "use_caching": "false"})


def expire_snapshots(table: str, *, older_than_ms: int) -> str:
    """Spell the expiry of snapshots; how many stay however old they are, is the table's own setting."""
    arguments = {"table": literal(table), "older_than": moment(older_than_ms), "stream_results": "true"}
    return call(table, "expire_snapshots", arguments)


def remove_orphan_files(table: str, *, older_than_ms: int, location: str, is_dry_run: bool) -> str:
    """Spell the removal of files that nothing names. Object stores are listed by the table's own access to them."""
    arguments = {
        "table": literal(table),
        "older_than": moment(older_than_ms),
        "dry_run": str(is_dry_run).lower(),
        "prefix_listing": str(not location.startswith(("file:", "hdfs:", "/"))).lower(),
    }
    return call(table, "remove_orphan_files", arguments)


def call(table: str, procedure: str, arguments: Mapping[str, str]) -> str:
    """Spell a call of a procedure of the catalog that has the table."""
    catalog = table.partition(".")[0]
    return f"CALL {catalog}.system.{procedure}({', '.join(f'{key} => {value}' for key, value in arguments.items())})"


def literal(text: str) -> str:
    """Quote text for SQL. Spark would put a variable's value where it finds `${name}`."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def moment(ms: int) -> str:
    """Spell a moment, down to the millisecond."""
    at = datetime.fromtimestamp(ms // 1000, UTC)
    return f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S}.{ms % 1000:03d} UTC'"


def _map(options: Mapping[str, str]) -> str:
    return f"map({', '.join(f'{literal(key)}, {literal(value)}' for key, value in options.items())})"
