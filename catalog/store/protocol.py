"""What the catalog asks of a database: names, properties and metadata pointers, each call one transaction.

Errors are the ones that clients see, because only the database knows at that moment whether a name is taken. Any
method raises StoreFailed when the database does not answer; a change may then have happened or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from catalog.names import Namespace, TableId


class Store(Protocol):
    """Names and pointers."""

    async def open(self) -> None:
        """Connect, and make or check the schema.

        Raises: StoreUnusable.
        """

    async def close(self) -> None:
        """Disconnect after running work."""

    async def create_namespace(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent.

        Raises: AlreadyExists, NoSuchNamespace.
        """

    async def load_namespace(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties.

        Raises: NoSuchNamespace.
        """

    async def list_namespaces(self, parent: Namespace, *, after: str, limit: int | None) -> list[Namespace]:
        """Return the namespaces directly below a parent (empty: the top) by last level, after one of these levels.

        Raises: NoSuchNamespace.
        """

    async def update_namespace(
        self, namespace: Namespace, *, removals: Collection[str], updates: Mapping[str, str]
    ) -> list[str]:
        """Remove and set properties; return which of the removals were there.

        Raises: NoSuchNamespace.
        """

    async def drop_namespace(self, namespace: Namespace) -> None:
        """Drop an empty namespace.

        Raises: NoSuchNamespace, NamespaceNotEmpty.
        """

    async def list_tables(self, namespace: Namespace, *, after: str, limit: int | None) -> list[TableId]:
        """Return a namespace's tables by name, after a name.

        Raises: NoSuchNamespace.
        """

    async def load_pointer(self, table: TableId) -> str | None:
        """Return where a table's current metadata is, or None if there is no such table."""

    async def create_table(self, table: TableId, location: str) -> None:
        """Create a table that points at its first metadata.

        Raises: AlreadyExists, NoSuchNamespace.
        """

    async def swap_pointer(self, table: TableId, *, expected: str, new: str) -> bool:
        """Move a table's pointer if it still is where expected; tell whether it was."""

    async def put_table(self, table: TableId, location: str) -> None:
        """Point a table at metadata, whether or not it existed.

        Raises: NoSuchNamespace.
        """

    async def rename_table(self, source: TableId, destination: TableId) -> None:
        """Give a table another name, also in another namespace.

        Raises: NoSuchTable, NoSuchNamespace, AlreadyExists.
        """

    async def drop_table(self, table: TableId) -> str:
        """Forget a table and return where its last metadata is.

        Raises: NoSuchTable.
        """
