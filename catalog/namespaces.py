"""Operations on namespaces, one per method. Owns what crosses several store calls, which is little."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from catalog.errors import NoSuchNamespace, Unprocessable
from catalog.names import Namespace, namespace_from_path
from catalog.store.protocol import Store


@dataclass(frozen=True, slots=True)
class PropertiesChange:
    """What a properties update did, name by name."""

    updated: list[str]
    removed: list[str]
    missing: list[str]


def summarise_change(
    *, removals: Sequence[str], updates: Mapping[str, str], removed: Collection[str]
) -> PropertiesChange:
    """Put together what was asked for and which of the removals were there."""
    asked = list(dict.fromkeys(removals))
    return PropertiesChange(
        updated=list(updates),
        removed=[name for name in asked if name in removed],
        missing=[name for name in asked if name not in removed],
    )


class Namespaces:
    """Namespaces of the one warehouse."""

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

    async def children(self, parent: str, *, after: str, limit: int | None) -> list[Namespace]:
        """Return the namespaces directly below a parent, given as a query value; empty means the top.

        Raises: BadRequest, NoSuchNamespace.
        """
        namespace = namespace_from_path(parent) if parent else ()
        try:
            return await self._store.list_namespaces(namespace, after=after, limit=limit)
        except NoSuchNamespace:
            # PyIceberg encodes this parameter twice, so what looks like a missing parent may only be encoded.
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
