"""Which faults a run may draw, and which of them show defects that are known."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fault(enum.Enum):
    """One kind of fault, or of behaviour of a client, that a run may draw."""

    KILL = "processes are killed at any await and started again"
    POWER = "machines lose power: unsynced bytes are gone"
    STOP = "nodes are stopped in order and started again"
    NETWORK = "messages are delayed, lost, duplicated and reordered; responses are lost after the commit landed"
    PARTITION = "a node does not reach the catalog for a while"
    CATALOG = "the catalog is killed and started again"
    STORE = "the object store fails for a while; failed writes may have happened"
    DISK = "a node's disk is full for a while"
    CLOCK = "a node's wall clock jumps by up to a day"
    EPOCHS = "sources start over with a higher epoch"
    TRANSACTIONS = "tables are committed together"
    HTTP = "sources post their changes over HTTP"
    ROWS = "sources post rows that the service numbers, each source at one node"
    MOVES = "sources move between nodes and keep everything that they sent"
    MOVES_UNACKED = "sources move between nodes and keep only what was not acked"
    ROWS_MOVE = "sources of rows move between nodes"
    COMPACT = "another client compacts tables"
    EXPIRE = "another client removes old snapshots"
    ROLLBACK = "an operator rolls a table back"
    DROP = "another client drops tables"
    MARKER = "another client removes the property lakefeed.progress"
    RESTORE = "the catalog is restored from a backup"


# What holds today, whatever is drawn together.
SAFE = frozenset(Fault) - {
    Fault.ROWS_MOVE,
    Fault.DROP,
    Fault.RESTORE,
}


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect that `seed` shows with exactly these faults."""

    name: str
    seed: int
    faults: frozenset[Fault]


# Each becomes a regression, and its fault safe, once it is fixed.
KNOWN_DEFECTS = (
    Defect("rows_numbered_by_the_service_are_lost_when_their_source_changes_nodes", 1, frozenset({Fault.ROWS_MOVE})),
    Defect("changes_between_a_restored_backup_and_the_trimmed_log_are_lost_silently", 7, frozenset({Fault.RESTORE})),
    Defect("rows_of_a_dropped_table_come_back_after_a_restart", 1, frozenset({Fault.DROP})),
)

# Seeds that failed once, with the faults that they drew.
REGRESSIONS: tuple[tuple[int, frozenset[Fault]], ...] = (
    # /status showed the committed sequence of an earlier epoch as that of the current one.
    (7, frozenset({Fault.EPOCHS, Fault.STORE})),
    # Rows were doubled after the progress marker was removed.
    (1, frozenset({Fault.MARKER})),
    # Changes that only one node had were lost once another node had committed later ones.
    (1, frozenset({Fault.MOVES_UNACKED, Fault.KILL})),
)
