"""Settings of a Spark session.

    SparkSettings    what users write: [pipeline.spark] of the settings file, and the options of every Spark command
    SessionConfig    what a session is built from; options.py derives it from SparkSettings

Both are checked when they are created.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lakefeed.settings import Settings, check, setting

TIME_ZONE = "spark.sql.session.timeZone"
UTC = "UTC"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JobKind(enum.Enum):
    """How long the session lives, which decides what its JVM is tuned for."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkCatalog(Settings):
    """The REST catalog as Spark sees it."""

    uri: str = setting("http://127.0.0.1:8181", "Address of the Iceberg REST catalog, without the `/v1`.")
    name: str = setting("lake", "First part of a table's name in SQL: lake.sales.orders.")
    warehouse: str = setting("", "Warehouse of the catalog. Empty means its only one.")
    token: str = setting("", "Bearer token. Empty if the catalog requires none.", secret=True)
    properties: Mapping[str, str] = setting({}, "Further properties of the Iceberg catalog, such as s3.endpoint.")

    def check(self) -> None:
        """Check the address, and that SQL can use the name."""
        check(self.uri.startswith(("http://", "https://")), f"catalog uri must be http or https: {self.uri}")
        check(
            _IDENTIFIER.fullmatch(self.name) is not None,
            f"catalog name must be letters, digits and underscores: {self.name}",
        )
        check(self.name != "spark_catalog", "catalog name is taken by Spark itself: spark_catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig(Settings):
    """One Spark session and the JVM under it."""

    catalog: SparkCatalog = field(default_factory=SparkCatalog)
    app_name: str = setting("lakefeed", "Name in logs and cluster consoles.")
    master: str = setting("local[*]", "Spark master. Empty leaves master, Java and jars to spark-submit.")
    job_kind: JobKind = setting(
        JobKind.SHORT,
        "`short` starts faster and takes less memory; `long` compiles hot code fully and adapts its plans.",
    )
    driver_memory: str = setting("1g", "Heap of a local session, as Spark writes sizes.")
    iceberg_jar: Path | None = setting(None, "Iceberg runtime to use. None means the one from PyPI.")
    extra_jars: tuple[Path, ...] = setting((), "Further jars for the class path, such as the AWS SDK for s3:// tables.")
    packages: tuple[str, ...] = setting(
        (), "Maven coordinates to download. An Iceberg runtime among them replaces the jar."
    )
    extra_conf: Mapping[str, str] = setting({}, "Further Spark settings. They override ours.")
    remote: str = setting("", "Spark Connect server such as sc://host:15002, which has its own master, Java and jars.")

    def check(self) -> None:
        """Check the server's address, and that days of partitions are those of UTC."""
        check(self.remote == "" or self.remote.startswith("sc://"), f"remote must begin with sc://: {self.remote}")
        zone = self.extra_conf.get(TIME_ZONE, UTC)
        check(zone == UTC, f"the time zone of a session is UTC, as days of partitions are: {TIME_ZONE}={zone}")

    @property
    def is_submitted(self) -> bool:
        """Return whether spark-submit started this process, with the JVM and its class path."""
        return not self.master and not self.remote

    @property
    def is_local(self) -> bool:
        """Return whether driver and executors are one process on this machine."""
        return self.master.startswith("local") and not self.remote


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings(Settings):
    """Section [pipeline.spark]: addresses of the catalog and of Spark, for every Spark command."""

    url: str = setting("http://127.0.0.1:8181", "Address of the Iceberg REST catalog, without the `/v1`.")
    token: str = setting("", "Bearer token, if the catalog requires one.", secret=True)
    warehouse: str = setting("", "Warehouse of the catalog. Empty means its only one.")
    catalog_name: str = setting("lake", "First part of a table's name in SQL.")
    master: str = setting("", "Spark master. Empty means `local[*]`, or under spark-submit the master given there.")
    remote: str = setting("", "Spark Connect server such as `sc://host:15002`, in place of a master.")
    driver_memory: str = setting("1g", "Heap of a local session, as Spark writes sizes.")
    packages: tuple[str, ...] = setting((), "Maven coordinates for Spark to download.")
    jar: tuple[str, ...] = setting((), "Jars for the class path. An Iceberg runtime among them replaces ours.")
    conf: Mapping[str, str] = setting({}, "Further settings of Spark. They override ours.")
