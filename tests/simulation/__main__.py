"""Run seeds: `python -m tests.simulation 42 --faults KILL,NETWORK` prints what happens; `--count 1000` searches."""

from __future__ import annotations

import logging
import time
from multiprocessing import Pool

import click

from tests.simulation.scenarios import SAFE, Fault
from tests.simulation.world import Run, describe, run_seed


@click.command()
@click.argument("seed", type=int)
@click.option(
    "--faults", default="", help="Exactly these faults; otherwise those that the seed draws of the safe ones."
)
@click.option("--count", default=1, help="Run so many seeds, from SEED on, and print those that fail.")
@click.option("--jobs", default=1, help="Processes that run seeds.")
@click.option("--log", "shows_log", is_flag=True, help="Print the log lines of the nodes too.")
def main(seed: int, faults: str, *, count: int, jobs: int, shows_log: bool) -> None:
    """Run one seed and print its trace, or search many."""
    if shows_log:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    else:
        logging.disable(logging.CRITICAL)
    named = tuple(Fault[name] for name in faults.split(",") if name)
    failed = _search(range(seed, seed + count), named, jobs) if count > 1 else _replay(seed, named)
    raise SystemExit(1 if failed else 0)


def _replay(seed: int, named: tuple[Fault, ...]) -> bool:
    run = run_seed(seed, () if named else SAFE, required=named, echo=click.echo)
    click.echo(f"faults: {', '.join(sorted(fault.name for fault in run.faults))}")
    click.echo(f"steps: {run.steps}, virtual seconds: {run.virtual_s:.1f}, commits: {run.commits}")
    for problem in run.problems:
        click.echo(f"problem: {problem}")
    return bool(run.problems)


def _search(seeds: range, named: tuple[Fault, ...], jobs: int) -> bool:
    started, failed = time.monotonic(), 0
    with Pool(jobs, initializer=logging.disable, initargs=(logging.CRITICAL,)) as pool:
        for problem in pool.imap_unordered(_Search(named), seeds, chunksize=4):
            if problem is not None:
                failed += 1
                click.echo(problem)
    took_s = time.monotonic() - started
    click.echo(f"seeds: {len(seeds)}, failed: {failed}, seeds a minute: {60 * len(seeds) / took_s:.0f}")
    return failed > 0


class _Search:
    """Run one seed in another process."""

    def __init__(self, named: tuple[Fault, ...]) -> None:
        self._named = named

    def __call__(self, seed: int) -> str | None:
        run: Run = run_seed(seed, () if self._named else SAFE, required=self._named)
        return describe(run) if run.problems else None


if __name__ == "__main__":
    main()
