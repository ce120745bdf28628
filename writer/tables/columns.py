"""A table's schema, the catalog's and ours, reconciled; and changes fitted into its columns.

    load ----> state: schema, partitions, marks -----+
                                                     +--> agree: the table has at least our columns, we have its ids
    rows ----> expected: columns that rows need -----+

    group --(the table's own marks, and those of its quarantine)--> rows that are in neither
          --(decoded already? else bisect)------------------------> chunks for the buffer
                                           +----------------------> rows that cannot be decoded --> quarantine

Rows may need new columns while a flush is being written, so all changes of the columns hold the lock. A column that the
table had when it was last loaded, and does not have under its name any more, was dropped or renamed by another writer:
only rows bring it back. Lakefeed's own columns are always added again: a change without its epoch or its rescued values
is incomplete.

Quarantined rows keep the order of the log: the table commits what lies before them, then the quarantine commits them,
then the table continues behind them. The marks of both together therefore tell of every row that it is in one of them.
A row that was quarantined and is read again is left out like one that is in the table, even if it could be decoded now.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from lakefeed.contract.changes import RESERVED_PREFIX, Position, SourceId, TableName
from lakefeed.contract.errors import (
    CatalogError,
    CommitConflict,
    CommitRefused,
    RowsUnfit,
    TableMissing,
    WriterError,
)
from lakefeed.contract.properties import Reason, Refusal
from lakefeed.iceberg.types import Schema, StructType
from lakefeed.writer.commit.plan import plan_layout
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.metrics import WriterMetrics
from lakefeed.writer.rows.declaration import declare_columns, without_nanoseconds
from lakefeed.writer.rows.evolution import FieldIds, SchemaUpdate, initial_columns
from lakefeed.writer.rows.groups import Expected, Group
from lakefeed.writer.rows.merge import (
    dropped_ids,
    field_ids,
    has_other_meaning,
    merge_columns,
    required_ids,
    without_fields,
)
from lakefeed.writer.rows.runs import Decoded, FittedParts, fit_or_bisect
from lakefeed.writer.tables.context import TableContext
from lakefeed.writer.tables.pending import Chunk
from lakefeed.writer.tables.quarantine import QuarantineSink

logger = logging.getLogger(__name__)

# The first Iceberg format version with types for nanoseconds.
FORMAT_WITH_NANOSECONDS = 3

# Column changes kept for /status; all of them are in the service's log.
CHANGES_MAX = 20


class TableColumns:
    """One table's state and columns."""

    def __init__(self, name: TableName, context: TableContext) -> None:
        self.name = name
        self.state: TableState | None = None
        self.settings = context.settings_for(name)
        config = self.settings.config
        self.expected = Expected(
            initial_columns(keep_before=config.keep_before),
            nanoseconds=config.format_version >= FORMAT_WITH_NANOSECONDS,
            keep_before=config.keep_before,
        )
        self.layout_problem: str | None = None
        self.changes: deque[str] = deque(maxlen=CHANGES_MAX)
        self.refusals: tuple[str, ...] = ()
        self._context = context
        # Rows in memory have another meaning in the columns that the table turned out to have.
        self._must_decode_again = False
        # The table as it was last loaded, also after `forget`.
        self._seen: TableState | None = None
        self._last_field_id = max(field_ids(self.expected.columns))
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Load the table before the first row: its own marks show what it already has.

        Raises: WriterError, after which to retry.
        """
        try:
            self._adopt(await self._context.committer.load(self.name))
        except TableMissing:
            logger.info("table_is_new", extra={"table": str(self.name)})
        # Nothing is buffered; rows that were decoded before and are still to come are checked by `takes_rows_of`.
        self._must_decode_again = False
        update = SchemaUpdate(self.expected.columns, self._last_field_id)
        declare_columns(update, self.settings.declared, nanoseconds=self.expected.nanoseconds)
        self._report(update.changes, update.refusals)
        self.expected = replace(self.expected, columns=update.columns)
        self._last_field_id = update.last_field_id

    async def refresh(self) -> bool:
        """Load the table again; return whether another writer has changed its columns, so that rows may fit now.

        Raises: WriterError, after which to retry.
        """
        async with self._lock:
            before = self._seen
            try:
                state = await self._context.committer.load(self.name)
            except TableMissing:
                return False
            self._adopt(state)
        return before is None or before.schema.columns != state.schema.columns

    def forget(self) -> None:
        """Forget the table's state, so that the next flush loads it again."""
        self.state = None

    async def follow(self, state: TableState) -> None:
        """Continue from the state after a commit; columns that another writer changed before it are adopted."""
        if self.state is not None and state.schema == self.state.schema:
            self.state = state
            return
        async with self._lock:  # not while rows are being decoded, whose columns would be lost
            self._adopt(state)

    async def expire_snapshots(self) -> None:
        """Remove old snapshots if it is time to. Called between flushes; a failure is left to the next time."""
        before = self.state
        if before is None:
            return
        try:
            after = await self._context.committer.maybe_expire(before)
        except Exception:
            logger.exception("snapshot_expiry_failed", extra={"table": str(self.name)})
            return
        if self.state is before:
            self.state = after

    @property
    def marks(self) -> Mapping[SourceId, Position]:
        """The last committed position of each source, as last loaded."""
        return self.state.progress.sources if self.state else {}

    @property
    def snapshot_id(self) -> int | None:
        """The table's newest snapshot, as last loaded."""
        return self.state.snapshot_id if self.state else None

    async def decode(self, group: Group, *, refused_for: StructType | None = None) -> FittedParts:
        """Decode a group exactly, and find the rows that cannot be decoded; the columns may evolve for it."""
        async with self._lock:
            fit = functools.partial(
                fit_or_bisect, group, self.expected, last_field_id=self._last_field_id, refused_for=refused_for
            )
            fitted = await asyncio.get_running_loop().run_in_executor(self._context.decoders, fit)
            self._report(fitted.changes, fitted.refusals)
            self.expected = fitted.expected
            self._last_field_id = fitted.last_field_id
        return fitted

    def takes_rows_of(self, columns: StructType | None) -> bool:
        """Return whether rows that were decoded for some columns mean the same in the present ones."""
        now = self.expected.columns
        return columns is now or (columns is not None and not has_other_meaning(columns, now))

    def _report(self, changes: Sequence[str], refusals: Sequence[str]) -> None:
        """Report new columns, and declarations that cannot be followed; values that do not fit are rescued."""
        if changes:
            logger.info("columns_changed", extra={"table": str(self.name), "changes": list(changes)})
            self._context.metrics.schema_changes.labels(str(self.name)).inc(len(changes))
            self.changes.extend(changes)
        if refusals:
            logger.warning("declaration_not_followed", extra={"table": str(self.name), "refusals": list(refusals)})
            self.refusals = tuple(refusals)

    async def agree(self) -> TableState:
        """Make the table exist with at least our columns, under its own field ids.

        Raises:
            RowsUnfit: rows that were decoded so far mean something else in the table's columns.
            WriterError: retry later.
        """
        committer = self._context.committer
        async with self._lock:
            if self.state is None:
                self._adopt(await committer.load_or_create(self.name, Schema(0, self.expected.columns), self.settings))
            assert self.state is not None
            self._check_meaning()
            if self.expected.columns != self.state.schema.columns:
                try:
                    self._adopt(await committer.commit_schema(self.state, self._wanted_schema(self.state.schema)))
                except (CommitConflict, CommitRefused):
                    self.state = None  # its columns have changed: the next attempt starts from those
                    raise
            state = await self._agree_on_layout(self.state)
            self._check_meaning()  # the responses may have brought columns that another writer has changed
            return state

    def _check_meaning(self) -> None:
        if self._must_decode_again:
            raise RowsUnfit("buffered rows were decoded for other columns than the table has")

    def _wanted_schema(self, now: Schema) -> Schema:
        """Return the table's schema with our columns. A key that others have declared stays, unless it may be null."""
        columns = self.expected.columns
        never_null = frozenset(required_ids(columns))
        identifier_ids = tuple(each for each in now.identifier_ids if each in never_null)
        return replace(now, schema_id=now.schema_id + 1, columns=columns, identifier_ids=identifier_ids)

    async def _agree_on_layout(self, state: TableState) -> TableState:
        """Bring the table's partitions, order and properties to the settings; report what cannot be followed."""
        plan = plan_layout(state, self.settings)
        self.layout_problem = plan.problem
        request = plan.request_for(state)
        if request is None:
            return state
        try:
            self._adopt(await self._context.committer.commit_layout(state, request))
        except CatalogError:
            self.state = None  # it may have changed: the next attempt loads it
            raise
        logger.info("layout_changed", extra={"table": str(self.name), "properties": plan.properties})
        assert self.state is not None
        return self.state

    def _adopt(self, state: TableState) -> None:
        """Continue from a table's state, with its columns and those that only we have."""
        own = without_fields(self.expected.columns, self._dropped_ids(state))
        nanoseconds = state.format_version >= FORMAT_WITH_NANOSECONDS
        if not nanoseconds:  # another writer has created the table in an older format
            own = StructType(without_nanoseconds(own.fields))
        ids = FieldIds(state.last_column_id)
        columns = merge_columns(state.schema.columns, own, ids)
        self._last_field_id = ids.last
        self._must_decode_again |= has_other_meaning(self.expected.columns, columns)
        self.state = state
        self._seen = replace(state, manifests=None)
        self.expected = replace(self.expected, columns=columns, nanoseconds=nanoseconds)

    def _dropped_ids(self, state: TableState) -> frozenset[int]:
        """Return the ids of the rows' own fields that the table has no more, without fields that it never had."""
        if self._seen is None or self._seen.uuid != state.uuid:
            return frozenset()
        fields = self._seen.schema.columns.fields
        seen = StructType(tuple(field for field in fields if not field.name.startswith(RESERVED_PREFIX)))
        return dropped_ids(seen, state.schema.columns)


