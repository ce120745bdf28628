"""Click options of every Spark command, the session they ask for, and errors as one line.

    @click.command()
    @click.argument("table")
    @spark_options
    def maintain(table: str, **options: Any) -> None:
        with opened_session(options, job_kind=JobKind.SHORT) as spark:
            ...

The options are made from the fields of SparkSettings. An option wins over LAKEFEED_PIPELINE_SPARK_<NAME>, which wins
over [pipeline.spark] in the file.

Exit codes: 2 for an invalid option or setting, 1 for any other expected failure, each with one message and no
traceback. PySpark is imported when a session is opened.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import typing
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakefeed import command_line
from lakefeed.pipeline.errors import CatalogCheckFailed, SparkFailed
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.session import (
    build_session,
    catalog_properties,
    hadoop_conf,
    load_s3_settings,
    stop_session,
)
from lakefeed.pipeline.spark.settings import JobKind, SessionConfig, SparkCatalog, SparkSettings
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


LOCAL_MASTER = "local[*]"

# spark-submit starts Python with the port of the JVM that it has started before.
_SUBMITTED_VARIABLE = "PYSPARK_GATEWAY_PORT"

# The catalog is checked before Spark starts: Spark takes seconds, and reports a refused connection in Java frames.
_CATALOG_TIMEOUT_S = 10.0


# -- options


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that locate the catalog and Spark, and print expected errors as one line."""
    return _add_options(_with_readable_errors(command), with_config=True)


def driver_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same options, except --remote: the command needs a driver of its own, which Spark Connect lacks."""
    return _add_options(_with_readable_errors(command), without=("remote",), with_config=True)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add only the options of Spark, to a command that has options for catalog and settings file."""
    return _add_options(command, without=("url", "token"))


def _add_options(
    command: Callable[..., Any], *, without: Collection[str] = (), with_config: bool = False
) -> Callable[..., Any]:
    if with_config:
        command = command_line.config_option("[pipeline.*]")(command)
    for item in reversed(dataclasses.fields(SparkSettings)):
        if item.name not in without:
            command = _option(item)(command)
    return command


def _option(item: dataclasses.Field[Any]) -> Callable[..., Any]:
    kind = typing.get_origin(typing.get_type_hints(SparkSettings)[item.name])
    arguments: dict[str, Any] = {"help": item.metadata["help"]}
    if kind is not None:
        arguments["help"] += " Can be repeated."
        arguments |= {"multiple": True, "metavar": "TEXT" if kind is tuple else "KEY=VALUE"}
    elif item.default:
        arguments["help"] += f"  [{item.default}]"
    if item.metadata.get("secret"):
        arguments |= {"envvar": command_line.TOKEN_VARIABLE, "show_envvar": True}
    return click.option(f"--{item.name.replace('_', '-')}", **arguments)


def _with_readable_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with readable_errors():
            return command(*args, **kwargs)

    return wrapped


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors that a user can act on, Spark's among them, into one message of the command line."""
    try:
        with command_line.readable_errors():
            yield
    except click.ClickException:
        raise
    except Exception as error:
        if not is_spark_error(error):
            raise
        raise click.ClickException(f"Spark failed: {message_of(error)}") from error


# -- settings and session


@contextmanager
def opened_session(
    options: Mapping[str, Any], *, job_kind: JobKind, app_name: str = "lakefeed"
) -> Iterator[SparkSession]:
    """Open a session on the catalog, and stop it at the end of the block.

    Raises: SettingsError, CatalogCheckFailed, SparkUnavailable, SparkFailed for what Spark raises in the block.
    """
    config = session_config(options, job_kind=job_kind, app_name=app_name)
    if not config.remote and not config.is_submitted:
        # A Spark elsewhere may reach a catalog that this machine does not, or may have been given another one.
        check_catalog(config.catalog)
    spark = build_session(config)
    try:
        yield spark
    except Exception as error:
        if not is_spark_error(error):
            raise
        # Here, because the message of a Java error is in the JVM, which is about to end.
        raise SparkFailed(message_of(error)) from error
    finally:
        stop_session(spark)


def session_config(options: Mapping[str, Any], *, job_kind: JobKind, app_name: str = "lakefeed") -> SessionConfig:
    """Build a session's settings from a command's options; options of other parts are ignored.

    Raises: SettingsError.
    """
    settings = spark_settings(options)
    s3 = load_s3_settings(options.get("config_path"), os.environ)
    runtimes = [Path(jar) for jar in settings.jar if "iceberg-spark-runtime" in Path(jar).name]
    try:
        return SessionConfig(
            catalog=SparkCatalog(
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
            # Hadoop is configured once, when Spark starts.
            extra_conf={**({} if settings.remote else hadoop_conf(s3)), **settings.conf},
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error


def spark_settings(options: Mapping[str, Any]) -> SparkSettings:
    """Load [pipeline.spark] from file and environment, and apply the options.

    Raises: SettingsError.
    """
    settings = load_section(options.get("config_path"), os.environ, "pipeline.spark", SparkSettings)
    names = [item.name for item in dataclasses.fields(SparkSettings)]
    given: dict[str, Any] = {name: options[name] for name in names if options.get(name) not in (None, ())}
    if "packages" in given:
        given["packages"] = tuple(part for text in given["packages"] for part in text.split(",") if part)
    given["conf"] = {**settings.conf, **dict(map(_key_and_value, options.get("conf") or ()))}
    return dataclasses.replace(settings, **given)


def _key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SettingsError(f"--conf must be KEY=VALUE: {text}")
    return key, value


def default_master(environ: Mapping[str, str]) -> str:
    """Return the master if none is configured: this machine, or under spark-submit the master given there."""
    return "" if _SUBMITTED_VARIABLE in environ else LOCAL_MASTER


def check_catalog(catalog: SparkCatalog) -> None:
    """Check that an Iceberg REST catalog answers at the address and accepts the token.

    Raises: CatalogCheckFailed.
    """
    query = f"?{urllib.parse.urlencode({'warehouse': catalog.warehouse})}" if catalog.warehouse else ""
    request = urllib.request.Request(f"{catalog.uri}/v1/config{query}")  # noqa: S310 - SparkCatalog takes http(s) only
    if catalog.token:
        request.add_header("Authorization", f"Bearer {catalog.token}")
    try:
        with urllib.request.urlopen(request, timeout=_CATALOG_TIMEOUT_S) as response:  # noqa: S310
            document = json.loads(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        raise _rejected(catalog, error.code) from error
    except ValueError as error:
        raise CatalogCheckFailed(f"not an Iceberg REST catalog: url={catalog.uri}") from error
    except OSError as error:
        raise CatalogCheckFailed(
            f"cannot reach the catalog, is `lakefeed serve` running? url={catalog.uri} error={error}"
        ) from error
    if not isinstance(document, dict) or "defaults" not in document:
        raise CatalogCheckFailed(f"not an Iceberg REST catalog: url={catalog.uri}")


def _rejected(catalog: SparkCatalog, status: int) -> CatalogCheckFailed:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return CatalogCheckFailed(f"the catalog rejects the token, set --token or LAKEFEED_TOKEN: url={catalog.uri}")
    if catalog.warehouse and status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        return CatalogCheckFailed(f"the catalog has no such warehouse: url={catalog.uri} warehouse={catalog.warehouse}")
    return CatalogCheckFailed(f"not an Iceberg REST catalog: url={catalog.uri} status={status}")
