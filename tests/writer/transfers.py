"""Transfers of a bank: a transaction changes `accounts` and `ledger`, and no reader may see one without the other.

Transfer n is change 10n of the account and change 10n + 1 of the ledger, so the tables' own marks tell which they have.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import orjson

from lakefeed.contract.changes import SourceId
from lakefeed.contract.progress import PROGRESS_PROPERTY, progress_from_text
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from tests.writer.conftest import Lake
from tests.writer.feeding import Running

BANK = SourceId("bank")
ACCOUNTS, LEDGER = "default.accounts", "default.ledger"


def sequence_of(transfer: int, part: int) -> int:
    return 10 * transfer + part


def event(table: str, sequence: int, row: dict[str, Any] | None = None) -> dict[str, Any]:
    transfer = sequence // 10
    return {
        "sequence": sequence,
        "operation": "INSERT",
        "table": table,
        "rowId": str(transfer),
        "after": row or {"transfer": transfer, "amount": transfer % 7 + 1},
    }


async def log_batch(
    running: Running, *events: dict[str, Any], open_transaction: str = "", source: str = BANK, epoch: int = 0
) -> None:
    """Log one batch, as the intake would."""
    frame = Frame(
        source=SourceId(source),
        epoch=epoch,
        after_sequence=-1,
        last_sequence=events[-1]["sequence"],
        received_at_us=1_794_800_000_000_000,
        encoding=Encoding.JSON_BATCH,
        body=orjson.dumps({"type": "cdc_batch", "events": events}),
        open_transaction=open_transaction,
    )
    await running.log.append([encode_frame(frame)], head=lambda: b"{}")


async def log_transfer(running: Running, transfer: int, *, batches: int = 1) -> None:
    """Log a transfer, in one batch or in two; the first of two leaves it open."""
    both = [event("accounts", sequence_of(transfer, 0)), event("ledger", sequence_of(transfer, 1))]
    if batches == 1:
        await log_batch(running, *both)
        return
    await log_batch(running, both[0], open_transaction=f"t{transfer}")
    await log_batch(running, both[1])


def read_transfers(lake: Lake, table: str) -> list[int]:
    """List the transfers in a table, as often as they are there."""
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        if not catalog.table_exists(table):
            return []
        return sorted(catalog.load_table(table).scan().to_arrow()["transfer"].to_pylist())


class Reader:
    """Looks at both tables again and again. What it sees in one, it must see in the other a moment later."""

    def __init__(self, lake: Lake) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self._lake = lake
        self._ends = threading.Event()

    def run(self) -> None:
        with contextlib.closing(self._lake.open_pyiceberg()) as catalog:
            while not self._ends.is_set():
                self.seen.append(tuple(_newest(catalog, table) for table in (ACCOUNTS, LEDGER, ACCOUNTS)))
                time.sleep(0.001)

    def end(self) -> None:
        self._ends.set()

    def torn(self) -> list[tuple[int, int, int]]:
        """List the looks that saw a transfer in one table and not, later, in the other."""
        return [(first, ledger, again) for first, ledger, again in self.seen if not first <= ledger <= again]


@contextlib.contextmanager
def reading(lake: Lake) -> Iterator[Reader]:
    reader = Reader(lake)
    thread = threading.Thread(target=reader.run, name="reader")
    thread.start()
    try:
        yield reader
    finally:
        reader.end()
        thread.join()


def _newest(catalog, table: str) -> int:
    """Tell the last transfer that a table's newest snapshot has."""
    if not catalog.table_exists(table):
        return 0
    progress = progress_from_text(catalog.load_table(table).properties.get(PROGRESS_PROPERTY))
    return progress.sources[BANK].sequence // 10 if BANK in progress.sources else 0
