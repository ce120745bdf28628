"""Inputs of a backfill: files and database tables, divided into chunks.

    Parquet       the union of the files' columns
    CSV           all text, by the files' headers, which must be equal; a row with more or fewer fields is an error
    JSON lines    types of all values, found by reading everything once; a line that is not JSON is an error
    JDBC          ranges of an integer column; each condition of a chunk is read by one connection

Directories such as `day=2026-11-16` become text columns. No row is lost or guessed at.

A chunk is what is read and committed at once. Chunks are numbered, and a run that resumes after a crash must divide the
input as the first process did: files are compared by a fingerprint of their names and sizes; of a database's table the
range of keys at the start is recorded. The first and the last range are open, so that rows outside are not left out.

All rows of a chunk have one position, by which mirrors and readers order them against changes: later changes win over a
row, earlier ones lose. A row is as new as the last change that its table had committed before the read began. A
database is therefore read as of the *mark* of its source, taken before each chunk. A file does not say when it was
written, so its rows are older than every change, unless the mark was noted when it was exported.

    mark      the source's last committed change                 default for databases
    start     before all changes                                 default for files
    0:4711    epoch and sequence, as noted before the export     files
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

from lakefeed.contract.changes import Position
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark.failures import spark_errors
from lakefeed.pipeline.spark.tables import quoted
from lakefeed.settings import MIB, Settings, SettingsError, setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType


# A larger plan would not fit into the driver's memory.
CHUNKS_MAX = 100_000

_FINGERPRINT_DIGITS = 16

FILE_FORMATS = ("parquet", "csv", "jsonl")

_GLOB_SIGNS = frozenset("*?[{")
_CORRUPT = "_corrupt_record"

# Rows that a driver fetches at a time: PostgreSQL's would otherwise hold all of them in memory.
_FETCH_ROWS = 10_000
_ALIAS = "lakefeed_chunk"

# Java does not find drivers by URL in jars that Spark has downloaded, so the class is named.
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
class BackfillConfig(Settings):
    """Section [pipeline.backfill]."""

    chunk_max_bytes: int = setting(
        512 * MIB,
        "Size of the input files of one chunk, in bytes. A chunk is one snapshot; a crash repeats one chunk.",
        minimum=1,
    )
    chunk_max_rows: int = setting(
        1_000_000, "Rows of one chunk of a database table, if its keys are evenly distributed.", minimum=1
    )
    parallel_reads: int = setting(
        4, "Number of database connections at a time. Each reads a part of a chunk.", minimum=1
    )
    ledger: bool = setting(
        True, "Record the rows of each chunk for `lakefeed verify`. Costs a copy on the disks of the executors."
    )


@dataclass(frozen=True, slots=True, order=True)
class InputFile:
    """A file of the input."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class InputChunk:
    """What is read and committed at once: files, or conditions in the database's SQL, one per connection."""

    number: int
    files: Sequence[InputFile] = ()
    conditions: Sequence[str] = ()

    @property
    def description(self) -> str:
        """Return a short description of the chunk."""
        if self.files:
            first = self.files[0].path.rsplit("/", 1)[-1]
            size = sum(file.size_bytes for file in self.files)
            return f"{len(self.files)} files from {first}, {size:,} bytes"
        return self.conditions[0] if len(self.conditions) == 1 else f"{self.conditions[0]} ... {self.conditions[-1]}"


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks, and the facts that determine them: equal facts give equal chunks."""

    chunks: Sequence[InputChunk]
    facts: Mapping[str, Any]


def plan_files(files: Iterable[InputFile], *, chunk_max_bytes: int) -> ChunkPlan:
    """Group files in the order of their names; a file above the limit is a chunk of its own."""
    ordered = sorted(files)
    groups: list[list[InputFile]] = []
    size = 0
    for file in ordered:
        if not groups or size + file.size_bytes > chunk_max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size_bytes
    chunks = [InputChunk(number, files=tuple(group)) for number, group in enumerate(groups)]
    # With the chunk's number, so that another grouping of the same files has other facts.
    lines = (f"{chunk.number} {file.path} {file.size_bytes}" for chunk in chunks for file in chunk.files)
    return ChunkPlan(chunks, {"files": fingerprint(lines), "cut": len(chunks)})


def range_facts(
    column: str = "", low: int = 0, high: int = 0, rows: int = 0, *, chunk_max_rows: int, parallel_reads: int
) -> dict[str, Any]:
    """Return the facts that determine the chunks of a database's table, by the range of an integer column.

    Without a column the table is one chunk.
    """
    chunks = min(max(1, -(-rows // chunk_max_rows)), CHUNKS_MAX, max(1, high - low + 1))
    return {"column": column, "low": low, "high": high, "cut": chunks if column else 1, "parallel": parallel_reads}


def plan_range(facts: Mapping[str, Any]) -> ChunkPlan:
    """Divide a range of keys into chunks, and each chunk into one condition per connection.

    Each row meets exactly one condition, rows without a key the first one.
    """
    column, cut, parallel = str(facts["column"]), int(facts["cut"]), int(facts["parallel"])
    low, high = int(facts["low"]), int(facts["high"])
    width = high - low + 1
    parts = min(parallel, width // cut or 1)
    bounds = [low + width * number // (cut * parts) for number in range(1, cut * parts)]
    if not column or not bounds:
        return ChunkPlan((InputChunk(0, conditions=("1 = 1",)),), facts)
    inner = [f"{column} >= {low} AND {column} < {high}" for low, high in itertools.pairwise(bounds)]
    conditions = [f"{column} < {bounds[0]} OR {column} IS NULL", *inner, f"{column} >= {bounds[-1]}"]
    chunks = [InputChunk(at, conditions=tuple(conditions[at * parts : (at + 1) * parts])) for at in range(cut)]
    return ChunkPlan(chunks, facts)


def fingerprint(lines: Iterable[str]) -> str:
    """Return a short hash of some lines."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def default_run(*, table: str, source: str, address: str) -> str:
    """Return the name of a run by what it does, so that the same command resumes it."""
    return f"{source}-{fingerprint((table, source, address))}"


