"""What a backfill reads: files through Spark's readers. Owns their options, so that no row is lost or guessed at.

    Parquet      the union of the files' columns
    CSV          all text, by the files' headers, which have to be equal; a row with more or fewer fields is an error
    JSON lines   types of all values, found by reading all of it once; a line that is no JSON is an error

Directories such as `day=2026-11-16` become columns of text. Databases are in jdbc.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.backfill.plan import Chunk, InputFile, Plan, plan_files
from pipeline.backfill.settings import BackfillConfig
from pipeline.errors import ConfigError, PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

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

    Raises: ConfigError.
    """
    pairs = [option.partition("=") for option in options]
    if wrong := [option for option, (name, equals, _) in zip(options, pairs, strict=True) if not name or not equals]:
        raise ConfigError(f"--option is written NAME=VALUE: {wrong[0]}")
    return {name: value for name, _, value in pairs}
