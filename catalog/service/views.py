"""Operations on views: create, load, commit, register, rename, drop. Their files are never deleted."""

from __future__ import annotations

from collections.abc import Callable

from lakefeed.aio import KeyedLocks
from lakefeed.catalog.errors import CommitFailed
from lakefeed.catalog.metadata.views import (
    CreateView,
    apply_view_updates,
    check_view_requirements,
    create_view_document,
)
from lakefeed.catalog.names import Namespace, Pointer, ViewId
from lakefeed.catalog.service.metadata_cache import StoredMetadata
from lakefeed.catalog.service.versions import COMMIT_ATTEMPTS, Commit, VersionChange, Versions


class Views:
    """The views of the warehouse."""

    def __init__(self, versions: Versions, *, commit_queues: KeyedLocks, clock_ms: Callable[[], int]) -> None:
        self._versions = versions
        self._store = versions.store
        self._commit_queues = commit_queues
        self._clock_ms = clock_ms

    async def list_views(self, namespace: Namespace, *, after: str, limit: int | None) -> list[ViewId]:
        """Return one page of a namespace's views.

        Raises: NoSuchNamespace.
        """
        return await self._store.list_entries(ViewId, namespace, after=after, limit=limit)

    async def locate(self, view: ViewId) -> Pointer:
        """Return the pointer to a view's current metadata, without reading it.

        Raises: NoSuchView; FileMissing if files are verified.
        """
        return await self._versions.locate(view)

    async def load(self, view: ViewId) -> StoredMetadata:
        """Return a view's metadata.

        Raises: NoSuchView, FileMissing, StorageError.
        """
        return await self._versions.files.load(await self.locate(view))

    async def load_recorded(self, view: ViewId, pointer: Pointer) -> StoredMetadata:
        """Return the version of a recorded outcome, or the current one if that file is gone or was overwritten.

        Raises: NoSuchView, FileMissing, StorageError.
        """
        return await self._versions.load_recorded(view, pointer)

    async def create(self, view: ViewId, request: CreateView) -> StoredMetadata:
        """Create a view.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, ValidationFailed; CommitStateUnknown.
        """
        view_uuid = self._versions.new_uuid()
        location = await self._versions.new_location(view, view_uuid, requested=request.location)
        document = create_view_document(request, view_uuid=view_uuid, location=location, now_ms=self._clock_ms())
        self._versions.check_locations(document)
        return await self._versions.insert(view, document)

    async def commit(self, view: ViewId, commit: Commit) -> StoredMetadata:
        """Commit to a view. The outcome of a cancelled commit is unknown.

        Raises: NoSuchView, CommitFailed, ValidationFailed, LocationForbidden, TooManyWaiting; CommitStateUnknown.
        """
        async with self._commit_queues.hold(view):
            for _ in range(COMMIT_ATTEMPTS):
                committed = await self._versions.apply(await self._plan(view, commit))
                if committed is not None:
                    return committed
        raise CommitFailed(f"Commit lost the race {COMMIT_ATTEMPTS} times, try again: {view}")

    async def _plan(self, view: ViewId, commit: Commit) -> VersionChange:
        """Check the requirements of a commit and apply its updates; store nothing."""
        base = await self._versions.load_current(view)
        check_view_requirements(commit.requirements, base.document)
        document = apply_view_updates(base.document, commit.updates, now_ms=self._clock_ms())
        return VersionChange(view, base, document)

    async def register(self, view: ViewId, location: str) -> StoredMetadata:
        """Create a view from an existing metadata file.

        Raises: NoSuchNamespace, AlreadyExists, LocationForbidden, FileMissing, BadRequest, ValidationFailed.
        """
        self._versions.confinement.check(location)
        await self._store.load_namespace(view.namespace)
        stored = await self._versions.files.load_for_register(location)
        self._versions.check_locations(stored.document)
        await self._store.create_entry(view, stored.pointer)
        return stored

    async def rename(self, source: ViewId, destination: ViewId) -> None:
        """Rename a view; its files stay where they are.

        Raises: NoSuchView, NoSuchNamespace, AlreadyExists.
        """
        await self._store.rename_entry(source, destination)

    async def drop(self, view: ViewId) -> None:
        """Drop a view; its metadata can be registered again.

        Raises: NoSuchView.
        """
        self._versions.files.forget(await self._store.drop_entry(view))
