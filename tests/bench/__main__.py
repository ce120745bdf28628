"""Measures a Lakefeed server and its client on this machine: how many changes a second until they are committed.

Two runs against one server: as fast as a window of unacked frames lets the client go, then at a fixed offered load,
where ack times mean something. A first small push makes the tables, so that neither run measures that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench.client import GO, READY, Outcome, Phase, run_client
from tests.bench.commits import measure_commits, print_commits
from tests.bench.report import Figures, figures_of, machine_facts, print_figures, save_results
from tests.bench.server_readings import PeakMemory, read_server
from tests.bench.workload import ENCODINGS, Stream
from tests.service_process import ServiceProcess, service_process

WARM_UP_FRAMES = 2
LOOK_INTERVAL_S = 0.1
LOG_TAIL_LINES = 40
LAST_WORDS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run."""

    changes: int
    frame: int
    connections: int
    tables: int
    window: int
    rate: int
    rate_seconds: float
    seed: int
    encoding: str


class _Streams:
    """Hands out each connection's next changes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._next_sequence = 0
        self._next_number = 0

    def take(self, changes: int) -> list[Stream]:
        options = self._options
        share = max(1, changes // options.connections)
        streams = [
            Stream(
                source=f"bench-{index}",
                table=f"bench_{index % options.tables}",
                first_sequence=self._next_sequence,
                first_number=self._next_number,
                changes=share,
                frame_changes=options.frame,
                seed=options.seed,
                encoding=options.encoding,
            )
            for index in range(options.connections)
        ]
        self._next_sequence += share
        self._next_number += -(-share // options.frame)
        return streams


@click.command(help=__doc__)
@click.option("--changes", default=1_500_000, show_default=True, help="Changes of the saturated run.")
@click.option("--frame", default=1_000, show_default=True, help="Changes in one frame.")
@click.option("--connections", default=2, show_default=True, help="Connections, each a source of its own.")
@click.option("--tables", default=1, show_default=True, help="Tables that the connections share between them.")
@click.option("--window", default=16, show_default=True, help="Unacked frames per connection.")
@click.option(
    "--rate", default=50_000, show_default=True, help="Offered changes per second in the second run; 0: none."
)
@click.option("--rate-seconds", default=6.0, show_default=True, help="Length of the second run.")
@click.option("--seed", default=1, show_default=True, help="Seed of the rows.")
@click.option("--encoding", type=click.Choice(ENCODINGS), default="json", show_default=True, help="Of the frames.")
@click.option(
    "--commits", default=2_000, show_default=True, help="Commits to the old table of the commit part; 0: none."
)
@click.option("--quick", is_flag=True, help="A tenth of everything: a look, not a measurement.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON only.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting of the server.")
def main(*, quick: bool, as_json: bool, settings: tuple[str, ...], commits: int, **given) -> None:
    """Run the benchmark."""
    if quick:
        commits //= 10
        given |= {"changes": given["changes"] // 10, "rate_seconds": given["rate_seconds"] / 3}
    options = Options(**given)
    console = Console(stderr=as_json)
    server_settings = dict(setting.split("=", 1) for setting in settings)
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="lakefeed-bench-") as directory:
        runs = _measure(options, Path(directory), server_settings, console)
    commit_figures = measure_commits(commits) if commits else None
    path = save_results(runs, options=given | {"settings": server_settings}, machine=machine, commits=commit_figures)
    if as_json:
        click.echo(path.read_text(encoding="utf-8"))
    else:
        print_figures(console, runs)
        if commit_figures is not None:
            print_commits(console, commit_figures)
    console.print(f"written to {path}", highlight=False)


def _measure(
    options: Options, directory: Path, settings: dict[str, str], console: Console
) -> list[tuple[str, Figures]]:
    streams = _Streams(options)
    window = options.window
    phases = [
        ("warm-up", Phase(streams=streams.take(WARM_UP_FRAMES * options.frame), window_frames=window)),
        ("saturated", Phase(streams=streams.take(options.changes), window_frames=window)),
    ]
    if options.rate:
        at_rate = streams.take(int(options.rate * options.rate_seconds))
        phases.append((f"{options.rate:,}/s", Phase(streams=at_rate, window_frames=window, changes_per_s=options.rate)))
    with service_process(directory, settings) as service:
        service.start_installed()
        try:
            runs = _run_phases(service, phases, console)
        except EOFError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait_for_exit(LAST_WORDS_TIMEOUT_S)
            tail = "\n".join(service.log_text().splitlines()[-LOG_TAIL_LINES:])
            raise click.ClickException(f"the client ended early; the server's last words:\n{tail}") from error
        service.stop()
    return runs[1:]


def _run_phases(
    service: ServiceProcess, phases: Sequence[tuple[str, Phase]], console: Console
) -> list[tuple[str, Figures]]:
    context = multiprocessing.get_context("spawn")
    pipe, client_end = context.Pipe()
    client = context.Process(target=run_client, args=(service.ws_url, [phase for _, phase in phases], client_end))
    client.start()
    client_end.close()  # so that a client that dies is an end of file here, not a long wait
    try:
        with _progress(console) as bar:
            return [(name, _run_phase(service, name, phase, pipe, bar)) for name, phase in phases]
    finally:
        client.join(timeout=10)
        if client.is_alive():
            client.kill()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _run_phase(service: ServiceProcess, name: str, phase: Phase, pipe: Connection, bar: Progress) -> Figures:
    changes = sum(stream.changes for stream in phase.streams)
    building = bar.add_task(f"{name}: building frames", total=changes)
    while (built := pipe.recv()) != READY:
        bar.advance(building, built)
    before = read_server(service)
    memory = PeakMemory(service.pid)
    acking = bar.add_task(f"{name}: acked", total=changes)
    pipe.send(GO)
    while not isinstance(news := _next_news(pipe, memory), Outcome):
        bar.advance(acking, news)
    used = read_server(service).since(before)
    return figures_of(news, used, offered_changes_per_s=phase.changes_per_s, peak_bytes=memory.bytes)


def _next_news(pipe: Connection, memory: PeakMemory) -> int | Outcome:
    while not pipe.poll(LOOK_INTERVAL_S):
        memory.look()
    memory.look()
    return pipe.recv()


if __name__ == "__main__":
    main()