class RowFitter:
    """Fits one table's changes into its columns. The fitter of a quarantine table has no quarantine itself."""

    def __init__(self, columns: TableColumns, quarantine: QuarantineSink | None, metrics: WriterMetrics) -> None:
        self._columns = columns
        self._quarantine = quarantine
        self._metrics = metrics
        self._quarantined: Mapping[SourceId, Position] = {}
        # By this process, for /status.
        self.quarantined_rows = 0

    async def open(self) -> None:
        """Load the marks of the table and of its quarantine.

        Raises: WriterError, after which to retry.
        """
        if self._quarantine is not None:
            self._quarantined = await self._quarantine.quarantined_marks(self._columns.name)
        await self._columns.open()

    async def fit(self, decoded: Decoded) -> tuple[list[Chunk], tuple[Group, Reason] | None]:
        """Return chunks for the buffer, and the first changes that cannot be decoded; others are fitted after them."""
        group = self._fresh_part(decoded.group)
        if not len(group):
            return [], None
        if decoded.rows is not None and group is decoded.group and self._columns.takes_rows_of(decoded.columns):
            return [_chunk(group, decoded.rows)], None
        self._metrics.slow_groups.labels(str(self._columns.name)).inc()
        fitted = await self._columns.decode(group, refused_for=decoded.columns if decoded.rows is None else None)
        first = fitted.refused[0] if fitted.refused else None
        kept = [(part, rows) for part, rows in fitted.kept if first is None or _start(part) < _start(first[0])]
        return [_chunk(part, rows) for part, rows in kept], first

    async def drain(self, decoded: Decoded, *, problem: str | None) -> None:
        """Write changes to quarantine that fit the table, because the table cannot be written."""
        group = self._fresh_part(decoded.group)
        if len(group):
            await self.quarantine(group, Reason(Refusal.LOG_SHARE, f"table stood still for too long: {problem}"))

    async def quarantine(self, group: Group, reason: Reason) -> None:
        """Write changes to quarantine. Everything before them in the log is committed; everything behind them waits."""
        if self._quarantine is None:
            raise WriterError(f"quarantine cannot take its own rows: rows={len(group)} reason={reason.text}")
        await self._quarantine.put(group, table=self._columns.name, reason=reason)
        self.quarantined_rows += len(group)
        self._quarantined = {**self._quarantined, **{source: span.last for source, span in group.spans().items()}}

    @property
    def quarantine_problem(self) -> str | None:
        """Why the table's quarantine cannot be written, or None."""
        return self._quarantine.problem_of(self._columns.name) if self._quarantine else None

    def _fresh_part(self, group: Group) -> Group:
        fresh = group.after(self._columns.marks)
        if self._quarantined:
            fresh = fresh.after(self._quarantined)
        if len(fresh) < len(group):
            self._metrics.duplicate_changes.labels(str(self._columns.name)).inc(len(group) - len(fresh))
        return fresh


def _start(group: Group) -> tuple[int, int]:
    """Return where a part of a group begins, in log order."""
    return group.first_offset, group.sequence_at(0)


def _chunk(group: Group, rows: pa.Table) -> Chunk:
    return Chunk(rows=rows, log_from=group.first_offset, log_to=group.last_offset + 1, spans=group.spans())
