"""Position of the rows of a backfill, by which mirrors and readers order them against changes. Pure.

A row is as new as the last change that its table had committed before the read began: later changes win over it,
earlier ones lose. A database is therefore read as of the *mark* of its source, taken before each chunk. A file does not
say when it was written, so its rows are older than every change, unless the mark was noted when it was exported.

    mark      the source's last committed change                 default for databases
    start     before all changes                                 default for files
    0:4711    epoch and sequence, as noted before the export     files
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lakefeed.contract.changes import Position
from lakefeed.settings import SettingsError

# Sequences begin at 0.
BEFORE_ALL = Position(0, -1)

_POSITION = re.compile(r"(?:(\d+):)?(\d+)")


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """The position of the rows that are read: a fixed one, or the source's mark."""

    position: Position | None = None

    def resolve(self, mark: Position | None) -> Position:
        """Return the position of rows that are read now.

        Raises:
            SettingsError: the position is beyond the mark, so changes that are not committed yet would lose against the
            rows.
        """
        if self.position is None:
            return mark or BEFORE_ALL
        if self.position > (mark or BEFORE_ALL):
            raise SettingsError(
                "the table has not reached this position yet, wait until it has:"
                f" position={position_text(self.position)} mark={position_text(mark)}"
            )
        return self.position


def parse_position(text: str) -> ReadPosition:
    """Read `mark`, `start` or a position.

    Raises: SettingsError.
    """
    if text == "mark":
        return ReadPosition()
    if text == "start":
        return ReadPosition(BEFORE_ALL)
    match = _POSITION.fullmatch(text)
    if match is None:
        raise SettingsError(f"--position must be mark, start or EPOCH:SEQUENCE: {text}")
    return ReadPosition(Position(int(match[1] or 0), int(match[2])))


def position_text(position: Position | None) -> str:
    """Write a position in the form of the option."""
    return "none" if position is None else f"{position.epoch}:{position.sequence}"
