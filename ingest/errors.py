"""Errors of ingest, by what the caller does next."""

from __future__ import annotations

from lakefeed.contract.errors import LakefeedError


class IngestError(LakefeedError):
    """Base of ingest's errors."""


class ProtocolError(IngestError):
    """A message breaks the protocol: refuse it with this reason; the connection may continue.

    `retry` says that it only came too early. The sizes, in bytes, are given if it is too large.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        sequence_number: int | None = None,
        retry: bool = False,
        max_size: int | None = None,
        actual_size: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry = retry
        self.max_size = max_size
        self.actual_size = actual_size
        self.sequence_number = sequence_number
        self.correlation_id: str | None = None


class PushError(IngestError):
    """The service refused what was pushed, or went away: show the message and stop."""
