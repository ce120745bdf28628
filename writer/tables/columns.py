"""A table's schema, the catalog's and ours, reconciled. Owns both versions.

    load ----> state: schema, partitions, marks -----+
                                                     +--> agree: the table has at least our columns, we have its ids
    rows ----> expected: columns that rows need -----+

Rows may need new columns while a flush is being written, so all changes of the columns hold the lock. A column that the
table had when it was last loaded, and does not have under its name any more, was dropped or renamed by another writer:
only rows bring it back. Lakefeed's own columns are always added again: a change without its epoch or its rescued values
is incomplete.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lakefeed.contract.changes import RESERVED_PREFIX, Position, SourceId, TableName
from lakefeed.contract.errors import CatalogError, CommitConflict, CommitRefused, RowsUnfit, TableMissing
from lakefeed.iceberg.types import Schema, StructType
from lakefeed.writer.commit.plan import plan_layout
from lakefeed.writer.commit.state import TableState
from lakefeed.writer.rows.declaration import declare_columns, without_nanoseconds
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.groups import Expected, Group
from lakefeed.writer.rows.merge import (
    dropped_ids,
    field_ids,
    has_other_meaning,
    merge_columns,
    required_ids,
    without_fields,
)
from lakefeed.writer.rows.runs import FittedParts, fit_or_bisect
from lakefeed.writer.tables.context import TableContext

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
        self._declare()

    def _declare(self) -> None:
        """Add the columns that the configuration declares."""
        declared = declare_columns(
            self.expected.columns,
            self.settings.declared,
            last_field_id=self._last_field_id,
            nanoseconds=self.expected.nanoseconds,
        )
        self._note_changes(declared.changes)
        self._note_refusals(declared.refusals)
        self.expected = replace(self.expected, columns=declared.columns)
        self._last_field_id = declared.last_field_id

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
        if before is not None:
            after = await self._context.committer.maybe_expire(before)
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
            self._note_changes(fitted.changes)
            self._note_refusals(fitted.refusals)
            self.expected = fitted.expected
            self._last_field_id = fitted.last_field_id
        return fitted

    def takes_rows_of(self, columns: StructType | None) -> bool:
        """Return whether rows that were decoded for some columns mean the same in the present ones."""
        now = self.expected.columns
        return columns is now or (columns is not None and not has_other_meaning(columns, now))

    def _note_changes(self, changes: Sequence[str]) -> None:
        if changes:
            logger.info("columns_changed", extra={"table": str(self.name), "changes": list(changes)})
            self._context.metrics.schema_changes.labels(str(self.name)).inc(len(changes))
            self.changes.extend(changes)

    def _note_refusals(self, refusals: Sequence[str]) -> None:
        """Report declarations of columns that cannot be followed; values that do not fit are rescued."""
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
        merged = merge_columns(state.schema.columns, own, last_field_id=state.last_column_id)
        self._must_decode_again |= has_other_meaning(self.expected.columns, merged.columns)
        self.state = state
        self._seen = replace(state, manifests=None)
        self.expected = replace(self.expected, columns=merged.columns, nanoseconds=nanoseconds)
        self._last_field_id = merged.last_field_id

    def _dropped_ids(self, state: TableState) -> frozenset[int]:
        """Return the ids of the rows' own fields that the table has no more, without fields that it never had."""
        if self._seen is None or self._seen.uuid != state.uuid:
            return frozenset()
        fields = self._seen.schema.columns.fields
        seen = StructType(tuple(field for field in fields if not field.name.startswith(RESERVED_PREFIX)))
        return dropped_ids(seen, state.schema.columns)
