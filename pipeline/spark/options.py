"""Options that all Spark commands share, and the session that they ask for. Owns both; settings.py reads the file.

    @click.command()
    @click.argument("table")
    @spark_options
    def maintain(table: str, **options: Any) -> None:
        with opened_session(options, job_kind=JobKind.SHORT) as spark:
            ...

An option wins over LAKEFEED_PIPELINE_SPARK_<NAME>, which wins over [pipeline.spark] in the file. Errors that a user can
act on end the command with one line. Click only: PySpark is imported when a session is opened.
"""

from __future__ import annotations

import functools
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakefeed.contract.errors import LakefeedError
from lakefeed.pipeline.errors import CatalogUnavailable, SparkFailed
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.session import (
    build_session,
    catalog_properties,
    hadoop_conf,
    load_s3_settings,
    stop_session,
)
from lakefeed.pipeline.spark.settings import CatalogConfig, JobKind, SessionConfig, SparkSettings
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.catalog_probe -------------------------------------------------------------------------------------------
#
# Whether the catalog answers, asked before Spark starts. Owns that one request.
#
# Spark takes seconds to start, and then says in pages of Java frames that nobody listens at an address.


_TIMEOUT_S = 10.0


def check_catalog_answers(catalog: CatalogConfig) -> None:
    """Check that an Iceberg REST catalog is at the address and takes the token.

    Raises: CatalogUnavailable.
    """
    request = urllib.request.Request(_config_url(catalog))  # noqa: S310 - CatalogConfig takes http and https only
    if catalog.token:
        request.add_header("Authorization", f"Bearer {catalog.token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            document = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(catalog, error.code) from error
    except ValueError as error:
        raise CatalogUnavailable(f"not an Iceberg REST catalog: url={catalog.uri}") from error
    except OSError as error:
        raise CatalogUnavailable(
            f"cannot reach the catalog, is `lakefeed serve` running? url={catalog.uri} error={error}"
        ) from error
    if not isinstance(document, dict) or "defaults" not in document:
        raise CatalogUnavailable(f"not an Iceberg REST catalog: url={catalog.uri}")


def _config_url(catalog: CatalogConfig) -> str:
    query = f"?{urllib.parse.urlencode({'warehouse': catalog.warehouse})}" if catalog.warehouse else ""
    return f"{catalog.uri}/v1/config{query}"


def _refused(catalog: CatalogConfig, status: int) -> CatalogUnavailable:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return CatalogUnavailable(f"the catalog refuses the token, give --token or LAKEFEED_TOKEN: url={catalog.uri}")
    if catalog.warehouse and status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        return CatalogUnavailable(f"the catalog has no such warehouse: url={catalog.uri} warehouse={catalog.warehouse}")
    return CatalogUnavailable(f"the catalog does not answer as one: url={catalog.uri} status={status}")


# --- pipeline.command_errors ------------------------------------------------------------------------------------------
#
# Errors as the pipeline's commands show them. Owns which of them a user can act on: those are one line.
#
# A wrong setting is a wrong use of the command (click's exit code 2), everything else that was foreseen is a failure
# (1).
# Spark's own errors come with pages of Java frames; their first lines say what is wrong.


@contextmanager
def readable_errors() -> Iterator[None]:
    """Show errors that a user can act on without a traceback."""
    try:
        yield
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    except LakefeedError as error:
        raise click.ClickException(str(error)) from error
    except Exception as error:
        if not is_spark_error(error):
            raise
        raise click.ClickException(f"Spark refused or failed: {message_of(error)}") from error


# --- pipeline.options -------------------------------------------------------------------------------------------------


# The same variable as the other commands of the command line have it.
CLIENT_TOKEN_VARIABLE = "LAKEFEED_TOKEN"  # noqa: S105 - the name of a variable, not what is in it
LOCAL_MASTER = "local[*]"

# spark-submit starts Python with the way to the JVM that it has started before.
_SUBMITTED_VARIABLE = "PYSPARK_GATEWAY_PORT"

_REMOTE = click.option("--remote", help="A Spark Connect server in place of a master: sc://host:15002")
_CLUSTER_OPTIONS = (
    click.option("--warehouse", help="Which of the catalog's warehouses  [its only one]"),
    click.option("--catalog-name", help="First part of a table's name in SQL  [lake]"),
    click.option("--master", help=f"Where Spark runs: local[2], spark://host:7077, yarn, k8s://...  [{LOCAL_MASTER}]"),
    _REMOTE,
    click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Further setting of Spark; can be repeated."),
    click.option("--packages", multiple=True, help="Maven coordinates to download, by commas; can be repeated."),
    click.option(
        "--jar", multiple=True, type=click.Path(), help="Jar for the class path, by its path; can be repeated."
    ),
)
_OPTIONS = (
    click.option("--url", help="Iceberg REST catalog, before /v1  [http://127.0.0.1:8181]"),
    click.option(
        "--token", envvar=CLIENT_TOKEN_VARIABLE, show_envvar=True, help="Bearer token, where the catalog asks for one."
    ),
    *_CLUSTER_OPTIONS,
    click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        help="Settings file, [pipeline.*] of it  [lakefeed.toml if it exists]",
    ),
)


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where the catalog and Spark are, and show foreseen errors in one line."""
    return _with_options(command, _OPTIONS)


def driver_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same to a command that needs a driver of its own, which Spark Connect has not."""
    return _with_options(command, [option for option in _OPTIONS if option is not _REMOTE])


