"""Click options of every Spark command, the session they ask for, and errors as one line.

    @click.command()
    @click.argument("table")
    @spark_options
    def maintain(table: str, **options: Any) -> None:
        with opened_session(options, job_kind=JobKind.SHORT) as spark:
            ...

The options are made from the fields of SessionConfig. An option wins over LAKEFEED_PIPELINE_SPARK_<NAME>, which wins
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import click

from lakefeed import command_line
from lakefeed.pipeline.errors import CatalogCheckFailed, SparkFailed
from lakefeed.pipeline.spark.failures import message_of, spark_errors
from lakefeed.pipeline.spark.session import (
    APP_NAME,
    JobKind,
    SessionConfig,
    build_session,
    load_s3_settings,
    s3_conf,
    stop_session,
)
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The catalog is checked before Spark starts: Spark takes seconds, and reports a refused connection in Java frames.
_CATALOG_TIMEOUT_S = 10.0


# -- options


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that locate the catalog and Spark, and print expected errors as one line."""
    return _add_options(command)


def driver_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same options, except --remote: the command needs a driver of its own, which Spark Connect lacks."""
    return _add_options(command, without=("remote",))


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add only the options of Spark, to a command that has options for catalog and settings file."""
    return _decorate(command, without=("url", "token"))


def _add_options(command: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[..., Any]:
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with readable_errors():
            return command(*args, **kwargs)

    return _decorate(command_line.config_option("[pipeline.*]")(wrapped), without=without)


def _decorate(command: Callable[..., Any], *, without: Collection[str]) -> Callable[..., Any]:
    """Add an option for each field of SessionConfig."""
    kinds = typing.get_type_hints(SessionConfig)
    for item in reversed(dataclasses.fields(SessionConfig)):
        if item.name in without:
            continue
        kind = typing.get_origin(kinds[item.name])
        arguments: dict[str, Any] = {"help": item.metadata["help"]}
        if kind is not None:
            arguments["help"] += " Can be repeated."
            arguments |= {"multiple": True, "metavar": "TEXT" if kind is tuple else "KEY=VALUE"}
        elif item.default:
            arguments["help"] += f"  [{item.default}]"
        if item.metadata.get("secret"):
            arguments |= {"envvar": command_line.TOKEN_VARIABLE, "show_envvar": True}
        command = click.option(f"--{item.name.replace('_', '-')}", **arguments)(command)
    return command


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors that a user can act on, Spark's among them, into one message of the command line."""
    try:
        with command_line.readable_errors():
            yield
    except click.ClickException:
        raise
    except spark_errors() as error:
        raise click.ClickException(f"Spark failed: {message_of(error)}") from error


# -- settings and session


@contextmanager
def opened_session(
    options: Mapping[str, Any], *, job_kind: JobKind, app_name: str = APP_NAME
) -> Iterator[SparkSession]:
    """Open a session on the catalog, and stop it at the end of the block.

    Raises: SettingsError, CatalogCheckFailed, SparkUnavailable, SparkFailed for what Spark raises in the block.
    """
    config = session_config(options)
    if not config.remote and not config.is_submitted:
        # A Spark elsewhere may reach a catalog that this machine does not, or may have been given another one.
        check_catalog(config)
    spark = build_session(config, app_name=app_name, job_kind=job_kind)
    try:
        yield spark
    except spark_errors() as error:
        # Here, because the message of a Java error is in the JVM, which is about to end.
        raise SparkFailed(message_of(error)) from error
    finally:
        stop_session(spark)


def session_config(options: Mapping[str, Any]) -> SessionConfig:
    """Load [pipeline.spark], apply a command's options, and add the service's settings of S3.

    Options of other parts are ignored.

    Raises: SettingsError.
    """
    path = options.get("config_path")
    config = load_section(path, os.environ, "pipeline.spark", SessionConfig)
    names = [item.name for item in dataclasses.fields(SessionConfig)]
    given: dict[str, Any] = {name: options[name] for name in names if options.get(name) not in (None, ())}
    if "packages" in given:
        given["packages"] = tuple(part for text in given["packages"] for part in text.split(",") if part)
    given["conf"] = {**config.conf, **parse_pairs(options.get("conf") or (), rule="--conf must be KEY=VALUE")}
    try:
        config = dataclasses.replace(config, **given)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    s3 = load_s3_settings(path, os.environ)
    return dataclasses.replace(config, conf={**s3_conf(s3, config), **config.conf})


def parse_pairs(texts: Iterable[str], *, rule: str) -> dict[str, str]:
    """Return the names and values of a repeated option. Raise SettingsError with the rule for a text without `=`."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingsError(f"{rule}: {text}")
        pairs[name] = value
    return pairs


def check_catalog(config: SessionConfig) -> None:
    """Raise CatalogCheckFailed unless an Iceberg REST catalog answers at the address and accepts the token."""
    url = config.url.removesuffix("/")
    query = f"?{urllib.parse.urlencode({'warehouse': config.warehouse})}" if config.warehouse else ""
    request = urllib.request.Request(f"{url}/v1/config{query}")  # noqa: S310 - SessionConfig takes http(s) only
    if config.token:
        request.add_header("Authorization", f"Bearer {config.token}")
    try:
        with urllib.request.urlopen(request, timeout=_CATALOG_TIMEOUT_S) as response:  # noqa: S310
            document = json.loads(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            text = f"the catalog rejects the token, set --token or LAKEFEED_TOKEN: url={url}"
        elif config.warehouse and error.code in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
            text = f"the catalog has no such warehouse: url={url} warehouse={config.warehouse}"
        else:
            text = f"not an Iceberg REST catalog: url={url} status={error.code}"
        raise CatalogCheckFailed(text) from error
    except ValueError as error:
        raise CatalogCheckFailed(f"not an Iceberg REST catalog: url={url}") from error
    except OSError as error:
        raise CatalogCheckFailed(
            f"cannot reach the catalog, is `lakefeed serve` running? url={url} error={error}"
        ) from error
    if not isinstance(document, dict) or "defaults" not in document:
        raise CatalogCheckFailed(f"not an Iceberg REST catalog: url={url}")
