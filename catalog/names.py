"""Names of namespaces, tables and views, as paths and bodies spell them. Owns parsing, checks and the form in messages.

A namespace is a tuple of levels. In paths the levels are joined by the unit separator (0x1F, sent as %1F), which
therefore cannot be part of a level; in messages they are joined by dots.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from lakefeed.catalog.errors import BadRequest
from lakefeed.catalog.json_fields import parse_count, read_list, read_text
from lakefeed.contract.properties import WRITE_DATA_PATH, WRITE_METADATA_PATH
from lakefeed.locations import Confinement, OwnedDirectories, parse_location

# --- catalog.names ----------------------------------------------------------------------------------------------------


Namespace: TypeAlias = tuple[str, ...]

SEPARATOR = "\x1f"

# Far beyond what people write, well within a request line (8 KiB) and a database index.
NAME_MAX_CHARS = 512
NAMESPACE_MAX_LEVELS = 16

_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True, order=True)
class EntryId:
    """What a namespace holds under a name: a table or a view. The two share their names, so one excludes the other."""

    # As messages spell it, and as stores keep it.
    kind: ClassVar[str]

    namespace: Namespace
    name: str

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


@dataclass(frozen=True, slots=True, order=True)
class TableId(EntryId):
    """A table's namespace and name."""

    kind: ClassVar[str] = "Table"


@dataclass(frozen=True, slots=True, order=True)
class ViewId(EntryId):
    """A view's namespace and name."""

    kind: ClassVar[str] = "View"


def dotted(namespace: Namespace) -> str:
    """Spell a namespace for messages."""
    return ".".join(namespace)


def namespace_from_path(segment: str) -> Namespace:
    """Read a namespace from one decoded path segment or query value."""
    return _checked(tuple(segment.split(SEPARATOR)))


def namespace_from_json(document: Mapping[str, Any]) -> Namespace:
    """Read the `namespace` field of a body: a list of levels."""
    levels = read_list(document, "namespace")
    if not levels:
        raise BadRequest("Invalid namespace: the empty namespace is not supported")
    return _checked(tuple(levels))


def table_from_path(namespace: str, name: str) -> TableId:
    """Read a table identifier from two path segments."""
    return TableId(namespace_from_path(namespace), check_name(name, "table name"))


def table_from_json(document: Mapping[str, Any]) -> TableId:
    """Read a table identifier: an object of `namespace` and `name`."""
    return TableId(namespace_from_json(document), check_name(read_text(document, "name"), "table name"))


def view_from_path(namespace: str, name: str) -> ViewId:
    """Read a view identifier from two path segments."""
    return ViewId(namespace_from_path(namespace), check_name(name, "view name"))


def view_from_json(document: Mapping[str, Any]) -> ViewId:
    """Read a view identifier: an object of `namespace` and `name`."""
    return ViewId(namespace_from_json(document), check_name(read_text(document, "name"), "view name"))


def check_name(value: Any, what: str) -> str:
    """Return a table name or namespace level that can be stored and shown.

    Raises: BadRequest.
    """
    if not isinstance(value, str) or not value:
        raise BadRequest(f"Invalid {what}: expected a string that is not empty")
    if len(value) > NAME_MAX_CHARS:
        raise BadRequest(f"Invalid {what}: longer than {NAME_MAX_CHARS} characters")
    if _CONTROL.search(value):
        raise BadRequest(f"Invalid {what}: control characters are not allowed")
    return value


def _checked(levels: tuple[Any, ...]) -> Namespace:
    if len(levels) > NAMESPACE_MAX_LEVELS:
        raise BadRequest(f"Invalid namespace: more than {NAMESPACE_MAX_LEVELS} levels")
    return tuple(check_name(level, "namespace level") for level in levels)


# --- catalog.pointers -------------------------------------------------------------------------------------------------
#
# What a name stands for. Core: owns which two contents are told apart though their files have one name.


# Enough of a SHA-256 that two contents never share a digest.
_DIGEST_CHARS = 32


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where the metadata of a table or view is, which content that file had, and whose it is.

    `digest` is that of a file that was registered: writers without a catalog (`v1.metadata.json`) use names again. It
    is empty for files that the catalog writes, whose names are used once. `table_uuid` tells that two names are one
    table, wherever the metadata of each has gone since; it is empty for views, and for tables of which it is not known.
    """

    location: str
    digest: str = ""
    table_uuid: str = ""

    def is_version(self, other: Pointer) -> bool:
        """Tell whether two point at the same content."""
        return (self.location, self.digest) == (other.location, other.digest)


def point_at(location: str, document: Mapping[str, Any], *, digest: str = "") -> Pointer:
    """Point at a document that is in a file."""
    # A view may carry anything under the name of a table's uuid.
    table_uuid = None if "view-uuid" in document else document.get("table-uuid")
    return Pointer(location, digest, table_uuid if isinstance(table_uuid, str) else "")


def digest_of(raw: bytes) -> str:
    """Tell the content of a file from others."""
    return hashlib.sha256(raw).hexdigest()[:_DIGEST_CHARS]


# Half of what file systems allow for one path component, so that the uuid fits beside it.
_COMPONENT_MAX_CHARS = 120

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_VERSION = re.compile(r"([0-9]+)-")


def namespace_location(warehouse: str, namespace: Namespace) -> str:
    """Return the directory for a namespace's tables unless it has a `location` property."""
    return "/".join((warehouse, *map(_component, namespace)))


def entry_location(namespace_base: str, entry: EntryId, entry_uuid: str) -> str:
    """Return the directory of a new table or view unless its client asks for one.

    The uuid keeps tables apart for good: after a rename or a drop without purge, a new table of the old name must not
    write among the other's files. The name is only there for people, so it is cut and cleaned.
    """
    return f"{namespace_base.rstrip('/')}/{_component(entry.name)}-{entry_uuid}"


def metadata_location(document: Mapping[str, Any], *, version: int, file_uuid: str) -> str:
    """Return the location of a table's next metadata file."""
    return f"{metadata_directory(document)}/{version:05d}-{file_uuid}.metadata.json"


def metadata_directory(document: Mapping[str, Any]) -> str:
    """Return the directory of a table's metadata files."""
    chosen = document["properties"].get(WRITE_METADATA_PATH)
    return chosen.rstrip("/") if chosen else f"{document['location'].rstrip('/')}/metadata"


def owned_directories(document: Mapping[str, Any], confinement: Confinement) -> OwnedDirectories:
    """Return the directories whose files belong to a table.

    Raises: LocationInvalid.
    """
    chosen = (document["properties"].get(name) for name in (WRITE_DATA_PATH, WRITE_METADATA_PATH))
    directories = (document["location"], *filter(None, chosen))
    return OwnedDirectories(confinement, tuple(map(parse_location, directories)))


def next_version(location: str) -> int:
    """Return the version after that of a metadata file; foreign names start over at 0, as in Iceberg."""
    match = _VERSION.match(posixpath.basename(location))
    version = parse_count(match[1]) if match else None
    return 0 if version is None else version + 1


def _component(name: str) -> str:
    cleaned = _UNSAFE.sub("_", name)[:_COMPONENT_MAX_CHARS]
    return cleaned if cleaned.strip(".") else "_" * len(cleaned)
