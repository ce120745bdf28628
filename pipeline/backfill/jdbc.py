"""A database's table as the input of a backfill, through JDBC. Owns its queries.

Chunks are ranges of a column of whole numbers; each of a chunk's conditions is read by one connection. The range is
taken once, at the start of a run, and is kept with it. Rows are read as they are at that moment: each has the mark that
the table had before, so that a change which came in between wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pipeline.backfill.inputs import InputUnreadable
from pipeline.backfill.plan import Chunk, KeyRange, Plan, plan_range
from pipeline.backfill.settings import BackfillConfig
from pipeline.mirrors.sql_text import quoted
from pipeline.spark_errors import is_spark_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Rows that a driver fetches at a time: PostgreSQL's would otherwise hold all of them.
_FETCH_ROWS = 10_000
_ALIAS = "lakefeed_chunk"

# Java does not find drivers by URL in jars that Spark has downloaded: the class has to be named.
_DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "com.mysql.cj.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlserver": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
    "oracle": "oracle.jdbc.OracleDriver",
}
_POSTGRES = "jdbc:postgresql:"
_WITH_ZONE = "timestamp with time zone"
_NO_DRIVER = ("No suitable driver", "ClassNotFoundException")


@dataclass(frozen=True, slots=True, kw_only=True)
class JdbcInput:
    """A table, or a query in brackets, of a database; cut by a column, or one chunk without one.

    `must_split` tells that somebody has named the column, so that one which cannot be used is an error.
    """

    url: str
    table: str
    column: str = ""
    must_split: bool = True
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The database without its parameters, which may hold a password, and the table."""
        bare = self.url.partition("?")[0].partition(";")[0]
        return f"{bare} {self.table}"

    @property
    def declared(self) -> StructType | None:
        """None: a database knows its types."""
        return None

    def plan(self, spark: SparkSession, config: BackfillConfig, facts: Mapping[str, Any] | None) -> Plan:
        """Cut the range of keys into chunks.

        Raises:
            InputUnreadable: the column does not hold whole numbers.
        """
        if facts is None:
            with _driver_errors(self.address):
                found = self._range(spark)
            facts = found.facts(chunk_max_rows=config.chunk_max_rows, parallel_reads=config.parallel_reads)
        return plan_range(facts)

    def _range(self, spark: SparkSession) -> KeyRange:
        if not self.column:
            return KeyRange()
        ends = f"min({self.column}) AS low, max({self.column}) AS high, count(*) AS row_count"
        query = f"SELECT {ends} FROM {self.table} {_ALIAS}"
        low, high, rows = self._options(spark).option("query", query).load().collect()[0]
        if low is None:
            return KeyRange()
        if not isinstance(low, int | Decimal) or int(low) != low or int(high) != high:
            if not self.must_split:
                return KeyRange()
            raise InputUnreadable(f"chunks are cut by a column of whole numbers: column={self.column} lowest={low}")
        return KeyRange(self.column, int(low), int(high), int(rows))

    def columns(self, spark: SparkSession, plan: Plan) -> StructType:
        """Ask the database for the table's columns.

        Raises: InputUnreadable.
        """
        from pyspark.sql import types  # noqa: PLC0415 - as all that needs Spark

        with _driver_errors(self.address):
            found = self.read(spark, plan.chunks[0], None).schema
            moments = self._moments(spark, [each.name for each in found if each.dataType == types.TimestampNTZType()])
        return types.StructType(
            [
                types.StructField(
                    each.name, types.TimestampType() if each.name in moments else each.dataType, True, each.metadata
                )
                for each in found
            ]
        )

    def _moments(self, spark: SparkSession, names: Sequence[str]) -> set[str]:
        """Find the columns that have a zone: to Spark, all of PostgreSQL's times are alike."""
        if not names or not self.url.startswith(_POSTGRES):
            return set()
        columns = ", ".join(f'pg_typeof({_ALIAS}."{name}")::text AS c{at}' for at, name in enumerate(names))
        # Of an empty table too, so that its types are those of the first row that comes.
        query = f"SELECT {columns} FROM (SELECT 1) one LEFT JOIN {self._selection} {_ALIAS} ON true LIMIT 1"
        shown = self._options(spark).option("query", query).load().collect()[0]
        return {name for name, type_ in zip(names, shown, strict=True) if type_ == _WITH_ZONE}

    def read(self, spark: SparkSession, chunk: Chunk, columns: StructType | None) -> DataFrame:
        """Read a chunk, over as many connections as it has conditions."""
        properties = {"fetchsize": str(_FETCH_ROWS), "preferTimestampNTZ": "true", **self._properties}
        moments = [each.name for each in columns or () if each.dataType.typeName() == "timestamp"]
        if moments:
            properties.setdefault("customSchema", ", ".join(f"{quoted(name)} TIMESTAMP" for name in moments))
        predicates = [f"({each})" for each in chunk.conditions]
        return spark.read.jdbc(self.url, f"{self._selection} {_ALIAS}", predicates=predicates, properties=properties)

    @property
    def _selection(self) -> str:
        """The table as a query of its own: whatever Spark adds to it stands outside."""
        return self.table if self.table.startswith("(") else f"(SELECT * FROM {self.table})"

    def _options(self, spark: SparkSession) -> Any:
        return spark.read.format("jdbc").options(url=self.url, **self._properties)

    @property
    def _properties(self) -> dict[str, str]:
        driver = _DRIVERS.get(self.url.removeprefix("jdbc:").partition(":")[0])
        return {**({"driver": driver} if driver else {}), **self.properties}


@contextmanager
def _driver_errors(address: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_spark_error(error) or not any(mark in str(error) for mark in _NO_DRIVER):
            raise
        raise InputUnreadable(
            "there is no JDBC driver for this database: bring it with --packages or --jar, and name its class with"
            f" --driver: {address}"
        ) from error
