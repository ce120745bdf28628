"""The position that rows of a backfill get. Owns the choice; mirrors and readers order by it.

A row that was read is as new as the last change that its table had committed before the reading began: later ones win
over it, earlier ones lose. So a database is read as of the *mark* of its source, taken before each chunk. A file says
nothing of when it was written, so its rows are older than every change, unless whoever exported it has noted the mark.

    mark     the source's last committed change                a database, by default
    start    before all changes                                files, by default
    0:4711   epoch and sequence, as noted before the export    files
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import ConfigError
from writer.changes import Position

# Sequences begin at 0.
BEFORE_ALL = Position(0, -1)

_POSITION = re.compile(r"(?:(\d+):)?(\d+)")


@dataclass(frozen=True, slots=True)
class ReadAs:
    """As of what rows are read: a position, or the mark if there is none."""

    position: Position | None = None

    def position_for(self, mark: Position | None) -> Position:
        """Give the position of rows that are read now.

        Raises:
            ConfigError: changes that are not committed yet would lose against rows of the backfill.
        """
        if self.position is None:
            return mark or BEFORE_ALL
        if self.position > (mark or BEFORE_ALL):
            raise ConfigError(
                "the table has not come to this position, wait until it has:"
                f" position={shown(self.position)} mark={shown(mark)}"
            )
        return self.position


def parse_read_as(text: str) -> ReadAs:
    """Read `mark`, `start` or a position.

    Raises: ConfigError.
    """
    if text == "mark":
        return ReadAs()
    if text == "start":
        return ReadAs(BEFORE_ALL)
    match = _POSITION.fullmatch(text)
    if match is None:
        raise ConfigError(f"--position is mark, start or EPOCH:SEQUENCE: {text}")
    return ReadAs(Position(int(match[1] or 0), int(match[2])))


def shown(position: Position | None) -> str:
    """Write a position as the option has it."""
    return "none" if position is None else f"{position.epoch}:{position.sequence}"
