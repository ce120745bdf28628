"""Errors of the shared code and of the writer, by what the caller does next."""

from __future__ import annotations

from collections.abc import Mapping

from lakefeed.contract.changes import Position, SourceId, TableName


class LakefeedError(Exception):
    """Base of all errors that Lakefeed raises on purpose. Commands show its message without a traceback."""


class LocationInvalid(LakefeedError):
    """A location cannot be parsed, or is of another kind of storage: its author has to change it."""


class LocationForbidden(LakefeedError):
    """A location is outside the warehouse: its author has to change it, or the operator has to allow it."""


class LiteralInvalid(LakefeedError):
    """A value is not one of its type: its author has to change it."""


class TooManyWaiting(LakefeedError):
    """Too many callers wait for one key: try again later."""


class ConsumerError(LakefeedError):
    """A consumer cannot be registered under this name or for this time: the caller has to change them."""


class WriterError(LakefeedError):
    """Base of the writer's errors."""


class WalFull(WriterError):
    """The log or its disk is full: pause clients and try again after a trim."""


class WalFailed(WriterError):
    """Writing or syncing failed, so the state on disk is unknown: accept nothing more before a restart."""


class WalLocked(WriterError):
    """Another process has the log open: stop that process first."""


class WalCorrupt(WriterError):
    """Durable bytes are damaged: stop. An operator has to check, and may repair the segment that `segment` names."""

    def __init__(self, what: str, *, segment: str | None = None, **facts: object) -> None:
        """Build the message: what is wrong, the facts, and with a segment's path the commands to use next."""
        if segment is not None:
            *_, data_dir, _, _ = ("", ".", *segment.rsplit("/", 2))
            shown = " ".join(f"{name}={value}" for name, value in {"segment": segment, **facts}.items())
            what = (
                f"{what}: {shown}; see what is lost with `lakefeed wal inspect --data-dir {data_dir}`,"
                f" go on without it after `lakefeed wal repair --data-dir {data_dir}`"
            )
        super().__init__(what)
        self.segment = segment


class WalVersionUnknown(WriterError):
    """The log was written by another version of Lakefeed: start that version, or begin a new log."""


class StorageError(WriterError):
    """The object store failed: try again later."""


class FileMissing(StorageError):
    """The file does not exist."""


class ManifestUnreadable(StorageError):
    """A manifest or manifest list is damaged or encrypted."""


class CatalogError(WriterError):
    """The catalog refused a request, and would refuse it again."""


class CatalogUnavailable(CatalogError):
    """The catalog did not process the request (it is down, or asks to slow down): try again later."""


class TableMissing(CatalogError):
    """The table does not exist: create it."""


class TableReplaced(CatalogError):
    """Another table has the name now: load it, and write the rows again for its columns."""


class CommitConflict(CatalogError):
    """Another writer committed first: plan again on fresh metadata."""


class ColumnsChanged(CommitConflict):
    """The table's columns have changed since files were written: load it, and write the rows again."""

    def __init__(self, message: str, *, table: TableName) -> None:
        super().__init__(message)
        self.table = table


class CommitRefused(CatalogError):
    """The catalog refused the content of a commit: load the table, which may have been replaced."""


class CommitUnknown(CatalogError):
    """The catalog may or may not have committed: look for the flush id in the snapshots before another attempt."""


class TypeUnknown(WriterError):
    """A table has a column of an unknown type: its rows can be neither decoded nor read."""


class RowsUnfit(WriterError):
    """Decoded rows no longer fit their table's columns: decode them again, from the log."""


class Fenced(Exception):
    """A later service runs under the same node id: stop, commit nothing more. No WriterError: those are retried."""


class RowsAlreadyCommitted(WriterError):
    """The table has some of the rows already: drop those up to the marks, and commit the rest."""

    def __init__(self, message: str, *, table: TableName, marks: Mapping[SourceId, Position]) -> None:
        super().__init__(message)
        self.table = table
        self.marks = marks
