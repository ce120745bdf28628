"""Locations of files: parse, compare and confine to the warehouse.

Locations are Iceberg's, not URLs: nothing in them is percent-encoded. `file:/x`, `file:///x` and `/x` are the same
location, and so are `s3://`, `s3a://` and `s3n://`, and `abfs://` and `abfss://`.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from lakefeed.contract.errors import LocationForbidden, LocationInvalid

_FILE = re.compile(r"(?:file:(?://(?:localhost)?(?=/)|(?!//)))?(/[^\0]*)")
_S3 = re.compile(r"s3[an]?://([^/\0]+)(/[^\0]*)?")
_CLOUD = re.compile(r"(gs|abfss?)://([^/\0]+)(/[^\0]*)?")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location. `container` is the bucket, or empty for local files."""

    scheme: str
    container: str
    path: str

    def is_below(self, directory: Location) -> bool:
        """Return whether this is a file or directory inside `directory`."""
        below = self.path.startswith(directory.path.rstrip("/") + "/")
        return below and (self.scheme, self.container) == (directory.scheme, directory.container)


def parse_location(text: str) -> Location:
    """Parse a location.

    Raises: LocationInvalid, also for `.` and `..`, which would make confinement a matter of interpretation.
    """
    if match := _FILE.fullmatch(text):
        location = Location("file", "", posixpath.normpath("/" + match[1].lstrip("/")))
    elif match := _S3.fullmatch(text):
        location = Location("s3", match[1], match[2] or "/")
    elif match := _CLOUD.fullmatch(text):
        location = Location("gs" if match[1] == "gs" else "abfss", match[2], match[3] or "/")
    else:
        raise LocationInvalid(f"Unsupported location: {text}")
    if {".", ".."} & set(text.split("/")):
        raise LocationInvalid(f"Invalid location, relative segments are not allowed: {text}")
    return location


def parent_path(text: str) -> str:
    """Return the path of the directory that a file is in, with a slash at its end."""
    return posixpath.dirname(parse_location(text).path) + "/"


@dataclass(frozen=True, slots=True)
class Confinement:
    """The rule where clients may have the catalog read and write files."""

    warehouse: str
    allow_any: bool

    def check(self, text: str) -> None:
        """Check that a location is inside the warehouse.

        Raises: LocationInvalid, LocationForbidden.
        """
        if not self.allows(text):
            raise LocationForbidden(f"Location is outside the warehouse {self.warehouse}: {text}")

    def allows(self, text: str) -> bool:
        """Return whether clients may use a location. Raise LocationInvalid if it is of another kind of storage."""
        location, warehouse = parse_location(text), parse_location(self.warehouse)
        if location.scheme != warehouse.scheme:
            raise LocationInvalid(f"Location must be of the kind of the warehouse {self.warehouse}: {text}")
        return location.is_below(warehouse) or self.allow_any


@dataclass(frozen=True, slots=True)
class OwnedDirectories:
    """The directories whose files belong to one table: its location and its paths for data and metadata."""

    confinement: Confinement
    directories: tuple[Location, ...]

    def contain(self, text: str) -> bool:
        """Return whether a file belongs to the table, and is where clients may have files at all."""
        try:
            location = parse_location(text)
            return any(map(location.is_below, self.directories)) and self.confinement.allows(text)
        except LocationInvalid:
            return False
