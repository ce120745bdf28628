"""A database's table as the input of a backfill, through JDBC. Owns its queries.

Chunks are ranges of a column of whole numbers; each of a chunk's conditions is read by one connection. The range is
taken once, at the start of a run, and is kept with it. Rows are read as they are at that moment: each has the mark that
the table had before, so that a change which came in between wins.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

from lakefeed.contract.changes import Position
from lakefeed.pipeline.backfill.settings import BackfillConfig
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark.failures import is_spark_error
from lakefeed.pipeline.spark.tables import quoted
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType


# --- pipeline.backfill.plan -------------------------------------------------------------------------------------------
#
# Which chunks an input is read in. Owns the cuts, and how a later run finds out that they are the same.
#
# A chunk is what is read and committed at once. Chunks are numbered, and a run that goes on after a crash has to cut as
# the first one did: files are told by a fingerprint of their names and sizes, a database's table by the range of the
# keys
# that were there at the start. The first and the last range are open, so that rows outside of it are not left out.


# More would make a plan that no driver can hold.
CHUNKS_MAX = 100_000

_FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, slots=True, order=True)
class InputFile:
    """A file of the input."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Files, or conditions in the database's SQL, each of which is read by one connection."""

    number: int
    files: Sequence[InputFile] = ()
    conditions: Sequence[str] = ()

    @property
    def shown(self) -> str:
        """Say what it is, for people."""
        if self.files:
            first = self.files[0].path.rsplit("/", 1)[-1]
            size = sum(file.size_bytes for file in self.files)
            return f"{len(self.files)} files from {first}, {size:,} bytes"
        return self.conditions[0] if len(self.conditions) == 1 else f"{self.conditions[0]} ... {self.conditions[-1]}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All chunks, and the facts that they were cut by: another run with equal facts cuts equally."""

    chunks: Sequence[Chunk]
    facts: Mapping[str, Any]


