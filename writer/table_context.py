"""What all tables' writers share: the catalog, the store, the threads, the settings. Owns nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from writer.changes import TableName
from writer.committer import Committer
from writer.config import WriterConfig
from writer.metrics import WriterMetrics
from writer.storage import ObjectStore
from writer.table_settings import TableSections, TableSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TableContext:
    """What all table writers share."""

    node: str
    config: WriterConfig
    committer: Committer
    store: ObjectStore
    decoders: Executor
    encoders: Executor
    metrics: WriterMetrics
    clock: Callable[[], float]
    tables: TableSections = field(default_factory=TableSections)

    @property
    def commits_together(self) -> bool:
        """Tell whether tables of one source transaction are committed together: asked for, and the catalog can."""
        return self.config.transactions and self.committer.has_transactions

    def settings_for(self, name: TableName) -> TableSettings:
        """Give what holds for one table."""
        return self.tables.settings_for(str(name), self.config)
