"""Operations on views, one per method: load, apply the core, add a version. Their files are never deleted here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from catalog.errors import CommitFailed
from catalog.fields import JsonObject
from catalog.metadata.views import CreateView, apply_view_updates, check_view_requirements, create_view_document
from catalog.metadata_files import StoredMetadata
from catalog.names import Namespace, ViewId
from catalog.pointers import Pointer
from catalog.store.protocol import no_such_entry
from catalog.tables import COMMIT_ATTEMPTS
from catalog.turns import Turns
from catalog.versions import Versions


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

        Raises: NoSuchView, FileMissing, StorageFailed.
        """
        return await self._versions.files.load(await self.locate(view))

    async def recall(self, view: ViewId, pointer: Pointer) -> StoredMetadata:
        """Return what a view was once, or what it is now if that version's file has been deleted since.

        Raises: NoSuchView, FileMissing, StorageFailed.
        """
        return await self._versions.recall(view, pointer)

    async def create(self, view: ViewId, request: CreateView) -> StoredMetadata:
        """Create a view.

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, ValidationFailed; CommitStateUnknown.
        """
        view_uuid = self._versions.new_uuid()
        default = await self._versions.default_location(view, view_uuid)
        location = request.location.rstrip("/") if request.location else default
        document = create_view_document(request, view_uuid=view_uuid, location=location, now_ms=self._clock_ms())
        self._versions.check_places(document)
        return await self._versions.insert(view, document)

    async def commit(self, view: ViewId, commit: ViewCommit) -> StoredMetadata:
        """Commit to a view. Cancelling leaves the outcome open.

        Raises: NoSuchView, CommitFailed, ValidationFailed, Forbidden, TooManyWaiting; CommitStateUnknown.
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

        Raises: NoSuchNamespace, AlreadyExists, Forbidden, FileMissing, BadRequest, ValidationFailed.
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
