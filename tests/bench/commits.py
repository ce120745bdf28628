"""How long a commit takes on a young table and on an old one, measured in turns, so that both meet the same machine.

Catalog and committer share one event loop, as they do in the service. The data file is written once: what is measured
is manifest, list, request, metadata file and pointer.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from rich.console import Console

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.contract.changes import Position, Span, TableName
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.state import TableState
from tests.writer.committing import SHOP, Bench

YOUNG_COMMITS = 20
ROUNDS = 5  # each with a young table of its own, which would not stay young otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFigures:
    """Medians of one commit, young and old; `old_commits` were made, `old_snapshots` are left of them."""

    young_commits: int
    young_ms: float
    old_commits: int
    old_snapshots: int
    old_metadata_files: int
    old_ms: float

    @property
    def ratio(self) -> float:
        """Tell how much longer a commit takes on the old table."""
        return self.old_ms / self.young_ms


@dataclass(slots=True)
class _Table:
    committer: Committer
    state: TableState
    flush: Flush
    commits: int = 0

    async def commit(self) -> float:
        """Commit once; the seconds it took. Expiry comes between commits, as in the service, and is not counted."""
        span = Span(Position(0, self.commits), Position(0, self.commits))
        flush = replace(self.flush, id=str(uuid.uuid4()), log_to=self.commits + 1, spans={SHOP: span})
        started = time.perf_counter()
        self.state = (await self.committer.commit(self.state, flush)).state
        seconds = time.perf_counter() - started
        self.state = await self.committer.maybe_expire(self.state)
        self.commits += 1
        return seconds


def measure_commits(commits: int) -> CommitFigures:
    """Commit so many times to one table, then compare it with young ones."""
    with tempfile.TemporaryDirectory(prefix="lakefeed-bench-") as directory:
        return asyncio.run(_measure(Path(directory), commits))


async def _measure(directory: Path, commits: int) -> CommitFigures:
    async with _open_bench(directory) as bench:
        old = await _make_table(bench, "old")
        for _ in range(commits):
            await old.commit()
        young_s, old_s = [], []
        for number in range(ROUNDS):
            young = await _make_table(bench, f"young_{number}")
            for _ in range(YOUNG_COMMITS):
                await young.commit()
            for _ in range(YOUNG_COMMITS):
                young_s.append(await young.commit())
                old_s.append(await old.commit())
        metadata = Path(old.state.location.removeprefix("file://")) / "metadata"
        return CommitFigures(
            young_commits=YOUNG_COMMITS,
            young_ms=statistics.median(young_s) * 1_000,
            old_commits=old.commits,
            old_snapshots=old.state.snapshot_count,
            old_metadata_files=len(list(metadata.iterdir())),
            old_ms=statistics.median(old_s) * 1_000,
        )


@contextlib.asynccontextmanager
async def _open_bench(directory: Path) -> AsyncIterator[Bench]:
    location = f"file://{directory}/warehouse"
    app = web.Application()
    app.add_subapp(
        "/v1", build_catalog(CatalogConfig(), Warehouse(StorageConfig(warehouse=location)), directory / "catalog.db")
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        async with open_store(StorageConfig(warehouse=location)) as store, open_catalog(url) as catalog:
            await catalog.load_config()
            yield Bench(None, store, None, Committer(catalog, store))
    finally:
        await runner.cleanup()


async def _make_table(bench: Bench, name: str) -> _Table:
    state = await bench.create(TableName(("default",), name))
    return _Table(bench.committer, state, await bench.make_flush(state, 1, 10))


def print_commits(console: Console, figures: CommitFigures) -> None:
    """Show the figures in one line."""
    console.print(
        f"one commit: {figures.young_ms:.1f} ms after {figures.young_commits} commits,"
        f" {figures.old_ms:.1f} ms after {figures.old_commits:,}"
        f" ({figures.old_snapshots} snapshots and {figures.old_metadata_files:,} metadata files left):"
        f" ratio {figures.ratio:.2f}",
        highlight=False,
    )
