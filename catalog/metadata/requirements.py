"""What a commit requires of the table it changes. Owns the kinds, their fields and Iceberg's exact messages.

Checking raises CommitFailed (409) and nothing else, so that clients plan again on fresh metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from catalog.errors import BadRequest, CommitFailed
from catalog.fields import JsonObject, maybe_int, read_int, read_text

ASSERT_CREATE = "assert-create"

Requirement = JsonObject
_Base = Mapping[str, Any]


def parse_requirements(requirements: list[JsonObject]) -> list[Requirement]:
    """Check that every requirement is of a known kind and has the fields of its kind.

    Raises: BadRequest.
    """
    for requirement in requirements:
        kind = read_text(requirement, "type")
        if kind != ASSERT_CREATE and kind not in _CHECKS:
            raise BadRequest(f"Cannot parse update requirement, unknown type: {kind}")
        _READERS[kind](requirement)
    if len(requirements) > 1 and is_create(requirements):
        raise BadRequest("Invalid create requirements: assert-create must stand alone")
    return requirements


def is_create(requirements: list[Requirement]) -> bool:
    """Tell whether these are the requirements of a commit that creates its table."""
    return any(requirement["type"] == ASSERT_CREATE for requirement in requirements)


def check_requirements(requirements: list[Requirement], base: Mapping[str, Any]) -> None:
    """Check every requirement against the table as it is.

    Raises: CommitFailed.
    """
    for requirement in requirements:
        if requirement["type"] == ASSERT_CREATE:
            raise CommitFailed("Requirement failed: table already exists")
        _CHECKS[requirement["type"]](requirement, base)


def _check_uuid(requirement: Requirement, base: _Base) -> None:
    found = base.get("table-uuid")
    if str(found).lower() != requirement["uuid"].lower():
        raise CommitFailed(f"Requirement failed: UUID does not match: expected {found} != {requirement['uuid']}")


def _check_ref(requirement: Requirement, base: _Base) -> None:
    name, expected = requirement["ref"], requirement.get("snapshot-id")
    ref = base["refs"].get(name)
    if ref is None:
        if expected is not None:
            raise CommitFailed(f"Requirement failed: branch or tag {name} is missing, expected {expected}")
        return
    if expected is None:
        raise CommitFailed(f"Requirement failed: {ref['type']} {name} was created concurrently")
    if expected != ref["snapshot-id"]:
        raise CommitFailed(
            f"Requirement failed: {ref['type']} {name} has changed: expected id {expected} != {ref['snapshot-id']}"
        )


def _check_equal(field: str, base_field: str, what: str) -> Callable[[Requirement, _Base], None]:
    def check(requirement: Requirement, base: _Base) -> None:
        expected, found = requirement[field], base[base_field]
        if expected != found:
            raise CommitFailed(f"Requirement failed: {what} changed: expected id {expected} != {found}")

    return check


def _read_ref(requirement: Requirement) -> None:
    read_text(requirement, "ref")
    maybe_int(requirement, "snapshot-id")


# kind -> (field of the requirement, field of the document, words of the message)
_EQUALITIES = {
    "assert-last-assigned-field-id": ("last-assigned-field-id", "last-column-id", "last assigned field id"),
    "assert-current-schema-id": ("current-schema-id", "current-schema-id", "current schema"),
    "assert-last-assigned-partition-id": (
        "last-assigned-partition-id",
        "last-partition-id",
        "last assigned partition id",
    ),
    "assert-default-spec-id": ("default-spec-id", "default-spec-id", "default partition spec"),
    "assert-default-sort-order-id": ("default-sort-order-id", "default-sort-order-id", "default sort order"),
}

_CHECKS: dict[str, Callable[[Requirement, _Base], None]] = {
    "assert-table-uuid": _check_uuid,
    "assert-ref-snapshot-id": _check_ref,
    **{kind: _check_equal(*facts) for kind, facts in _EQUALITIES.items()},
}


def _reader_of(field: str) -> Callable[[Requirement], object]:
    return lambda requirement: read_int(requirement, field)


_READERS: dict[str, Callable[[Requirement], object]] = {
    ASSERT_CREATE: lambda _requirement: None,
    "assert-table-uuid": lambda requirement: read_text(requirement, "uuid"),
    "assert-ref-snapshot-id": _read_ref,
    **{kind: _reader_of(facts[0]) for kind, facts in _EQUALITIES.items()},
}
