"""Operations on views, one per method: load, apply the core, add a version. Their files are never deleted here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from lakefeed.aio import Turns
from lakefeed.catalog.errors import CommitFailed, NoSuchNamespace, Unprocessable
from lakefeed.catalog.json_fields import JsonObject
from lakefeed.catalog.metadata.views import (
    CreateView,
    apply_view_updates,
    check_view_requirements,
    create_view_document,
)
from lakefeed.catalog.names import Namespace, Pointer, ViewId, namespace_from_path
from lakefeed.catalog.service.metadata_cache import StoredMetadata
from lakefeed.catalog.service.tables import COMMIT_ATTEMPTS
from lakefeed.catalog.service.versions import Versions
from lakefeed.catalog.store.protocol import Store, no_such_entry

# --- catalog.views ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ViewCommit:
    """The requirements and updates of one view, parsed."""

    requirements: list[JsonObject]
    updates: list[JsonObject]


class Views:
    """Views of the one warehouse. The clock comes from outside."""

    def __init__(self, versions: Versions, *, turns: Turns, clock_ms: Callable[[], int]) -> None:
        self._versions = versions
        self._store = versions.store
        self._turns = turns
        self._clock_ms = clock_ms

    async def list_views(self, namespace: Namespace, *, after: str, limit: int | None) -> list[ViewId]:
        """Return one page of a namespace's views.

        Raises: NoSuchNamespace.
        """
        return await self._store.list_views(namespace, after=after, limit=limit)

    async def locate(self, view: ViewId) -> Pointer:
        """Return where a view's current metadata is, without reading it.

        Raises: NoSuchView; FileMissing if files are to be verified.
        """
        return await self._versions.locate(view)

    async def load(self, view: ViewId) -> StoredMetadata:
        """Return a view's metadata.

        Raises: NoSuchView, FileMissing, StorageError.
        """
        return await self._versions.files.load(await self.locate(view))

    async def recall(self, view: ViewId, pointer: Pointer) -> StoredMetadata:
        """Return what a view was once, or what it is now if that version's file has been deleted since.

        Raises: NoSuchView, FileMissing, StorageError.
        """
        return await self._versions.recall(view, pointer)

    async def create(self, view: ViewId, request: CreateView) -> StoredMetadata:
        """Create a view.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed; CommitStateUnknown.
        """
        view_uuid = self._versions.new_uuid()
        default = await self._versions.default_location(view, view_uuid)
        location = request.location.rstrip("/") if request.location else default
        document = create_view_document(request, view_uuid=view_uuid, location=location, now_ms=self._clock_ms())
        self._versions.check_places(document)
        return await self._versions.insert(view, document)

    async def commit(self, view: ViewId, commit: ViewCommit) -> StoredMetadata:
        """Commit to a view. Cancelling leaves the outcome open.

        Raises: NoSuchView, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with self._turns.turn(view):
            for _ in range(COMMIT_ATTEMPTS):
                committed = await self._commit_once(view, commit)
                if committed is not None:
                    return committed
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {view}")

    async def _commit_once(self, view: ViewId, commit: ViewCommit) -> StoredMetadata | None:
        pointer = await self._store.load_pointer(view)
        if pointer is None:
            raise no_such_entry(view)
        base = await self._versions.files.load(pointer)
        check_view_requirements(commit.requirements, base.document)
        document = apply_view_updates(base.document, commit.updates, now_ms=self._clock_ms())
        if document is None:
            return await self._versions.keep(base)
        return await self._versions.replace(view, base, document)

    async def register(self, view: ViewId, location: str) -> StoredMetadata:
        """Make a view of a metadata file that exists.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, FileMissing, BadRequest, ValidationFailed.
        """
        self._versions.confinement.check(location)
        await self._store.load_namespace(view.namespace)
        stored = await self._versions.files.load_anew(location)
        self._versions.check_places(stored.document)
        await self._store.create_entry(view, stored.pointer)
        return stored

    async def rename(self, source: ViewId, destination: ViewId) -> None:
        """Give a view another name; its files stay where they are.

        Raises: NoSuchView, NoSuchNamespace, AlreadyExists.
        """
        await self._store.rename_entry(source, destination)

    async def drop(self, view: ViewId) -> None:
        """Forget a view; its metadata can be registered again.

        Raises: NoSuchView.
        """
        self._versions.files.forget(await self._store.drop_entry(view))


# --- catalog.namespaces -----------------------------------------------------------------------------------------------
#
# Operations on namespaces, one per method. Owns what crosses several store calls, which is little.


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
