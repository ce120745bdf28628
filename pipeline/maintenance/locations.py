"""Where tables lie. Core: owns telling whether a table has its directory for itself.

Orphan removal takes every file below a table's location that this table does not name. Where two tables share one, by
two names of one table or by a location inside another, the files of one are orphans to the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import PipelineError


class SharedLocation(PipelineError):
    """Another table's files lie below this one's location: nothing there may be taken for an orphan."""


def check_location_is_own(name: str, locations: Mapping[str, str]) -> str:
    """Give a table's location.

    Raises: SharedLocation.
    """
    own = _directory(locations[name])
    shared = sorted(each for each, at in locations.items() if each != name and _directory(at).startswith(own))
    if shared:
        raise SharedLocation(f"not removed, files of other tables lie there: location={own} tables={', '.join(shared)}")
    return locations[name]


def _directory(location: str) -> str:
    """Spell a location so that one is a prefix of another exactly if it contains it: file:///x and file:/x are one."""
    scheme, colon, path = location.partition(":")
    if not colon:
        return f"{location.rstrip('/')}/"
    return f"{scheme}:/{path.strip('/')}/" if scheme == "file" else f"{location.rstrip('/')}/"
