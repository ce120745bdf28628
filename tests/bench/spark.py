"""Measures mirrors on this machine: the time of a merge by mode and size, reading a mirror, and following a live table.

make bench-spark                            # about half an hour
make bench-spark ARGS=--quick               # a look, not a measurement
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from pipeline.config import CatalogConfig, JobKind, SessionConfig
from pipeline.mirrors.settings import MirrorMode
from pipeline.session import build_session, stop_session
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
    quick: bool,
) -> None:
    """Run the benchmark."""
    share = _QUICK_SHARE if quick else 1
    sizes = [int(each) // share for each in rows.split(",") if each]
    chosen = [MirrorMode(each) for each in modes.split(",") if each]
    console = Console()
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="lakefeed-bench-") as text, console.status("starting") as status:
        directory = Path(text)
        merged: list[MergeFigures] = []
        live: LiveFigures | None = None
        with service_process(directory, {}) as service:
            service.start()
            if rate:
                live = measure_live(
                    service,
                    rate=rate,
                    seconds=seconds / share if quick else seconds,
                    keys=keys // share,
                    interval_s=interval,
                    directory=directory,
                    tell=status.update,
                )
            if chosen:
                merged = _merges(service, sizes, chosen, changes // share, merges, directory, status.update)
            service.stop()
    _print(console, merged, live)
    RESULTS_DIRECTORY.mkdir(exist_ok=True)
    path = RESULTS_DIRECTORY / f"spark-{datetime.now(UTC):%Y%m%dT%H%M%S}.json"
    results = {"machine": machine_facts(), "merges": [asdict(each) for each in merged], "live": live and asdict(live)}
    path.write_text(json.dumps(results, indent=2), encoding="utf-8")
    console.print(f"written to {path}", highlight=False)


def _merges(
    service: ServiceProcess, sizes: list[int], modes: list[MirrorMode], changes: int, merges: int, directory: Path, tell
) -> list[MergeFigures]:
    spark = build_session(
        SessionConfig(
            master="local[2]",
            job_kind=JobKind.LONG,
            driver_memory="3g",
            catalog=CatalogConfig(uri=service.http_url),
            extra_conf={"spark.log.level": "ERROR"},
        )
    )
    try:
        spark.sql("CREATE NAMESPACE IF NOT EXISTS default")
        return [
            figures
            for rows in sizes
            for figures in measure_merges(
                spark, modes=modes, rows=rows, changes=changes, merges=merges, directory=directory, tell=tell
            )
        ]
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
