"""Names: identifiers of namespaces, tables and views, the pointer behind one, and where its files are.

A namespace is a tuple of levels. In paths the levels are joined by the unit separator (0x1F, sent as %1F), so a level
cannot contain it; in messages they are joined by dots.

    <warehouse>/<namespace level>/.../<table>-<table uuid>/metadata/NNNNN-<uuid>.metadata.json
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

from lakefeed.catalog.errors import BadRequest
from lakefeed.catalog.json_fields import parse_count, read_list, read_text
from lakefeed.contract.properties import WRITE_DATA_PATH, WRITE_METADATA_PATH
from lakefeed.locations import Confinement, OwnedDirectories, parse_location

Namespace: TypeAlias = tuple[str, ...]

SEPARATOR = "\x1f"

# Far beyond what people write, and well within a request line (8 KiB) and a database index.
NAME_MAX_CHARS = 512
NAMESPACE_MAX_LEVELS = 16

# Enough of a SHA-256 that two contents never share a digest.
_DIGEST_CHARS = 32

# Half of what file systems allow for one path component, so that the uuid fits beside it.
_COMPONENT_MAX_CHARS = 120

_CONTROL = re.compile(r"[\x00-\x1f]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_VERSION = re.compile(r"([0-9]+)-")


def dotted(namespace: Namespace) -> str:
    """Return a namespace as messages show it."""
    return ".".join(namespace)


def namespace_from_path(segment: str) -> Namespace:
    """Read a namespace from one decoded path segment or query value.

    Raises: BadRequest.
    """
    return _check_namespace(tuple(segment.split(SEPARATOR)))


def namespace_from_json(document: Mapping[str, Any]) -> Namespace:
    """Read the `namespace` field of a body: a list of levels.

    Raises: BadRequest.
    """
    levels = read_list(document, "namespace")
    if not levels:
        raise BadRequest("Invalid namespace: the empty namespace is not supported")
    return _check_namespace(tuple(levels))


def _check_namespace(levels: tuple[Any, ...]) -> Namespace:
    if len(levels) > NAMESPACE_MAX_LEVELS:
        raise BadRequest(f"Invalid namespace: more than {NAMESPACE_MAX_LEVELS} levels")
    return tuple(check_name(level, "namespace level") for level in levels)


def check_name(value: Any, what: str) -> str:
    """Return a name or namespace level that can be stored and shown.

    Raises: BadRequest.
    """
    if not isinstance(value, str) or not value:
        raise BadRequest(f"Invalid {what}: expected a string that is not empty")
    if len(value) > NAME_MAX_CHARS:
        raise BadRequest(f"Invalid {what}: longer than {NAME_MAX_CHARS} characters")
    if _CONTROL.search(value):
        raise BadRequest(f"Invalid {what}: control characters are not allowed")
    return value


@dataclass(frozen=True, slots=True, order=True)
class EntryId:
    """The identifier of a table or a view. Both share the names of a namespace, so that one excludes the other."""

    # As messages show it, and as stores keep it.
    kind: ClassVar[str]

    namespace: Namespace
    name: str

    @classmethod
    def checked(cls, namespace: Namespace, name: Any) -> Self:
        """Return an identifier whose name comes from outside.

        Raises: BadRequest.
        """
        return cls(namespace, check_name(name, f"{cls.kind.lower()} name"))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read an identifier: an object of `namespace` and `name`.

        Raises: BadRequest.
        """
        return cls.checked(namespace_from_json(document), read_text(document, "name"))

    def to_json(self) -> dict[str, Any]:
        """Return the identifier as responses show it."""
        return {"namespace": self.namespace, "name": self.name}

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


@dataclass(frozen=True, slots=True, order=True)
class TableId(EntryId):
    """The identifier of a table."""

    kind: ClassVar[str] = "Table"


@dataclass(frozen=True, slots=True, order=True)
class ViewId(EntryId):
    """The identifier of a view."""

    kind: ClassVar[str] = "View"


@dataclass(frozen=True, slots=True)
class Pointer:
    """The location of an entry's current metadata file, the digest of its content, and the uuid of its table.

    The digest is set for registered files, because writers without a catalog (`v1.metadata.json`) reuse names. It is
    empty for files of the catalog, which never reuses a name. The uuid shows that two names are one table, wherever
    their metadata is now. It is empty for views, and for tables of format 1 that have none.
    """

    location: str
    digest: str = ""
    table_uuid: str = ""

    @property
    def version(self) -> tuple[str, str]:
        """Return what identifies the content. Two names of one table may point at it with and without its uuid."""
        return self.location, self.digest


def pointer_to(location: str, document: Mapping[str, Any], *, digest: str = "") -> Pointer:
    """Return the pointer to a document in a file."""
    # A view may have any field under the name of a table's uuid.
    table_uuid = None if "view-uuid" in document else document.get("table-uuid")
    return Pointer(location, digest, table_uuid if isinstance(table_uuid, str) else "")


def content_digest(raw: bytes) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(raw).hexdigest()[:_DIGEST_CHARS]


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