def _with_options(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(command)
    def with_readable_errors(*args: Any, **kwargs: Any) -> Any:
        with readable_errors():
            return command(*args, **kwargs)

    decorated: Callable[..., Any] = with_readable_errors
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add those of the options that a command lacks which knows of catalogs and settings files, but not of Spark."""
    for option in reversed(_CLUSTER_OPTIONS):
        command = option(command)
    return command


def session_config(options: Mapping[str, Any], *, job_kind: JobKind, app_name: str = "lakefeed") -> SessionConfig:
    """Build a session's settings from a command's options; those of others among them are passed over.

    Raises: SettingsError.
    """
    settings = spark_settings(options)
    s3 = load_s3_settings(options.get("config_path"), os.environ)
    try:
        return _session_config(settings, s3, job_kind=job_kind, app_name=app_name)
    except ValueError as error:
        raise SettingsError(str(error)) from error


@contextmanager
def opened_session(
    options: Mapping[str, Any], *, job_kind: JobKind, app_name: str = "lakefeed"
) -> Iterator[SparkSession]:
    """Open a session on the catalog for as long as the block lasts.

    Raises: SettingsError, CatalogUnavailable, SparkUnavailable, SparkFailed for what Spark raises in the block.
    """
    config = session_config(options, job_kind=job_kind, app_name=app_name)
    if not config.remote and not config.is_submitted:
        # Where Spark is elsewhere, it may reach a catalog that this machine does not, or was told of another one.
        check_catalog_answers(config.catalog)
    spark = build_session(config)
    try:
        yield spark
    except Exception as error:
        if not is_spark_error(error):
            raise
        # Now: the words of a Java error are in the JVM, which is about to end.
        raise SparkFailed(message_of(error)) from error
    finally:
        stop_session(spark)


def spark_settings(options: Mapping[str, Any]) -> SparkSettings:
    """Read [pipeline.spark] from file and environment, and lay the options over it.

    Raises: SettingsError.
    """
    settings = load_section(options.get("config_path"), os.environ, "pipeline.spark", SparkSettings)
    texts = ("url", "token", "warehouse", "catalog_name", "master", "remote")
    given: dict[str, Any] = {name: options[name] for name in texts if options.get(name) is not None}
    if options.get("packages"):
        given["packages"] = tuple(part for text in options["packages"] for part in text.split(",") if part)
    if options.get("jar"):
        given["jar"] = tuple(options["jar"])
    given["conf"] = {**settings.conf, **dict(map(_key_and_value, options.get("conf") or ()))}
    return replace(settings, **given)


def _key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SettingsError(f"--conf is written KEY=VALUE: {text}")
    return key, value


def _session_config(
    settings: SparkSettings, s3: Mapping[str, str], *, job_kind: JobKind, app_name: str
) -> SessionConfig:
    runtimes = [Path(jar) for jar in settings.jar if "iceberg-spark-runtime" in Path(jar).name]
    return SessionConfig(
        catalog=CatalogConfig(
            uri=settings.url.removesuffix("/"),
            name=settings.catalog_name,
            warehouse=settings.warehouse,
            token=settings.token,
            properties=catalog_properties(s3),
        ),
        app_name=app_name,
        master="" if settings.remote else settings.master or default_master(os.environ),
        remote=settings.remote,
        job_kind=job_kind,
        driver_memory=settings.driver_memory,
        iceberg_jar=runtimes[0] if runtimes else None,
        extra_jars=tuple(Path(jar) for jar in settings.jar if Path(jar) not in runtimes[:1]),
        packages=settings.packages,
        # Hadoop is set up once, when Spark starts.
        extra_conf={**({} if settings.remote else hadoop_conf(s3)), **settings.conf},
    )


def default_master(environ: Mapping[str, str]) -> str:
    """Name the master where none is given: this machine, or the one that spark-submit was told."""
    return "" if _SUBMITTED_VARIABLE in environ else LOCAL_MASTER
