"""Table locations: does a table have its directory to itself? Pure.

Orphan removal deletes every file below a table's location that the table does not reference. If two tables share a
directory, by two names of one table, by a location inside another or by a path for new files that leads there, the
files of one are orphans to the other. As long as the location of any table is unknown, no table counts as alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from lakefeed.pipeline.errors import PipelineError

# Where a table's new files go, if not below its location. The last two are old names of the first.
WRITE_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")

# Schemes of the same store.
_SAME_STORE = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}
_FILE = "file"

_NAMED_MAX = 10

_Name = TypeVar("_Name", bound=Hashable)


class SharedLocation(PipelineError):
    """Another table has, or may have, files below this table's location: no file there counts as an orphan."""


def directories_of(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories of a table: its location, and where else it writes new files."""
    return (location, *(properties[key] for key in WRITE_PATHS if properties.get(key)))


def check_location_is_own(name: _Name, directories: Mapping[_Name, Sequence[str]]) -> str:
    """Return a table's location if no other table has files below it.

    `directories` has those of all tables, the location first; empty where they are unknown.

    Raises: SharedLocation.
    """
    unknown = [each for each, paths in directories.items() if not paths]
    if unknown or name not in directories:
        raise SharedLocation(
            f"not removed, the location of some tables is unknown: tables={_listed(unknown or [name])}"
        )
    own = _normalise(directories[name][0])
    shared = [
        each
        for each, paths in directories.items()
        if each != name and any(_normalise(path).startswith(own) for path in paths)
    ]
    if shared:
        raise SharedLocation(f"not removed, other tables have files there: location={own} tables={_listed(shared)}")
    return directories[name][0]


def _listed(names: Sequence[object]) -> str:
    shown = sorted(map(str, names))
    return ", ".join(shown[:_NAMED_MAX]) + (" ..." if len(shown) > _NAMED_MAX else "")


def _normalise(location: str) -> str:
    """Write a location so that it is a prefix of another one exactly if it contains that one.

    `file:///x`, `file:/x` and `/x` are the same; so are `s3://b/x`, `s3a://b/x` and `s3n://b/x`.
    """
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        scheme, path = _FILE, location
    scheme = scheme.lower()
    if scheme == _FILE:
        path = posixpath.normpath(f"/{path.removeprefix('//localhost').strip('/')}")
    return f"{_SAME_STORE.get(scheme, scheme)}:{path.rstrip('/')}/"
