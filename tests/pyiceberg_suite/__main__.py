"""Runs PyIceberg's own integration tests against `lakefeed catalog serve` on S3: `make pyiceberg-suite`.

The tests come with the source distribution of the installed PyIceberg, from PyPI into `.pyiceberg-suite/` at the first
run; later runs need no network. Left out, each with its reason, are those of other catalogs and those that need Spark.

Exit status: 0 all passed, 1 a test failed, 3 the tests cannot be had here (no network).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import click
from pyiceberg.catalog import load_catalog

from tests.catalog_process import catalog_processes
from tests.postgres_server import postgres_server
from tests.pyiceberg_suite import source
from tests.rck.summary import Result, read_results, show_failures
from tests.s3_server import S3Server, run_s3_server

SUITE_TIMEOUT_S = 900
CANNOT_RUN = 3


@click.command(help=__doc__)
@click.option("--store", type=click.Choice(["sqlite", "postgres"]), default="sqlite", show_default=True)
@click.option("--only", "pattern", default="", help="Only tests that this expression of pytest -k selects.")
def main(store: str, pattern: str) -> None:
    if not source.fetch():
        click.echo("the tests cannot be had here: they need PyPI")
        sys.exit(CANNOT_RUN)
    with postgres_server() if store == "postgres" else nullcontext(lambda: "") as make_database:
        _run_suite(pattern, database=make_database())
    results = read_results(source.RUN)
    for line in (*show_failures(results), *_counts(results)):
        click.echo(line)
    outcomes = Counter(result.outcome for result in results)
    sys.exit(0 if outcomes["passed"] and not outcomes["failed"] else 1)


def _run_suite(pattern: str, *, database: str) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="lakefeed-pyiceberg-suite-") as name,
        run_s3_server(Path(name)) as files,
    ):
        settings = files.new_warehouse()
        with catalog_processes(Path(name), database=database, settings=settings) as (catalog,):
            catalog.start()
            _create_namespace(catalog.url)
            _unpack(catalog.url, files, warehouse=settings["storage.warehouse"])
            _run_tests(catalog.url, files, pattern=pattern)
            catalog.stop()


def _create_namespace(url: str) -> None:
    """Create the one namespace that most tests take for granted."""
    with closing(load_catalog("lakefeed", type="rest", uri=url)) as catalog:
        catalog.create_namespace("default")


def _unpack(url: str, files: S3Server, *, warehouse: str) -> None:
    source.unpack(
        {
            "http://localhost:8181": url,
            "http://localhost:9000": files.endpoint,
            "s3://warehouse": warehouse,
            '"s3.access-key-id": "admin"': f'"s3.access-key-id": "{files.access_key_id}"',
            '"s3.secret-access-key": "password"': f'"s3.secret-access-key": "{files.secret_access_key}"',
            # Tests of names with slashes are skipped unless the catalog is said to allow them.
            "load_catalog(test_catalog_name)": 'load_catalog(test_catalog_name, supports_slash_in_identifier="true")',
        }
    )


def _run_tests(url: str, files: S3Server, *, pattern: str) -> None:
    command = [
        *(sys.executable, "-m", "pytest", "tests/integration", "-m", "integration", "-p", "left_out"),
        *("-p", "no:asyncio", "-p", "no:cacheprovider", f"--junitxml={source.RUN / 'TEST-pyiceberg.xml'}"),
        *(["-k", pattern] if pattern else []),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(source.PACKAGES), str(Path(__file__).parent)]),
        "PYICEBERG_TEST_CATALOG": "lakefeed",
        "PYICEBERG_CATALOG__LAKEFEED__TYPE": "rest",
        "PYICEBERG_CATALOG__LAKEFEED__URI": url,
        # Some tests give their catalog an address and nothing else.
        "AWS_ACCESS_KEY_ID": files.access_key_id,
        "AWS_SECRET_ACCESS_KEY": files.secret_access_key,
    }
    with (source.RUN / "console.txt").open("wb") as log:
        # A failed test is told by the report, and that nothing ran by its absence.
        subprocess.run(
            command, cwd=source.RUN, env=environment, stdout=log, stderr=log, timeout=SUITE_TIMEOUT_S, check=False
        )


def _counts(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line per module and outcome, then one per reason to leave tests out."""
    for module in sorted({result.kit_class for result in results}):
        counts = Counter(result.outcome for result in results if result.kit_class == module)
        yield f"{module}: {_show(counts)}"
    for reason, count in Counter(result.message for result in results if result.outcome == "skipped").most_common():
        yield f"left out: {count} {reason}"
    yield f"all: {_show(Counter(result.outcome for result in results))}"


def _show(counts: Counter[str]) -> str:
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} left out"


if __name__ == "__main__":
    main()
