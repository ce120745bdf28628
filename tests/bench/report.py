"""The benchmark's figures, and how they are shown and kept."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from tests.bench.client import Outcome
from tests.bench.commits import CommitFigures
from tests.bench.server_readings import Reading

RESULTS_DIRECTORY = Path("bench-results")
_PACKAGES = ("lakefeed", "websockets", "aiohttp", "orjson", "msgspec", "pyarrow", "numpy", "fastavro")
_MILLION = 1_000_000
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One measured run."""

    changes: int
    seconds_until_acked: float
    seconds_until_committed: float
    committed_changes_per_s: float
    acked_changes_per_s: float
    offered_changes_per_s: float | None
    ack_p50_ms: float
    ack_p99_ms: float
    ack_max_ms: float
    server_cpu_s_per_million: float
    client_cpu_s_per_million: float
    commits: int
    commit_mean_ms: float
    flush_mean_ms: float
    slow_groups: int
    json_bytes_per_change: float
    log_bytes_per_change: float
    parquet_bytes_per_change: float
    server_peak_rss_mib: float
    machine_taken_by_others: float
    build_us_per_change: float


def figures_of(outcome: Outcome, server: Reading, *, offered_changes_per_s: float | None, peak_bytes: int) -> Figures:
    """Compute a run's figures.

    Raises: AssertionError if the server did not commit exactly what the client sent.
    """
    totals = server.totals
    committed = totals["lakefeed_writer_committed_changes_total"]
    assert committed == outcome.changes, f"committed {committed:.0f} of {outcome.changes} changes"
    ranked_ms = [seconds * 1_000 for seconds in sorted(outcome.ack_latencies_s)]
    percentiles = quantiles(ranked_ms, n=100, method="inclusive") if len(ranked_ms) > 1 else ranked_ms * 99
    millions = outcome.changes / _MILLION
    return Figures(
        changes=outcome.changes,
        seconds_until_acked=outcome.acked_after_s,
        seconds_until_committed=outcome.committed_after_s,
        committed_changes_per_s=outcome.changes / outcome.committed_after_s,
        acked_changes_per_s=outcome.changes / outcome.acked_after_s,
        offered_changes_per_s=offered_changes_per_s,
        ack_p50_ms=percentiles[49],
        ack_p99_ms=percentiles[98],
        ack_max_ms=ranked_ms[-1],
        server_cpu_s_per_million=server.cpu_s / millions,
        client_cpu_s_per_million=outcome.client_cpu_s / millions,
        commits=int(totals["lakefeed_writer_commit_seconds_count"]),
        commit_mean_ms=_mean_ms(totals, "lakefeed_writer_commit_seconds"),
        flush_mean_ms=_mean_ms(totals, "lakefeed_writer_flush_seconds"),
        slow_groups=int(totals.get("lakefeed_writer_slow_path_groups_total", 0)),
        json_bytes_per_change=outcome.sent_bytes / outcome.changes,
        log_bytes_per_change=totals["lakefeed_ingest_durable_bytes_total"] / outcome.changes,
        parquet_bytes_per_change=totals["lakefeed_writer_committed_bytes_total"] / outcome.changes,
        server_peak_rss_mib=peak_bytes / _MIB,
        machine_taken_by_others=_taken_by_others(outcome, server),
        build_us_per_change=outcome.build_cpu_s / outcome.changes * _MILLION,
    )


def _taken_by_others(outcome: Outcome, server: Reading) -> float:
    """Tell which share of the machine went neither to server nor client nor idling: to other processes or machines."""
    others_s = server.machine_s - server.machine_idle_s - server.cpu_s - outcome.client_cpu_s
    return max(0.0, others_s / server.machine_s)


def _mean_ms(totals, name: str) -> float:
    count = totals[f"{name}_count"]
    return totals[f"{name}_sum"] / count * 1_000 if count else 0.0


_ROWS = (
    ("changes committed per second", "committed_changes_per_s", ",.0f"),
    ("changes acked per second", "acked_changes_per_s", ",.0f"),
    ("seconds until all was committed", "seconds_until_committed", ".2f"),
    ("ack p50, ms", "ack_p50_ms", ".1f"),
    ("ack p99, ms", "ack_p99_ms", ".1f"),
    ("ack max, ms", "ack_max_ms", ".1f"),
    ("server CPU seconds per million changes", "server_cpu_s_per_million", ".2f"),
    ("client CPU seconds per million changes", "client_cpu_s_per_million", ".2f"),
    ("commits", "commits", "d"),
    ("commit mean, ms", "commit_mean_ms", ".1f"),
    ("flush mean, ms (Parquet and commit)", "flush_mean_ms", ".0f"),
    ("groups on the exact slow path", "slow_groups", "d"),
    ("JSON bytes per change", "json_bytes_per_change", ".0f"),
    ("log bytes per change, record headers aside", "log_bytes_per_change", ".0f"),
    ("Parquet bytes per change", "parquet_bytes_per_change", ".0f"),
    ("server peak memory, MiB", "server_peak_rss_mib", ".0f"),
    ("machine taken by others meanwhile", "machine_taken_by_others", ".0%"),
    ("building frames, us per change (speed of one core)", "build_us_per_change", ".2f"),
)


def print_figures(console: Console, runs: Sequence[tuple[str, Figures]]) -> None:
    """Show the runs side by side."""
    table = Table("", *(name for name, _ in runs))
    for column in table.columns[1:]:
        column.justify = "right"
    for label, name, form in _ROWS:
        table.add_row(label, *(format(getattr(figures, name), form) for _, figures in runs))
    console.print(table)


def save_results(
    runs: Sequence[tuple[str, Figures]],
    *,
    options: dict[str, object],
    machine: dict[str, object],
    commits: CommitFigures | None = None,
) -> Path:
    """Write the figures with the facts of the machine that they belong to."""
    now = datetime.now(UTC)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "command": "python -m tests.bench " + " ".join(sys.argv[1:]),
        "options": options,
        "machine": machine,
        "runs": {name: asdict(figures) for name, figures in runs},
        "commits": asdict(commits) if commits else None,
    }
    RESULTS_DIRECTORY.mkdir(exist_ok=True)
    path = RESULTS_DIRECTORY / f"{now:%Y%m%dT%H%M%SZ}.json"
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return path


def machine_facts() -> dict[str, object]:
    """Tell what the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "git_revision": _git("describe", "--always", "--dirty"),
        "load_average_before": psutil.getloadavg()[0],
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
