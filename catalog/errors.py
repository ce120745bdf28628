"""Errors of the catalog, each with the HTTP status and the Iceberg error type that clients compare literally.

Messages that clients see keep Iceberg's wording (`Table does not exist: a.b`), because its clients and its
compatibility kit compare the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from lakefeed.contract.errors import (
    FileMissing,
    LakefeedError,
    LiteralInvalid,
    LocationForbidden,
    LocationInvalid,
    ManifestUnreadable,
    StorageError,
    TooManyWaiting,
)


class CatalogError(LakefeedError):
    """Base of all errors that this package raises on purpose; app.py renders them as responses."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"
    headers: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(
        cls, *, status: int | None = None, iceberg_type: str | None = None, retry_after_s: int | None = None
    ) -> None:
        """Set what a class says about itself in its first line; the rest is inherited."""
        super().__init_subclass__()
        cls.status = cls.status if status is None else status
        cls.type = cls.type if iceberg_type is None else iceberg_type
        cls.headers = cls.headers if retry_after_s is None else {"Retry-After": str(retry_after_s)}


# The request


class BadRequest(CatalogError, status=400, iceberg_type="BadRequestException"):
    """The request cannot be read: a field is missing or has the wrong type."""


class ValidationFailed(CatalogError, status=400, iceberg_type="ValidationException"):
    """The request can be read, but it would make invalid metadata or break a rule of its table."""


class IllegalArgument(CatalogError, status=400, iceberg_type="IllegalArgumentException"):
    """The request can be read, but views do not support it. Java clients raise an exception of this very name."""


class BodyTooLarge(CatalogError, status=413, iceberg_type="BadRequestException"):
    """The request body exceeds the configured limit."""


class Unprocessable(CatalogError, status=422, iceberg_type="UnprocessableEntityException"):
    """The request contradicts itself, or an earlier one with the same idempotency key."""


# Missing


class NoSuchWarehouse(CatalogError, status=404, iceberg_type="NoSuchWarehouseException"):
    """The client asked for another warehouse than the one of this catalog."""


class NoSuchNamespace(CatalogError, status=404, iceberg_type="NoSuchNamespaceException"):
    """The namespace does not exist."""


class NoSuchTable(CatalogError, status=404, iceberg_type="NoSuchTableException"):
    """The table does not exist."""


class NoSuchView(CatalogError, status=404, iceberg_type="NoSuchViewException"):
    """The view does not exist."""


class NoSuchFunction(CatalogError, status=404, iceberg_type="NoSuchFunctionException"):
    """The function does not exist. The specification has no operation that creates one."""


class NoSuchPlan(CatalogError, status=404, iceberg_type="NoSuchPlanIdException"):
    """This process does not have the scan plan: it was cancelled, has expired, or was made by another process."""


class NoSuchPlanTask(CatalogError, status=404, iceberg_type="NoSuchPlanTaskException"):
    """The plan task belongs to no scan plan of this process."""


class NoSuchRoute(CatalogError, status=404, iceberg_type="NotFoundException"):
    """No operation is served at this path."""


class MethodNotAllowed(CatalogError, status=405, iceberg_type="UnsupportedOperationException"):
    """The path is served, but not with this method."""


class Unplannable(CatalogError, status=406, iceberg_type="UnsupportedOperationException"):
    """The scan cannot be planned here: its manifests are encrypted, damaged or too many. The client can plan it."""


# Conflicts


class AlreadyExists(CatalogError, status=409, iceberg_type="AlreadyExistsException"):
    """The name is in use."""


class NamespaceNotEmpty(CatalogError, status=409, iceberg_type="NamespaceNotEmptyException"):
    """The namespace contains tables, views or namespaces."""


class CommitFailed(CatalogError, status=409, iceberg_type="CommitFailedException"):
    """A requirement does not hold: the client plans again on fresh metadata."""


class KeyTaken(CatalogError, status=409, iceberg_type="CommitFailedException"):
    """Another request with this idempotency key was first. Nothing has changed; its outcome can be looked up."""


class TooManyPlans(CatalogError, status=429, iceberg_type="TooManyRequestsException", retry_after_s=1):
    """The scan plans of all clients together have reached their limit."""


# Failures of the catalog, its database and its storage


class CommitStateUnknown(CatalogError, status=500, iceberg_type="CommitStateUnknownException"):
    """The pointer may or may not have moved: the client must look before it cleans up or retries."""


class StoreFailed(CatalogError, status=503, iceberg_type="ServiceUnavailableException"):
    """The database did not answer. A change may or may not have happened."""


class FileChanged(CatalogError, StorageError, status=500, iceberg_type="InternalServerError"):
    """A registered metadata file has other content now: an operator must register it again.

    It is not 503, because a retry does not help. It is not 4xx, because Java clients take 404 as a missing table, and
    because an idempotency key would remember the error after the repair.
    """


class StoreUnusable(CatalogError):
    """The database cannot be used by this version, or cannot be reached at the start: an operator must act."""


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """What clients see of an error besides its message: Iceberg's `ErrorModel` and the headers of the response."""

    status: int
    type: str
    headers: Mapping[str, str] = field(default_factory=dict)


# Errors of the shared code, the most specific first.
SHARED_ERRORS: tuple[tuple[type[LakefeedError], ErrorModel], ...] = (
    (LocationInvalid, ErrorModel(400, "BadRequestException")),
    (LiteralInvalid, ErrorModel(400, "ValidationException")),
    (LocationForbidden, ErrorModel(403, "ForbiddenException")),
    (FileMissing, ErrorModel(404, "NotFoundException")),
    (ManifestUnreadable, ErrorModel(406, "UnsupportedOperationException")),  # the client can plan its scan itself
    # It is not 503, because Java clients take that as an unknown commit outcome.
    (TooManyWaiting, ErrorModel(429, "TooManyRequestsException", {"Retry-After": "1"})),
    (StorageError, ErrorModel(503, "ServiceUnavailableException")),
)


def error_model(error: LakefeedError) -> ErrorModel:
    """Return the HTTP status, Iceberg type and headers of an error, whichever package raised it."""
    if isinstance(error, CatalogError):
        return ErrorModel(error.status, error.type, error.headers)
    shared = (model for kind, model in SHARED_ERRORS if isinstance(error, kind))
    return next(shared, ErrorModel(CatalogError.status, CatalogError.type))
