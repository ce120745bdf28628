"""What Spark is told: settings as plain strings, computed from our configuration. Owns every key that we set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config import TIME_ZONE, UTC, CatalogConfig, JobKind, SessionConfig

VARIABLES = "spark.sql.variable.substitute"

_OF_SESSIONS = {
    # Days and hours of partitions are those of UTC for every writer, so they must be for Spark's too.
    TIME_ZONE: UTC,
    # A name or a text with `${x}` in it means just that.
    VARIABLES: "false",
}

# What no defaults of a cluster change: rows would get into other partitions.
NEVER_GIVE_WAY = frozenset((TIME_ZONE,))

_EVERYWHERE = {
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    **_OF_SESSIONS,
}

_LOCAL = {
    # Costs memory and a port, and nobody looks at the console of a job that lasts seconds.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

_LOCAL_BY_KIND: Mapping[JobKind, Mapping[str, str]] = {
    # The first compiler alone and the simplest collector: a third less CPU and memory for a job of some seconds. That
    # compiler gets 48 MB for its code, and stops for good when some hundred queries have filled them.
    JobKind.SHORT: {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
    },
    # Full compilation halves the CPU of large merges; adaptive plans shrink the partitions that turn out small. Java's
    # usual collector cuts the heap into regions, in which Spark's pages of tens of megabytes find no place: a merge
    # into ten million rows ran out of a heap of 3 GB that was half empty.
    JobKind.LONG: {
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
        "spark.sql.shuffle.partitions": "16",
        "spark.sql.adaptive.enabled": "true",
    },
}


def session_conf(config: SessionConfig, *, jars: Sequence[Path], scratch_dir: Path) -> dict[str, str]:
    """Compute all settings of a session. `scratch_dir` has to exist: Spark makes its own, unused warehouse there."""
    conf = {**_EVERYWHERE, "spark.app.name": config.app_name}
    if config.master:
        conf["spark.master"] = config.master
    if config.is_local:
        conf |= {**_LOCAL, **_LOCAL_BY_KIND[config.job_kind]}
        conf["spark.driver.memory"] = config.driver_memory
        conf["spark.sql.warehouse.dir"] = str(scratch_dir)
    if config.packages:
        conf["spark.jars.packages"] = ",".join(config.packages)
    return {**conf, **_jar_conf(config, jars), **catalog_conf(config.catalog), **config.extra_conf}


def remote_conf(config: SessionConfig) -> dict[str, str]:
    """Compute what a session of Spark Connect is told: its server has settled everything else at its start."""
    return {**_OF_SESSIONS, **catalog_conf(config.catalog), **config.extra_conf}


def _jar_conf(config: SessionConfig, jars: Sequence[Path]) -> dict[str, str]:
    if not jars:
        return {}
    if config.is_local:
        # A second faster than spark.jars, which copies the jars and loads them in a class loader of their own.
        return {"spark.driver.extraClassPath": ":".join(map(str, jars))}
    return {"spark.jars": ",".join(map(str, jars))}


def catalog_conf(catalog: CatalogConfig) -> dict[str, str]:
    """Compute the settings that make the catalog known and the default. They can also be set in a running session."""
    properties = {
        "type": "rest",
        "uri": catalog.uri,
        # Spark's own table cache hides the commits of others for as long as the table is in use.
        "cache-enabled": "false",
    }
    if catalog.warehouse:
        properties["warehouse"] = catalog.warehouse
    if catalog.token:
        properties["token"] = catalog.token
        # A bearer token of ours has no end; Iceberg would try to exchange it for another after an hour.
        properties["token-refresh-enabled"] = "false"
    prefix = f"spark.sql.catalog.{catalog.name}"
    return {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.defaultCatalog": catalog.name,
        **{f"{prefix}.{key}": value for key, value in {**properties, **catalog.properties}.items()},
    }
