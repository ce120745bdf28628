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
    """The log has used up its bytes, or the disk has: pause clients and try again after a trim."""


class WalFailed(WriterError):
    """Writing or syncing failed, so what is on disk is unknown: accept nothing more until a restart has looked."""


class WalLocked(WriterError):
    """Another process has the log open: stop that one first, or leave the log to it."""


class WalCorrupt(WriterError):
    """Bytes that were once durable are damaged: stop, a person has to look (and may repair what `segment` names)."""

    def __init__(self, what: str, *, segment: str | None = None, **facts: object) -> None:
        """Say what is wrong and the facts; with a segment's path, also which commands tell more."""
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
    """The log is whole but was written by another version of Lakefeed: start that version, or begin a new log."""


class StorageError(WriterError):
    """The object store did not do what was asked: try again later."""


class FileMissing(StorageError):
    """The file does not exist."""


class ManifestUnreadable(StorageError):
    """A manifest or manifest list is damaged or encrypted."""


class CatalogError(WriterError):
    """The catalog refused a request for a reason that trying again will not change by itself."""


class CatalogUnavailable(CatalogError):
    """The catalog did not take up the request (it is down, or asks to slow down): try again later."""


class TableMissing(CatalogError):
    """The table does not exist (any more): create it."""


class TableReplaced(CatalogError):
    """Another table has taken the name: load it anew, and write the rows again for its columns."""


class CommitConflict(CatalogError):
    """Somebody else committed first: plan again on fresh metadata."""


class ColumnsChanged(CommitConflict):
    """Files were written for columns that the table has no more: load it, and write the rows again for what it is."""

    def __init__(self, message: str, *, table: TableName) -> None:
        super().__init__(message)
        self.table = table


class CommitRefused(CatalogError):
    """The catalog refused what a request says, not who sent it: load the table, which may be another by now."""


class CommitUnknown(CatalogError):
    """The catalog may or may not have committed: look for the flush id in the snapshots before trying again."""


class TypeUnknown(WriterError):
    """A table has a column of a type that is not known here: its rows can be neither decoded nor read."""


class RowsUnfit(WriterError):
    """Decoded rows do not fit their table's columns any more: decode them again, from the log."""


class Fenced(Exception):
    """A later service runs under our node id: stop, commit nothing more. Not a WriterError: those are tried again."""


class RowsAlreadyCommitted(WriterError):
    """The table holds some of the rows already: drop those at or below the marks, write the rest anew, commit that."""

    def __init__(self, message: str, *, table: TableName, marks: Mapping[SourceId, Position]) -> None:
        super().__init__(message)
        self.table = table
        self.marks = marks
