"""Errors of the catalog. Each carries the HTTP status and the Iceberg type that clients compare literally.

Messages of errors that clients see keep Iceberg's own wording (`Table does not exist: a.b`), since its clients and
its compatibility kit assert on the text.
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
    """Base of all errors that this package raises on purpose; rendered by the middleware in app.py."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"
    headers: ClassVar[Mapping[str, str]] = {}


class BadRequest(CatalogError):
    """The request cannot be read: a field is missing or has the wrong type."""

    status = 400
    type = "BadRequestException"


class ValidationFailed(CatalogError):
    """The request can be read but would make invalid metadata, or breaks a rule of its table."""

    status = 400
    type = "ValidationException"


class IllegalArgument(CatalogError):
    """The request can be read but asks for what views do not have; Java clients raise it under this very name."""

    status = 400
    type = "IllegalArgumentException"


class NoSuchWarehouse(CatalogError):
    """The client asked for a warehouse that is not ours."""

    status = 404
    type = "NoSuchWarehouseException"


class NoSuchNamespace(CatalogError):
    """The namespace does not exist."""

    status = 404
    type = "NoSuchNamespaceException"


class NoSuchTable(CatalogError):
    """The table does not exist."""

    status = 404
    type = "NoSuchTableException"


class NoSuchView(CatalogError):
    """The view does not exist."""

    status = 404
    type = "NoSuchViewException"


class NoSuchFunction(CatalogError):
    """The function does not exist; no operation of the specification makes one."""

    status = 404
    type = "NoSuchFunctionException"


class NoSuchPlan(CatalogError):
    """The scan plan does not exist in this process (any more): it was cancelled, expired, or never made here."""

    status = 404
    type = "NoSuchPlanIdException"


class NoSuchPlanTask(CatalogError):
    """The task belongs to no scan plan that exists in this process (any more)."""

    status = 404
    type = "NoSuchPlanTaskException"


class NoSuchRoute(CatalogError):
    """Nothing is served at this path."""

    status = 404
    type = "NotFoundException"


class MethodNotAllowed(CatalogError):
    """The path is served, but not with this method."""

    status = 405
    type = "UnsupportedOperationException"


class Unplannable(CatalogError):
    """The scan cannot be planned here: its manifests are encrypted, damaged or too many. The client may plan itself."""

    status = 406
    type = "UnsupportedOperationException"


class AlreadyExists(CatalogError):
    """The name is taken."""

    status = 409
    type = "AlreadyExistsException"


class NamespaceNotEmpty(CatalogError):
    """The namespace still holds tables or namespaces."""

    status = 409
    type = "NamespaceNotEmptyException"


class CommitFailed(CatalogError):
    """A requirement does not hold (any more): the client plans again on fresh metadata."""

    status = 409
    type = "CommitFailedException"


class KeyTaken(CatalogError):
    """Another request with this idempotency key was first: nothing has changed, and its outcome can be looked up."""

    status = 409
    type = "CommitFailedException"


class BodyTooLarge(CatalogError):
    """The request body is beyond the configured limit."""

    status = 413
    type = "BadRequestException"


class Unprocessable(CatalogError):
    """The request contradicts itself."""

    status = 422
    type = "UnprocessableEntityException"


class TooManyPlans(CatalogError):
    """The scan plans that clients have under way fill their room."""

    status = 429
    type = "TooManyRequestsException"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class CommitStateUnknown(CatalogError):
    """The pointer may or may not have moved: nobody may clean up or repeat before looking."""

    status = 500
    type = "CommitStateUnknownException"


class StoreFailed(CatalogError):
    """The database did not answer; whether it did what was asked is unknown."""

    status = 503
    type = "ServiceUnavailableException"


class FileChanged(CatalogError, StorageError):
    """A metadata file has other content than was registered. Not 503: trying again does not help, a person has to look.

    Nor 4xx: Java clients take a 404 as a missing table, and a key would remember the refusal beyond the repair.
    """

    status = 500
    type = "InternalServerError"


class StoreUnusable(CatalogError):
    """The database belongs to another version of the catalog: stop, a person has to look."""


@dataclass(frozen=True, slots=True)
class ErrorModel:
    """What clients see of an error besides its message: Iceberg's `ErrorModel` and the headers of the response."""

    status: int
    type: str
    headers: Mapping[str, str] = field(default_factory=dict)


# Errors of the shared code, most special first.
SHARED_ERRORS: tuple[tuple[type[LakefeedError], ErrorModel], ...] = (
    (LocationInvalid, ErrorModel(400, "BadRequestException")),
    (LiteralInvalid, ErrorModel(400, "ValidationException")),
    (LocationForbidden, ErrorModel(403, "ForbiddenException")),
    (FileMissing, ErrorModel(404, "NotFoundException")),
    (ManifestUnreadable, ErrorModel(406, "UnsupportedOperationException")),  # the client may plan its scan itself
    # Not 503: Java clients take that as an unknown commit outcome.
    (TooManyWaiting, ErrorModel(429, "TooManyRequestsException", {"Retry-After": "1"})),
    (StorageError, ErrorModel(503, "ServiceUnavailableException")),
)


def error_model(error: LakefeedError) -> ErrorModel:
    """Return the HTTP status, Iceberg type and headers of an error, whichever package raised it."""
    if isinstance(error, CatalogError):
        return ErrorModel(error.status, error.type, error.headers)
    shared = (model for kind, model in SHARED_ERRORS if isinstance(error, kind))
    return next(shared, ErrorModel(CatalogError.status, CatalogError.type))