# -- files


class InputUnreadable(PipelineError):
    """The input cannot be read as described: the user has to correct the input or the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInput:
    """Files of a path, which may be a file, a directory or a glob pattern.

    `declared` are types for text in new columns; None if the files have types of their own.
    """

    format: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict)
    declared: StructType | None = None

    @property
    def address(self) -> str:
        """Return the path."""
        return self.path

    def plan(self, spark: SparkSession, config: BackfillConfig, facts: Mapping[str, Any] | None) -> ChunkPlan:
        """Group the files into chunks; with the facts of an earlier run, into the same ones.

        Raises:
            InputUnreadable: there are no files, or not those with which the run started.
        """
        # Spark leaves out names that start with a dot or an underscore.
        reader = spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        listed = reader.load(self.path).select("path", "length").collect()
        files = [InputFile(row["path"], row["length"]) for row in listed]
        if not files:
            raise InputUnreadable(f"no files found: path={self.path}")
        plan = plan_files(files, chunk_max_bytes=config.chunk_max_bytes)
        if facts is not None and plan.facts != facts:
            raise InputUnreadable(
                "files or chunk_max_bytes have changed since the run started, restore them or start another run with"
                f" --run: path={self.path} files={len(files)}"
            )
        return plan

    def columns(self, spark: SparkSession, plan: ChunkPlan) -> StructType:
        """Return the columns of all files; in formats without types all are text."""
        paths = [file.path for chunk in plan.chunks for file in chunk.files]
        if self.format == "csv":
            paths = paths[:1]  # of the others only the header matters, which is checked when they are read
        if self.declared is not None and self.format == "jsonl":
            return self.declared
        if self.declared is not None and self.options.get("header") == "false":
            from pyspark.sql.types import StringType, StructField, StructType  # noqa: PLC0415 - optional, as all of Spark

            return StructType([StructField(name, StringType()) for name in self.declared.names])
        found = self._load(self._reader(spark), paths).schema
        if _CORRUPT in found.names:
            raise InputUnreadable(f"some lines are not JSON objects: path={self.path}")
        if not found.fields:
            raise InputUnreadable(f"the input has no columns: path={self.path}")
        return found

    def read(self, spark: SparkSession, chunk: InputChunk, columns: StructType) -> DataFrame:
        """Read the files of a chunk."""
        return self._load(self._reader(spark).schema(columns), [file.path for file in chunk.files])

    def _reader(self, spark: SparkSession) -> DataFrameReader:
        # Spark would infer the types of directory names for each chunk.
        spark.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
        options: dict[str, str] = {"mode": "FAILFAST"} if self.format == "csv" or self.declared else {}
        if self.format == "csv":
            # RFC 4180: quotes are doubled inside quotes, and quoted values may span lines.
            options |= {"header": "true", "enforceSchema": "false", "escape": '"', "multiLine": "true"}
        elif self.format == "parquet":
            # All writers use the Gregorian calendar for old dates, except Spark 2, whose files record it.
            options |= {"mergeSchema": "true", "datetimeRebaseMode": "CORRECTED", "int96RebaseMode": "CORRECTED"}
        return spark.read.options(**{**options, **self.options})

    def _load(self, reader: DataFrameReader, paths: Sequence[str]) -> DataFrame:
        is_one_file = any(path.endswith(self.path) for path in paths)
        if not is_one_file and not _GLOB_SIGNS.intersection(self.path):
            reader = reader.option("basePath", self.path)
        if self.format == "parquet":
            return reader.parquet(*paths)
        return reader.csv(list(paths)) if self.format == "csv" else reader.json(list(paths))


# -- databases


@dataclass(frozen=True, slots=True, kw_only=True)
class JdbcInput:
    """A table of a database, or a query in brackets, divided by a column; one chunk without a column.

    `must_split`: the user has named the column, so it is an error if it cannot be used.
    """

    url: str
    table: str
    column: str = ""
    must_split: bool = True
    properties: Mapping[str, str] = field(default_factory=dict)
    declared: ClassVar[None] = None  # a database has types of its own

    @property
    def address(self) -> str:
        """Return the database without its parameters, which may contain a password, and the table."""
        bare = self.url.partition("?")[0].partition(";")[0]
        return f"{bare} {self.table}"

    def plan(self, spark: SparkSession, config: BackfillConfig, facts: Mapping[str, Any] | None) -> ChunkPlan:
        """Divide the range of keys into chunks; with the facts of an earlier run, into the same ones.

        Raises:
            InputUnreadable: the column does not contain whole numbers.
        """
        if facts is None:
            with _driver_errors(self.address):
                found = self._range(spark)
            facts = range_facts(*found, chunk_max_rows=config.chunk_max_rows, parallel_reads=config.parallel_reads)
        return plan_range(facts)

    def _range(self, spark: SparkSession) -> tuple[str, int, int, int] | tuple[()]:
        """Return column, lowest and highest key, and rows; empty if the table cannot be divided."""
        if not self.column:
            return ()
        ends = f"min({self.column}) AS low, max({self.column}) AS high, count(*) AS row_count"
        query = f"SELECT {ends} FROM {self.table} {_ALIAS}"
        low, high, rows = self._options(spark).option("query", query).load().collect()[0]
        if low is None:
            return ()
        if not isinstance(low, int | Decimal) or int(low) != low or int(high) != high:
            if not self.must_split:
                return ()
            raise InputUnreadable(f"--split-by needs a column of whole numbers: column={self.column} lowest={low}")
        return self.column, int(low), int(high), int(rows)

    def columns(self, spark: SparkSession, plan: ChunkPlan) -> StructType:
        """Return the table's columns from the database."""
        from pyspark.sql import types  # noqa: PLC0415 - optional, as all of Spark

        with _driver_errors(self.address):
            found = self.read(spark, plan.chunks[0], None).schema
            zoned = self._zoned_columns(
                spark, [each.name for each in found if each.dataType == types.TimestampNTZType()]
            )
        return types.StructType(
            [
                types.StructField(
                    each.name, types.TimestampType() if each.name in zoned else each.dataType, True, each.metadata
                )
                for each in found
            ]
        )

    def _zoned_columns(self, spark: SparkSession, names: Sequence[str]) -> set[str]:
        """Return the timestamp columns that have a zone: Spark does not distinguish PostgreSQL's two types."""
        if not names or not self.url.startswith(_POSTGRES):
            return set()
        columns = ", ".join(f'pg_typeof({_ALIAS}."{name}")::text AS c{at}' for at, name in enumerate(names))
        # LEFT JOIN, so that an empty table has the types of its first row as well.
        query = f"SELECT {columns} FROM (SELECT 1) one LEFT JOIN {self._selection} {_ALIAS} ON true LIMIT 1"
        shown = self._options(spark).option("query", query).load().collect()[0]
        return {name for name, type_ in zip(names, shown, strict=True) if type_ == _WITH_ZONE}

    def read(self, spark: SparkSession, chunk: InputChunk, columns: StructType | None) -> DataFrame:
        """Read a chunk, with one connection per condition."""
        properties = {"fetchsize": str(_FETCH_ROWS), "preferTimestampNTZ": "true", **self._properties}
        zoned = [each.name for each in columns or () if each.dataType.typeName() == "timestamp"]
        if zoned:
            properties.setdefault("customSchema", ", ".join(f"{quoted(name)} TIMESTAMP" for name in zoned))
        predicates = [f"({each})" for each in chunk.conditions]
        return spark.read.jdbc(self.url, f"{self._selection} {_ALIAS}", predicates=predicates, properties=properties)

    @property
    def _selection(self) -> str:
        """Return the table as a subquery, so that Spark's own conditions stay outside."""
        return self.table if self.table.startswith("(") else f"(SELECT * FROM {self.table})"

    def _options(self, spark: SparkSession) -> Any:
        return spark.read.format("jdbc").options(url=self.url, **self._properties)

    @property
    def _properties(self) -> dict[str, str]:
        driver = _DRIVERS.get(self.url.removeprefix("jdbc:").partition(":")[0])
        return {**({"driver": driver} if driver else {}), **self.properties}


