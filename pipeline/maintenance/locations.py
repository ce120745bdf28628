"""Where tables lie. Core: owns telling whether a table has its directory for itself.

Orphan removal takes every file below a table's location that this table does not name. Where two tables share one, by
two names of one table, by a location inside another or by a path for new files that leads there, the files of one are
orphans to the other. Where it is not known of all tables where they lie, none can be said to be alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from pipeline.errors import PipelineError

# Where a table's new files go, if not below its location. The last two are old names of the first.
WRITE_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")

# Schemes of one and the same store, by the name that they get here.
_SAME_STORE = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}
_FILE = "file"

_NAMED_MAX = 10

_Name = TypeVar("_Name", bound=Hashable)


class SharedLocation(PipelineError):
    """Files of another table lie below this one's location, or may: nothing there may be taken for an orphan."""


def places_of(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """List the directories of a table: its location, and where else it puts new files."""
    return (location, *(properties[key] for key in WRITE_PATHS if properties.get(key)))


def check_location_is_own(name: _Name, places: Mapping[_Name, Sequence[str]]) -> str:
    """Give a table's location. `places` has the directories of all tables, the location first, none if not known.

    Raises: SharedLocation.
    """
    unknown = [each for each, at in places.items() if not at]
    if unknown or name not in places:
        raise SharedLocation(f"not removed, it is not known where all tables lie: tables={_listed(unknown or [name])}")
    own = _directory(places[name][0])
    shared = [
        each for each, at in places.items() if each != name and any(_directory(place).startswith(own) for place in at)
    ]
    if shared:
        raise SharedLocation(f"not removed, files of other tables lie there: location={own} tables={_listed(shared)}")
    return places[name][0]


def _listed(names: Sequence[object]) -> str:
    shown = sorted(map(str, names))
    return ", ".join(shown[:_NAMED_MAX]) + (" ..." if len(shown) > _NAMED_MAX else "")


def _directory(location: str) -> str:
    """Spell a location so that one is a prefix of another exactly if it contains it.

    `file:///x`, `file:/x` and `/x` are one; so are `s3://b/x`, `s3a://b/x` and `s3n://b/x`.
    """
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        scheme, path = _FILE, location
    scheme = scheme.lower()
    if scheme == _FILE:
        path = posixpath.normpath(f"/{path.removeprefix('//localhost').strip('/')}")
    return f"{_SAME_STORE.get(scheme, scheme)}:{path.rstrip('/')}/"
