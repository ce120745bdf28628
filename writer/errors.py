"""Errors of the writer, by what the caller does next."""

from __future__ import annotations

from collections.abc import Mapping

from writer.changes import Position, SourceId


class WriterError(Exception):
    """Base of all errors that this package raises on purpose."""


class WalFull(WriterError):
    """The log has used up its bytes, or the disk has: pause clients and try again after a trim."""


class WalFailed(WriterError):
    """Writing or syncing failed, so what is on disk is unknown: accept nothing more until a restart has looked."""


class WalCorrupt(WriterError):
    """Bytes that were once durable are damaged: stop, a person has to look."""


class StorageError(WriterError):
    """The object store did not do what was asked: try again later."""


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


class CommitUnknown(CatalogError):
    """The catalog may or may not have committed: look for the flush id in the snapshots before trying again."""


class RowsAlreadyCommitted(WriterError):
    """The table holds some of the rows already: drop those at or below the marks, write the rest anew, commit that."""

    def __init__(self, message: str, *, marks: Mapping[SourceId, Position]) -> None:
        super().__init__(message)
        self.marks = marks
