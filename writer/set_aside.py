"""The way of rows into the quarantine of their namespace. Owns the order: commit there, then go on.

The quarantine is a table with a writer of its own, which is never parked: what it holds is bounded by those who wait
for it, one group of each table at a time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping

from writer.changes import Position, SourceId, TableName
from writer.decoding import Decoded
from writer.errors import CatalogError, CatalogUnavailable, TableMissing
from writer.quarantine.names import moved_marks, quarantine_of
from writer.quarantine.rows import Reason, quarantine_rows
from writer.rows.groups import Group
from writer.table_context import TableContext
from writer.table_writer import TableWriter

logger = logging.getLogger(__name__)

_US_PER_S = 1_000_000


class SetAside:
    """The quarantines of all namespaces, as the tables' writers use them."""

    def __init__(self, context: TableContext, *, writer_of: Callable[[TableName], TableWriter]) -> None:
        self._context = context
        self._writer_of = writer_of
        self._used: dict[TableName, TableWriter] = {}

    async def put(self, group: Group, *, table: TableName, reason: Reason) -> None:
        """Keep changes, whole; returns once they are committed there. Cancelling leaves them committed or not."""
        make = functools.partial(
            quarantine_rows,
            group,
            table=table,
            reason=reason,
            node=self._context.node,
            recorded_at_us=int(time.time() * _US_PER_S),
        )
        rows = await asyncio.get_running_loop().run_in_executor(self._context.decoders, make)
        writer = self._writer_of(quarantine_of(table))
        self._used[writer.name] = writer
        await writer.put(Decoded(rows, None, rows.held_bytes))
        self._context.metrics.quarantined_changes.labels(str(table)).inc(len(group))
        logger.warning(
            "rows_quarantined",
            extra={
                "table": str(table),
                "rows": len(group),
                "refusal": reason.refusal.value,
                "reason": reason.text,
                "log_offset": group.first_offset,
            },
        )

    async def moved_marks(self, table: TableName) -> Mapping[SourceId, Position]:
        """Tell up to where all of a table's changes were moved to its quarantine.

        Raises: CatalogUnavailable, after which to try again later.
        """
        try:
            state = await self._context.committer.load(quarantine_of(table))
        except TableMissing:
            return {}
        except CatalogUnavailable:
            raise
        except CatalogError as error:
            # Where we may not even look, we have hardly put anything; and a table must not wait for another.
            logger.warning("quarantine_not_looked_up", extra={"table": str(table), "error": str(error)})
            return {}
        return moved_marks(state.progress.sources, table)

    def problem_of(self, table: TableName) -> str | None:
        """Tell what keeps a table's quarantine from being written."""
        writer = self._used.get(quarantine_of(table))
        reason = writer.trouble.reason if writer is not None else None
        return f"{quarantine_of(table)} cannot be written: {reason}" if reason is not None else None