def plan_files(files: Iterable[InputFile], *, chunk_max_bytes: int) -> Plan:
    """Put files together, in the order of their names; a larger one is a chunk of its own."""
    ordered = sorted(files)
    groups: list[list[InputFile]] = []
    size = 0
    for file in ordered:
        if not groups or size + file.size_bytes > chunk_max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size_bytes
    chunks = [Chunk(number, files=tuple(group)) for number, group in enumerate(groups)]
    # With the chunk's number, so that the same files cut elsewhere have other facts.
    lines = (f"{chunk.number} {file.path} {file.size_bytes}" for chunk in chunks for file in chunk.files)
    return Plan(chunks, {"files": fingerprint(lines), "cut": len(chunks)})


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A database's table by one of its columns, of whole numbers; without a column it is one chunk."""

    column: str = ""
    low: int = 0
    high: int = 0
    rows: int = 0

    def facts(self, *, chunk_max_rows: int, parallel_reads: int) -> dict[str, Any]:
        """Give what chunks are cut by."""
        chunks = min(max(1, -(-self.rows // chunk_max_rows)), CHUNKS_MAX, max(1, self.high - self.low + 1))
        return {
            "column": self.column,
            "low": self.low,
            "high": self.high,
            "cut": chunks if self.column else 1,
            "parallel": parallel_reads,
        }


def plan_range(facts: Mapping[str, Any]) -> Plan:
    """Cut a range of keys into chunks, and each of them into what one connection reads."""
    column, cut, parallel = str(facts["column"]), int(facts["cut"]), int(facts["parallel"])
    if not column:
        return Plan((Chunk(0, conditions=("1 = 1",)),), facts)
    low, high = int(facts["low"]), int(facts["high"])
    width = high - low + 1
    parts = min(parallel, width // cut or 1)
    conditions = _conditions(column, [low + width * number // (cut * parts) for number in range(1, cut * parts)])
    chunks = [Chunk(at, conditions=tuple(conditions[at * parts : (at + 1) * parts])) for at in range(cut)]
    return Plan(chunks, facts)


def _conditions(column: str, bounds: Sequence[int]) -> list[str]:
    """Part all rows at some bounds: each row meets one condition, those without a key the first."""
    if not bounds:
        return ["1 = 1"]
    inner = [f"{column} >= {low} AND {column} < {high}" for low, high in itertools.pairwise(bounds)]
    return [f"{column} < {bounds[0]} OR {column} IS NULL", *inner, f"{column} >= {bounds[-1]}"]


def fingerprint(lines: Iterable[str]) -> str:
    """Make a short name of some lines."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def default_run(*, table: str, source: str, address: str) -> str:
    """Name a run by what it does: the same command again goes on with it."""
    return f"{source}-{fingerprint((table, source, address))}"


# --- pipeline.backfill.inputs -----------------------------------------------------------------------------------------
#
# What a backfill reads: files through Spark's readers. Owns their options, so that no row is lost or guessed at.
#
#     Parquet      the union of the files' columns
#     CSV          all text, by the files' headers, which have to be equal; a row with more or fewer fields is an error
#     JSON lines   types of all values, found by reading all of it once; a line that is no JSON is an error
#
# Directories such as `day=2026-11-16` become columns of text. Databases are in jdbc.py.


FILE_FORMATS = ("parquet", "csv", "jsonl")

_GLOB_SIGNS = frozenset("*?[{")
_CORRUPT = "_corrupt_record"


class InputUnreadable(PipelineError):
    """The input cannot be read as what it was said to be: look at it, or say otherwise."""


class Input(Protocol):
    """What a backfill reads, in chunks."""

    @property
    def address(self) -> str:
        """Where it is, for its name and for people; without secrets."""

    @property
    def declared(self) -> StructType | None:
        """The types that its text is to have in new columns."""

    def plan(self, spark: SparkSession, config: BackfillConfig, facts: Mapping[str, Any] | None) -> Plan:
        """Cut it into chunks; with the facts of an earlier run, as that one did.

        Raises: InputUnreadable.
        """

    def columns(self, spark: SparkSession, plan: Plan) -> StructType:
        """Find its columns; of text, all are text.

        Raises: InputUnreadable.
        """

    def read(self, spark: SparkSession, chunk: Chunk, columns: StructType) -> DataFrame:
        """Read one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInput:
    """Files under a path, which may be a file, a directory or a pattern."""

    format: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict)
    declared: StructType | None = None

    @property
    def address(self) -> str:
        """The path."""
        return self.path

    def plan(self, spark: SparkSession, config: BackfillConfig, facts: Mapping[str, Any] | None) -> Plan:
        """Put the files together to chunks.

        Raises:
            InputUnreadable: there are none, or they are not those of the run that is to be gone on with.
        """
        files = self._list(spark)
        if not files:
            raise InputUnreadable(f"there are no files: path={self.path}")
        plan = plan_files(files, chunk_max_bytes=config.chunk_max_bytes)
        if facts is not None and plan.facts != facts:
            raise InputUnreadable(
                "files have changed since the run began, or chunk_max_bytes has: go on with the same ones, or start"
                f" another run with --run: path={self.path} files={len(files)}"
            )
        return plan

    def _list(self, spark: SparkSession) -> list[InputFile]:
        """List the files; Spark leaves out those whose names begin with a dot or an underscore."""
        reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        listed = reader.load(self.path).select("path", "length").collect()
        return [InputFile(row["path"], row["length"]) for row in listed]

    def columns(self, spark: SparkSession, plan: Plan) -> StructType:
        """Find the columns of all files.

        Raises: InputUnreadable.
        """
        paths = [file.path for chunk in plan.chunks for file in chunk.files]
        if self.format == "csv":
            paths = paths[:1]  # of the others only the header matters, which is checked when they are read
        if self.declared is not None and (self.format == "jsonl" or self.options.get("header") == "false"):
            return self.declared if self.format == "jsonl" else _all_text(self.declared)
        found = self._load(self._reader(spark), paths).schema
        if _CORRUPT in found.names:
            raise InputUnreadable(f"there are lines that are no JSON objects: path={self.path}")
        if not found.fields:
            raise InputUnreadable(f"the input has no columns: path={self.path}")
        return found

    def read(self, spark: SparkSession, chunk: Chunk, columns: StructType) -> DataFrame:
        """Read the files of a chunk."""
        return self._load(self._reader(spark).schema(columns), [file.path for file in chunk.files])

    def _reader(self, spark: SparkSession) -> DataFrameReader:
        # Types of directories' names would be guessed per chunk.
        spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
        options: dict[str, str] = {"mode": "FAILFAST"} if self.format == "csv" or self.declared else {}
        if self.format == "csv":
            # As RFC 4180 has it: a quote is doubled inside quotes, and so may be a line's end.
            options |= {"header": "true", "enforceSchema": "false", "escape": '"', "multiLine": "true"}
        elif self.format == "parquet":
            # Old dates are in the calendar that all writers use but Spark 2, whose files say so.
            options |= {"mergeSchema": "true", "datetimeRebaseMode": "CORRECTED", "int96RebaseMode": "CORRECTED"}
        return spark.read.options(**{**options, **self.options})

    def _load(self, reader: DataFrameReader, paths: Sequence[str]) -> DataFrame:
        is_one_file = any(path.endswith(self.path) for path in paths)
        if not is_one_file and not _GLOB_SIGNS.intersection(self.path):
            reader = reader.option("basePath", self.path)
        if self.format == "parquet":
            return reader.parquet(*paths)
        return reader.csv(list(paths)) if self.format == "csv" else reader.json(list(paths))


def _all_text(columns: StructType) -> StructType:
    from pyspark.sql.types import StringType, StructField, StructType  # noqa: PLC0415 - as all that needs Spark

    return StructType([StructField(name, StringType()) for name in columns.names])


def check_options(options: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE options.

    Raises: SettingsError.
    """
    pairs = [option.partition("=") for option in options]
    if wrong := [option for option, (name, equals, _) in zip(options, pairs, strict=True) if not name or not equals]:
        raise SettingsError(f"--option is written NAME=VALUE: {wrong[0]}")
    return {name: value for name, _, value in pairs}


# --- pipeline.backfill.jdbc -------------------------------------------------------------------------------------------


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


# --- pipeline.backfill.positions --------------------------------------------------------------------------------------
#
# The position that rows of a backfill get. Owns the choice; mirrors and readers order by it.
#
# A row that was read is as new as the last change that its table had committed before the reading began: later ones win
# over it, earlier ones lose. So a database is read as of the *mark* of its source, taken before each chunk. A file says
# nothing of when it was written, so its rows are older than every change, unless whoever exported it has noted the
# mark.
#
#     mark     the source's last committed change                a database, by default
#     start    before all changes                                files, by default
#     0:4711   epoch and sequence, as noted before the export    files


# Sequences begin at 0.
BEFORE_ALL = Position(0, -1)

_POSITION = re.compile(r"(?:(\d+):)?(\d+)")


@dataclass(frozen=True, slots=True)
class ReadAs:
    """As of what rows are read: a position, or the mark if there is none."""

    position: Position | None = None

    def position_for(self, mark: Position | None) -> Position:
        """Give the position of rows that are read now.

        Raises:
            SettingsError: changes that are not committed yet would lose against rows of the backfill.
        """
        if self.position is None:
            return mark or BEFORE_ALL
        if self.position > (mark or BEFORE_ALL):
            raise SettingsError(
                "the table has not come to this position, wait until it has:"
                f" position={shown(self.position)} mark={shown(mark)}"
            )
        return self.position


def parse_read_as(text: str) -> ReadAs:
    """Read `mark`, `start` or a position.

    Raises: SettingsError.
    """
    if text == "mark":
        return ReadAs()
    if text == "start":
        return ReadAs(BEFORE_ALL)
    match = _POSITION.fullmatch(text)
    if match is None:
        raise SettingsError(f"--position is mark, start or EPOCH:SEQUENCE: {text}")
    return ReadAs(Position(int(match[1] or 0), int(match[2])))


def shown(position: Position | None) -> str:
    """Write a position as the option has it."""
    return "none" if position is None else f"{position.epoch}:{position.sequence}"
