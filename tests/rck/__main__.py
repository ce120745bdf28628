"""Runs Iceberg's REST compatibility kit against `lakefeed serve`: `make rck`, `make rck ARGS="--setting refs"`.

The kit is Iceberg's own suite of catalog tests (`RESTCompatibilityKitSuite`) with its Java client. Its jars come from
Maven Central into `.rck/` at the first run, 81 MB; later runs need no network. It leaves namespaces and files behind,
so every setting gets a fresh catalog on an empty warehouse.

A run of the whole kit passes only with the expected number of tests: one that ended early, or lost tests on the way,
is no pass, however many of them did.

Exit status: 0 all passed, 1 a test failed or is missing, 3 the kit cannot be had here (no Maven, Java or network).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import click

from tests.postgres_server import postgres_server
from tests.rck.summary import find_problem, read_results, show_counts, show_failures
from tests.service_process import service_process

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".rck"
POM = Path(__file__).with_name("pom.xml")

DOWNLOAD_TIMEOUT_S = 240
KIT_TIMEOUT_S = 300
CANNOT_RUN = 3

# Properties of the Java client that send the same tests down other paths of the server.
SETTINGS = {
    "plain": (),
    "paged": ("-Drest-page-size=1",),
    "refs": ("-Dsnapshot-loading-mode=refs",),
    "planned": ("-Dscan-planning-mode=server",),
}

# The Java client reports no metrics of scans that a server plans, whatever the server does.
CANNOT_PASS = {"planned": "testCatalogWithCustomMetricsReporter"}

# What the whole kit gives, whatever the setting; the ten are skipped by every server.
EXPECTED = Counter(passed=147, skipped=10)

# What the kit may ask of this server; it would leave out the tests of what is not promised.
PROMISES = (
    "-Drck.local=false",
    "-Drck.requires-namespace-create=true",
    "-Drck.supports-serverside-retry=true",
    "-Drck.supports-names-with-dot=true",
)

# The kit places tables outside every warehouse, and asks for the warehouse by this name.
SERVER_SETTINGS = {"catalog.allow_any_location": "true", "catalog.warehouse_name": "rck_warehouse"}


@click.command(help=__doc__)
@click.option("--setting", "names", multiple=True, type=click.Choice(tuple(SETTINGS)), help="Only these.")
@click.option("--store", type=click.Choice(["sqlite", "postgres"]), default="sqlite", show_default=True)
@click.option("--only", "pattern", default="", help="Only tests whose class.method matches this.")
def main(names: tuple[str, ...], store: str, pattern: str) -> None:
    java = shutil.which("java")
    if java is None or not _fetch_jars():
        click.echo("the kit cannot be had here: it needs Java 17, Maven and Maven Central")
        sys.exit(CANNOT_RUN)
    with postgres_server() if store == "postgres" else nullcontext(lambda: "") as make_database:
        failed = [name for name in names or SETTINGS if not _run_setting(java, name, pattern, database=make_database())]
    sys.exit(1 if failed else 0)


def _fetch_jars() -> bool:
    # The marker is written last, so that an interrupted download is done again, as is one for an older list.
    marker = TARGET / "jars.resolved"
    if marker.exists() and marker.stat().st_mtime > POM.stat().st_mtime:
        return True
    maven = shutil.which("mvn")
    if maven is None:
        return False
    shutil.rmtree(TARGET / "jars", ignore_errors=True)
    TARGET.mkdir(exist_ok=True)
    command = [
        maven,
        "-q",
        "-B",
        "-f",
        str(POM),
        "dependency:copy-dependencies",
        f"-DoutputDirectory={TARGET / 'jars'}",
    ]
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    marker.touch()
    return True


def expected_counts(name: str) -> Counter[str]:
    """Tell what a run of the whole kit gives in a setting."""
    return EXPECTED - Counter(passed=int(name in CANNOT_PASS))


def _run_setting(java: str, name: str, pattern: str, *, database: str) -> bool:
    reports = TARGET / name
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(prefix="lakefeed-rck-") as directory,
        service_process(Path(directory), {**SERVER_SETTINGS, "catalog.database": database}) as service,
    ):
        service.start()
        exit_status = _run_kit(java, service.http_url, name, pattern=pattern, reports=reports)
        service.stop()
    results = read_results(reports)
    for line in show_failures(results):
        click.echo(line)
    counts = Counter(result.outcome for result in results)
    click.echo(f"{name}: {show_counts(counts)}")
    problem = find_problem(counts, exit_status, expected=None if pattern else expected_counts(name))
    if problem:
        click.echo(f"{name}: {problem}: log={reports / 'client.log'}")
    return problem is None


def _run_kit(java: str, url: str, name: str, *, pattern: str, reports: Path) -> int:
    command = [
        *(java, *PROMISES, f"-Duri={url}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", *SETTINGS[name]),
        *("-cp", f"{TARGET / 'jars'}/*", "org.junit.platform.console.ConsoleLauncher", "execute"),
        *("--select-class=org.apache.iceberg.rest.RESTCompatibilityKitSuite", "--exclude-engine=junit-vintage"),
        *([f"--include-methodname=.*({pattern}).*"] if pattern else []),
        *([f"--exclude-methodname=.*{CANNOT_PASS[name]}.*"] if name in CANNOT_PASS else []),
        *("--disable-banner", "--disable-ansi-colors", "--details=tree", f"--reports-dir={reports}"),
    ]
    with (reports / "console.txt").open("wb") as output, (reports / "client.log").open("wb") as log:
        # A failed test is told by the reports; the status also tells of a Java that ended before or after them.
        return subprocess.run(command, stdout=output, stderr=log, timeout=KIT_TIMEOUT_S, check=False).returncode


if __name__ == "__main__":
    main()
