"""Settings of a Spark session.

SparkSettings    what users write: [pipeline.spark] of the settings file, and the options of every Spark command
SessionConfig    what a session is built from; options.py derives it from SparkSettings
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lakefeed.settings import check

TIME_ZONE = "spark.sql.session.timeZone"
UTC = "UTC"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JobKind(enum.Enum):
    """How long the session lives, which decides what its JVM is tuned for."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig:
    """The REST catalog as Spark sees it."""

    uri: str = field(
        default="http://127.0.0.1:8181",
        metadata={"why": "where the Iceberg REST catalog answers, without the /v1"},
    )
    name: str = field(default="lake", metadata={"why": "first part of a table's name in SQL: lake.sales.orders"})
    warehouse: str = field(default="", metadata={"why": "which of the catalog's warehouses; empty means its only one"})
    token: str = field(
        default="", metadata={"why": "bearer token; empty means the catalog asks for none", "secret": True}
    )
    properties: Mapping[str, str] = field(
        default_factory=dict, metadata={"why": "further properties of the Iceberg catalog, such as s3.endpoint"}
    )

    def __post_init__(self) -> None:
        check(self.uri.startswith(("http://", "https://")), f"catalog uri must be http or https: {self.uri}")
        check(
            _IDENTIFIER.fullmatch(self.name) is not None,
            f"catalog name must be letters, digits and underscores: {self.name}",
        )
        check(self.name != "spark_catalog", "catalog name is taken by Spark itself: spark_catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """One Spark session and the JVM under it."""

    catalog: CatalogConfig = field(default_factory=CatalogConfig)
    app_name: str = field(default="lakefeed", metadata={"why": "shown in logs and cluster consoles"})
    master: str = field(
        default="local[*]",
        metadata={"why": "where Spark runs; empty leaves master, Java and jars to spark-submit"},
    )
    job_kind: JobKind = field(
        default=JobKind.SHORT,
        metadata={"why": "short starts faster in less memory; long compiles hot code fully and adapts its plans"},
    )
    driver_memory: str = field(default="1g", metadata={"why": "heap of a local session, as Spark writes sizes"})
    iceberg_jar: Path | None = field(
        default=None, metadata={"why": "an Iceberg runtime of your own; empty means the one from PyPI"}
    )
    extra_jars: tuple[Path, ...] = field(
        default=(), metadata={"why": "further jars for the class path, such as the AWS SDK for s3:// tables"}
    )
    packages: tuple[str, ...] = field(
        default=(), metadata={"why": "Maven coordinates to download; an Iceberg runtime among them replaces the jar"}
    )
    extra_conf: Mapping[str, str] = field(
        default_factory=dict, metadata={"why": "further Spark settings; they win over ours"}
    )

    remote: str = field(
        default="",
        metadata={"why": "a Spark Connect server, as sc://host:15002; master, Java and jars are then its own"},
    )

    def __post_init__(self) -> None:
        check(self.remote == "" or self.remote.startswith("sc://"), f"remote must begin with sc://: {self.remote}")
        zone = self.extra_conf.get(TIME_ZONE, UTC)
        check(zone == UTC, f"the time zone of a session is UTC, as days of partitions are: {TIME_ZONE}={zone}")

    @property
    def is_submitted(self) -> bool:
        """Whether spark-submit started us, so that the JVM and its class path are settled already."""
        return not self.master and not self.remote

    @property
    def is_local(self) -> bool:
        """Whether driver and executors are one process on this machine."""
        return self.master.startswith("local") and not self.remote


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSettings:
    """Where the catalog and Spark are, for every command of the pipeline."""

    url: str = field(default="http://127.0.0.1:8181", metadata={"why": "Iceberg REST catalog, before /v1"})
    token: str = field(
        default="", repr=False, metadata={"why": "bearer token, where the catalog asks for one", "secret": True}
    )
    warehouse: str = field(default="", metadata={"why": "which of the catalog's warehouses; empty means its only one"})
    catalog_name: str = field(default="lake", metadata={"why": "first part of a table's name in SQL"})
    master: str = field(
        default="", metadata={"why": "Spark master; empty means local[*], and under spark-submit the one named there"}
    )
    remote: str = field(default="", metadata={"why": "Spark Connect server, as sc://host:15002, in place of a master"})
    driver_memory: str = field(default="1g", metadata={"why": "heap of a local session, as Spark writes sizes"})
    packages: tuple[str, ...] = field(default=(), metadata={"why": "Maven coordinates for Spark to download"})
    jar: tuple[str, ...] = field(default=(), metadata={"why": "jars for the class path, an Iceberg runtime among them"})
    conf: Mapping[str, str] = field(
        default_factory=dict, metadata={"why": "further settings of Spark; they win over ours"}
    )
