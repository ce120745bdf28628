"""Commits to several tables at once: all of them, or none. Owns the order of steps; versions.py moves the pointers.

Steps, and what a crash after each one leaves behind:

    1. wait for the turns of all tables                          nothing
    2. check the requirements of all, apply the updates of all   nothing, whichever fails
    3. write all metadata files                                  files that nothing refers to
    4. move all pointers in one transaction of the database      the commit, whole

Turns are waited for in the order of names, so that two transactions never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from catalog.errors import AlreadyExists, CommitFailed
from catalog.names import TableId
from catalog.tables import COMMIT_ATTEMPTS, Commit, PlannedCommit, Tables
from catalog.turns import Turns
from catalog.versions import Change, Versions


class Transactions:
    """Transactions over the tables of the one warehouse."""

    def __init__(self, tables: Tables, versions: Versions, *, turns: Turns) -> None:
        self._tables = tables
        self._versions = versions
        self._turns = turns

    async def commit(self, commits: Mapping[TableId, Commit]) -> None:
        """Commit to all tables, creating those whose commits require that. Cancelling leaves the outcome open.

        Raises: NoSuchTable, CommitFailed, ValidationFailed, Forbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with AsyncExitStack() as held:
            for table in sorted(commits):
                await held.enter_async_context(self._turns.turn(table))
            planned = await self._commit_in_turn(commits)
        await self._versions.discard_all([location for plan in planned for location in plan.expired_files])

    async def _commit_in_turn(self, commits: Mapping[TableId, Commit]) -> list[PlannedCommit]:
        for _ in range(COMMIT_ATTEMPTS):
            planned = [await self._tables.plan(table, commit) for table, commit in commits.items()]
            if await self._replace([plan.change for plan in planned]):
                return planned
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {', '.join(map(str, commits))}")

    async def _replace(self, changes: Sequence[Change]) -> bool:
        try:
            return await self._versions.replace_all(changes)
        except AlreadyExists as error:  # in another process, since we looked
            raise CommitFailed(f"Requirement failed: {error}") from error
