"""The catalog's files on a local disk."""

from __future__ import annotations

from lakefeed.catalog.service.metadata_files import Files
from lakefeed.storage.local import LocalStore


class LocalFiles(Files):
    """Files on a local disk, for tests that need no settings and for those that change what a method does."""

    def __init__(self) -> None:
        super().__init__(LocalStore(), timeout_s=30.0)
