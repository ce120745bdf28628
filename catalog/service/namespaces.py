"""Operations on namespaces. The store does nearly all of them in one call each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from lakefeed.catalog.errors import NoSuchNamespace, Unprocessable
from lakefeed.catalog.names import Namespace, namespace_from_path
from lakefeed.catalog.store.store import Store


@dataclass(frozen=True, slots=True)
class PropertiesChange:
    """The names of the properties that an update set, removed, and could not remove because they do not exist."""

    updated: list[str]
    removed: list[str]
    missing: list[str]


def summarise_change(
    *, removals: Sequence[str], updates: Mapping[str, str], removed: Collection[str]
) -> PropertiesChange:
    """Return the result of an update from its request and from which of the removals existed."""
    asked = list(dict.fromkeys(removals))
    return PropertiesChange(
        updated=list(updates),
        removed=[name for name in asked if name in removed],
        missing=[name for name in asked if name not in removed],
    )


class Namespaces:
    """The namespaces of the warehouse."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, namespace: Namespace, properties: Mapping[str, str]) -> None:
        """Create a namespace below an existing parent.

        Raises: AlreadyExists, NoSuchNamespace.
        """
        await self._store.create_namespace(namespace, properties)

    async def load(self, namespace: Namespace) -> dict[str, str]:
        """Return a namespace's properties.

        Raises: NoSuchNamespace.
        """
        return await self._store.load_namespace(namespace)

    async def list_children(self, parent: str, *, after: str, limit: int | None) -> list[Namespace]:
        """Return one page of the namespaces directly below a parent, given as a query value; empty means the top.

        Raises: BadRequest, NoSuchNamespace.
        """
        namespace = namespace_from_path(parent) if parent else ()
        try:
            return await self._store.list_namespaces(namespace, after=after, limit=limit)
        except NoSuchNamespace:
            # PyIceberg encodes this parameter twice, so the name of a parent that seems to be missing may be encoded.
            decoded = unquote(parent)
            if decoded == parent:
                raise
            return await self._store.list_namespaces(namespace_from_path(decoded), after=after, limit=limit)

    async def update_properties(
        self, namespace: Namespace, *, removals: list[str], updates: Mapping[str, str]
    ) -> PropertiesChange:
        """Remove and set properties in one step.

        Raises: NoSuchNamespace, Unprocessable.
        """
        both = sorted(set(removals) & updates.keys())
        if both:
            raise Unprocessable(
                f"Invalid namespace update, cannot simultaneously set and remove keys: {', '.join(both)}"
            )
        removed = await self._store.update_namespace(namespace, removals=removals, updates=updates)
        return summarise_change(removals=removals, updates=updates, removed=removed)

    async def drop(self, namespace: Namespace) -> None:
        """Drop an empty namespace.

        Raises: NoSuchNamespace, NamespaceNotEmpty.
        """
        await self._store.drop_namespace(namespace)
