"""Where tables and their metadata files live. Core: owns the layout below the warehouse and who may leave it.

    <warehouse>/<namespace level>/.../<table>-<table uuid>/metadata/NNNNN-<uuid>.metadata.json

The uuid in the directory keeps tables apart for good: after a rename or a drop without purge, a new table of the old
name must not write among the other's files. Names are only there for people, so they are cut and cleaned.

Locations are Iceberg's, not URLs: nothing in them is percent-encoded. `file:/x`, `file:///x` and `/x` are one place,
and so are `s3://`, `s3a://` and `s3n://`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lakefeed.catalog.errors import BadRequest, Forbidden
from lakefeed.catalog.json_fields import parse_count
from lakefeed.catalog.metadata.document import DATA_PATH, METADATA_PATH

if TYPE_CHECKING:
    from lakefeed.catalog.names import EntryId, Namespace


# Half of what file systems allow for one path component, so that the uuid fits beside it.
_COMPONENT_MAX_CHARS = 120

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_VERSION = re.compile(r"([0-9]+)-")
_FILE = re.compile(r"(?:file:(?://(?:localhost)?(?=/)|(?!//)))?(/[^\0]*)")
_S3 = re.compile(r"s3[an]?://([^/\0]+)(/[^\0]*)?")


@dataclass(frozen=True, slots=True)
class Place:
    """A location taken apart. `container` is the bucket, or empty for local files."""

    scheme: str
    container: str
    path: str


def parse_location(location: str) -> Place:
    """Take a location apart.

    Raises: BadRequest, also for `.` and `..`, which would make confinement a matter of interpretation.
    """
    if match := _FILE.fullmatch(location):
        place = Place("file", "", posixpath.normpath("/" + match[1].lstrip("/")))
    elif match := _S3.fullmatch(location):
        place = Place("s3", match[1], match[2] or "/")
    else:
        raise BadRequest(f"Unsupported location: {location}")
    if {".", ".."} & set(location.split("/")):
        raise BadRequest(f"Invalid location, relative segments are not allowed: {location}")
    return place


@dataclass(frozen=True, slots=True)
class Confinement:
    """The rule where clients may have the catalog read and write files."""

    warehouse: str
    allow_any: bool

    def check(self, location: str) -> None:
        """Check that a location is inside the warehouse.

        Raises: BadRequest, Forbidden.
        """
        if not self.allows(location):
            raise Forbidden(f"Location is outside the warehouse {self.warehouse}: {location}")

    def allows(self, location: str) -> bool:
        """Tell whether a location may be used."""
        place, home = parse_location(location), parse_location(self.warehouse)
        if place.scheme != home.scheme:
            raise BadRequest(f"Location must be of the kind of the warehouse {self.warehouse}: {location}")
        return _is_below(place, home) or self.allow_any


@dataclass(frozen=True, slots=True)
class OwnPlaces:
    """Where the files of one table are its own: below its location and its paths for data and metadata."""

    confinement: Confinement
    places: tuple[Place, ...]

    def hold(self, location: str) -> bool:
        """Tell whether a file is the table's own, and in a place that clients may use at all."""
        try:
            place = parse_location(location)
            return any(_is_below(place, own) for own in self.places) and self.confinement.allows(location)
        except BadRequest:
            return False


def own_places(document: Mapping[str, Any], confinement: Confinement) -> OwnPlaces:
    """Read from a table's metadata which places are its own.

    Raises: BadRequest.
    """
    chosen = (document["properties"].get(name) for name in (DATA_PATH, METADATA_PATH))
    directories = (document["location"], *filter(None, chosen))
    return OwnPlaces(confinement, tuple(parse_location(directory) for directory in directories))


def namespace_location(warehouse: str, namespace: Namespace) -> str:
    """Return where a namespace's tables go unless it has a `location` property."""
    return "/".join((warehouse, *map(_component, namespace)))


def entry_location(namespace_base: str, entry: EntryId, entry_uuid: str) -> str:
    """Return where a new table or view goes unless its client asks for a place."""
    return f"{namespace_base.rstrip('/')}/{_component(entry.name)}-{entry_uuid}"


def metadata_location(document: Mapping[str, Any], *, version: int, file_uuid: str) -> str:
    """Name the next metadata file of a table."""
    directory = metadata_directory(document)
    return f"{directory}/{version:05d}-{file_uuid}.metadata.json"


def metadata_directory(document: Mapping[str, Any]) -> str:
    """Return where a table's metadata files go."""
    chosen = document["properties"].get(METADATA_PATH)
    return chosen.rstrip("/") if chosen else f"{document['location'].rstrip('/')}/metadata"


def parent_path(location: str) -> str:
    """Return the path of the directory that a file is in, however its location is spelled, with a slash at the end.

    Raises: BadRequest.
    """
    return posixpath.dirname(parse_location(location).path) + "/"


def next_version(location: str) -> int:
    """Return the version after that of a metadata file; foreign names start over at 0, as in Iceberg."""
    match = _VERSION.match(posixpath.basename(location))
    version = parse_count(match[1]) if match else None
    return 0 if version is None else version + 1


def _is_below(place: Place, directory: Place) -> bool:
    below = place.path.startswith(directory.path.rstrip("/") + "/")
    return below and (place.scheme, place.container) == (directory.scheme, directory.container)


def _component(name: str) -> str:
    cleaned = _UNSAFE.sub("_", name)[:_COMPONENT_MAX_CHARS]
    return cleaned if cleaned.strip(".") else "_" * len(cleaned)
