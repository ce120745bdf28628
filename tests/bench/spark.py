"""Measures mirrors on this machine: the time of a merge by mode and size, reading a mirror, and following a live table.

make bench-spark                            # about half an hour
make bench-spark ARGS=--quick               # a look, not a measurement
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from lakefeed.pipeline.mirrors.settings import MirrorMode
from lakefeed.pipeline.spark.session import JobKind, SessionConfig, build_session, stop_session
from tests.bench.mirror_live import LiveFigures, measure_live
from tests.bench.mirror_merges import MergeFigures, measure_merges
from tests.bench.report import RESULTS_DIRECTORY, machine_facts
from tests.service_process import ServiceProcess, service_process

_QUICK_SHARE = 20


@click.command(help=__doc__)
@click.option("--rows", default="1000000,10000000", show_default=True, help="Sizes of mirrors, by commas.")
@click.option("--changes", default=100_000, show_default=True, help="Changes in a merge.")
@click.option("--merges", default=4, show_default=True, help="Merges per mode; the first is not counted.")
@click.option("--modes", default=",".join(mode.value for mode in MirrorMode), show_default=True)
@click.option("--rate", default=20_000, show_default=True, help="Changes a second of the live table; 0: none.")
@click.option("--seconds", default=180.0, show_default=True, help="Length of the live run.")
@click.option("--keys", default=1_000_000, show_default=True, help="Keys of the live table.")
@click.option("--interval", default=10.0, show_default=True, help="interval_s of the live mirror.")
@click.option("--driver-memory", default="3g", show_default=True, help="Heap of the Spark that merges.")
@click.option("--quick", is_flag=True, help="A twentieth of everything.")
def main(
    *,
    rows: str,
    changes: int,
    merges: int,
    modes: str,
    rate: int,
    seconds: float,
    keys: int,
    interval: float,
    driver_memory: str,
    quick: bool,
) -> None:
    """Run the benchmark."""
    share = _QUICK_SHARE if quick else 1
    sizes = [int(each) // share for each in rows.split(",") if each]
    chosen = [MirrorMode(each) for each in modes.split(",") if each]
    console = Console()
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    results = _Results()
    with tempfile.TemporaryDirectory(prefix="lakefeed-bench-") as text, console.status("starting") as status:
        directory = Path(text)
        with service_process(directory, {}) as service:
            service.start_installed()
            if rate:
                results.live = measure_live(
                    service,
                    rate=rate,
                    seconds=seconds / share if quick else seconds,
                    keys=keys // share,
                    interval_s=interval,
                    directory=directory,
                    tell=status.update,
                )
                results.keep()
            if chosen:
                sizing = {"changes": changes // share, "merges": merges, "driver_memory": driver_memory}
                for figures in _merges(service, sizes, chosen, directory=directory, tell=status.update, **sizing):
                    results.merged.append(figures)
                    results.keep()
            service.stop()
    _print(console, results.merged, results.live)
    console.print(f"written to {results.path}", highlight=False)


class _Results:
    """What was measured so far. It is kept after each part: the last ones may want more memory than there is."""

    def __init__(self) -> None:
        RESULTS_DIRECTORY.mkdir(exist_ok=True)
        self.path = RESULTS_DIRECTORY / f"spark-{datetime.now(UTC):%Y%m%dT%H%M%S}.json"
        self.live: LiveFigures | None = None
        self.merged: list[MergeFigures] = []
        self._machine = machine_facts()

    def keep(self) -> None:
        live = None if self.live is None else asdict(self.live)
        document = {"machine": self._machine, "merges": [asdict(each) for each in self.merged], "live": live}
        self.path.write_text(json.dumps(document, indent=2), encoding="utf-8")


def _merges(
    service: ServiceProcess,
    sizes: list[int],
    modes: list[MirrorMode],
    *,
    changes: int,
    merges: int,
    driver_memory: str,
    directory: Path,
    tell: Callable[[str], None],
) -> Iterator[MergeFigures]:
    spark = build_session(
        SessionConfig(
            master="local[2]",
            driver_memory=driver_memory,
            url=service.http_url,
            conf={"spark.log.level": "ERROR"},
        ),
        job_kind=JobKind.LONG,
    )
    try:
        spark.sql("CREATE NAMESPACE IF NOT EXISTS default")
        for rows in sizes:
            yield from measure_merges(
                spark, modes=modes, rows=rows, changes=changes, merges=merges, directory=directory, tell=tell
            )
    finally:
        stop_session(spark)


def _print(console: Console, merged: list[MergeFigures], live: LiveFigures | None) -> None:
    if live is not None:
        shown = Table("live", "", box=None)
        for name, value in asdict(live).items():
            shown.add_row(name, f"{value:,}")
        console.print(shown)
    if merged:
        shown = Table(box=None)
        for heading in asdict(merged[0]):
            shown.add_column(heading, justify="right")
        for each in merged:
            cells = asdict(each).values()
            shown.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in cells))
        console.print(shown)


if __name__ == "__main__":
    main()