Input = FileInput | JdbcInput


@contextmanager
def _driver_errors(address: str) -> Iterator[None]:
    try:
        yield
    except spark_errors() as error:
        if not any(mark in str(error) for mark in _NO_DRIVER):
            raise
        raise InputUnreadable(
            "no JDBC driver for this database, add it with --packages or --jar, and name its class with --driver:"
            f" address={address}"
        ) from error


# -- positions


# Sequences begin at 0.
BEFORE_ALL = Position(0, -1)

_POSITION = re.compile(r"(?:(\d+):)?(\d+)")


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """The position of the rows that are read: a fixed one, or the source's mark."""

    position: Position | None = None

    def resolve(self, mark: Position | None) -> Position:
        """Return the position of rows that are read now.

        Raises:
            SettingsError: the position is beyond the mark, so changes that are not committed yet would lose against the
            rows.
        """
        if self.position is None:
            return mark or BEFORE_ALL
        if self.position > (mark or BEFORE_ALL):
            raise SettingsError(
                "the table has not reached this position yet, wait until it has:"
                f" position={position_text(self.position)} mark={position_text(mark)}"
            )
        return self.position


def parse_position(text: str) -> ReadPosition:
    """Read `mark`, `start` or a position. Raise SettingsError for other texts."""
    if text == "mark":
        return ReadPosition()
    if text == "start":
        return ReadPosition(BEFORE_ALL)
    match = _POSITION.fullmatch(text)
    if match is None:
        raise SettingsError(f"--position must be mark, start or EPOCH:SEQUENCE: {text}")
    return ReadPosition(Position(int(match[1] or 0), int(match[2])))


def position_text(position: Position | None) -> str:
    """Write a position in the form of the option."""
    return "none" if position is None else f"{position.epoch}:{position.sequence}"
