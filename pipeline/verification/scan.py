"""Verifies a change table in Spark: its records against one another, its files against its records. Owns the order.

    1. records     ledgers, marks and totals agree          writer/verification/history.py, as without Spark
    2. files       rows are counted by file, in one scan    tally.py, reads.py
    3. snapshots   of each append whose files are all live: ledger = files
    4. totals      of the newest snapshot: totals = all files
    5. duplicates  no change twice                          duplicates.py

The report is that of `lakefeed verify` without Spark, for tables that one machine would read too long. Nothing is
written. A file that cannot be read ends the scan: the report then names that file and what Spark says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sql

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation, SourceId
from lakefeed.contract.ledger import (
    TOTALS_PROPERTY,
    LedgerUnreadable,
    RowFacts,
    Totals,
    count_backfilled,
    join_facts,
    totals_from_text,
)
from lakefeed.contract.progress import PROGRESS_PROPERTY, Progress, progress_from_text
from lakefeed.contract.verification import (
    Finding,
    History,
    Kind,
    Recorded,
    Report,
    State,
    check_history,
    choose_after,
    compare_ledger,
    compare_whole,
    describe_gone,
    read_history,
    sources_of_one_epoch,
)
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.tables import TableName, current_fields, field_ids, fields_of, load_document

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.verification.row_hash -----------------------------------------------------------------------------------
#
# The hash of a row as Spark computes it, from built-in functions alone. Owns the expression.
#
# The definition is docs/verification.md's, and writer/verification/row_hash.py has it for Arrow: both give the same
# number for the same row. `x64` is Spark's `xxhash64` on longs, text and bytes. Fields are those of the table's Iceberg
# schema as its JSON has them, because the hash goes by field ids.


# Longer values are hashed in parts.
PART_BYTES = 256
# Decimals of so many digits are hashed as one long.
LONG_DIGITS = 18
# Iceberg keeps the ids above for columns that tables do not list, such as row ids in files.
LAST_FIELD_ID = 2_147_483_446

# What adds itself, as a long or as it is.
_AS_LONG = frozenset(("boolean", "int", "long"))
_MOMENTS = frozenset(("timestamp", "timestamptz"))
_BYTES = frozenset(("string", "binary"))


class TypeUnknown(ValueError):
    """A column has a type that Spark has none for: its rows cannot be hashed here."""


def row_hash(fields: Sequence[Mapping[str, Any]]) -> Column:
    """Hash a row of the table whose columns these are.

    Raises: TypeUnknown.
    """
    return sql.xxhash64(_joined(fields, lambda name: sql.col(f"`{name.replace('`', '``')}`")))


def _joined(fields: Sequence[Mapping[str, Any]], value_of: Callable[[str], Column]) -> Column:
    """Put together what several fields add to their row."""
    joined = _long(0)
    for field in fields:
        if field["id"] <= LAST_FIELD_ID:
            joined = joined.bitwiseXOR(_added(field["id"], field["type"], value_of(field["name"])))
    return joined


def _added(field_id: int, type_: Any, value: Column) -> Column:
    """Say what a field adds to its row; nulls add nothing."""
    return sql.when(value.isNull(), _long(0)).otherwise(_added_by_value(_long(field_id), type_, value))


def _added_by_value(f: Column, type_: Any, value: Column) -> Column:
    if isinstance(type_, Mapping):
        return _added_by_parts(f, type_, value)
    kind = str(type_)
    if kind in _AS_LONG:
        return sql.xxhash64(f, value.cast("long"))
    if kind in ("float", "double"):
        return sql.xxhash64(f, value.cast("double"))
    if kind in _MOMENTS:
        return sql.xxhash64(f, value)
    if kind == "date":
        return sql.xxhash64(f, sql.unix_date(value).cast("long"))
    if kind.startswith("decimal"):
        return _added_by_decimal(f, kind, value)
    if kind == "uuid":
        return sql.xxhash64(f, _whole_words(sql.unhex(sql.regexp_replace(value, "-", ""))))
    if kind in _BYTES or kind.startswith("fixed"):
        return _added_by_bytes(f, value)
    raise TypeUnknown(f"no hash in Spark for a column of this type: type={kind}")


def _added_by_bytes(f: Column, value: Column) -> Column:
    """Hash text or bytes, long ones in parts. The parts cost more, so that only long values take that way."""
    data = value.cast("binary")
    size = sql.octet_length(data)
    last = sql.floor((size - 1) / PART_BYTES).cast("int")
    parts = sql.transform(
        sql.sequence(sql.lit(0), sql.greatest(last, sql.lit(0))),
        lambda i: sql.xxhash64(f, i.cast("long"), _whole_words(data.substr(i * PART_BYTES + 1, sql.lit(PART_BYTES)))),
    )
    return sql.when(size <= PART_BYTES, sql.xxhash64(f, _whole_words(data))).otherwise(_xor_of(parts, _long(0)))


def _whole_words(data: Column) -> Column:
    """Make bytes up to words of eight: in front, how many the first one has, and zeros."""
    leads = sql.array(*(sql.lit(bytes([odd]) + bytes(7 - odd)) for odd in range(8)))
    return sql.concat(sql.element_at(leads, sql.octet_length(data) % 8 + 1), data)


def _added_by_decimal(f: Column, kind: str, value: Column) -> Column:
    """Hash a decimal. Of a type of up to 18 digits Spark takes the unscaled value as a long, of others its bytes."""
    precision, scale = (int(part) for part in kind.rstrip(")").partition("(")[2].split(","))
    as_long = sql.xxhash64(f, value.cast(f"decimal({LONG_DIGITS}, {min(scale, LONG_DIGITS)})"))
    as_bytes = sql.xxhash64(f, value.cast(f"decimal(38, {scale})"))
    if precision <= LONG_DIGITS:
        return as_long
    if scale > LONG_DIGITS:
        return as_bytes
    return sql.when(sql.abs(value) < sql.lit(Decimal(10 ** (LONG_DIGITS - scale))), as_long).otherwise(as_bytes)


def _added_by_parts(f: Column, type_: Mapping[str, Any], value: Column) -> Column:
    match type_:
        case {"type": "struct", "fields": fields}:
            return sql.xxhash64(f, _long(1)).bitwiseXOR(_joined(fields, value.getField))
        case {"type": "list", "element-id": element_id, "element": element}:
            added = sql.transform(
                value, lambda each, i: sql.xxhash64(_added(element_id, element, each), i.cast("long"))
            )
        case {"type": "map", "key-id": key_id, "key": key, "value-id": value_id, "value": item}:
            added = sql.transform(
                sql.map_entries(value),
                lambda entry: sql.xxhash64(
                    _added(key_id, key, entry["key"]).bitwiseXOR(_added(value_id, item, entry["value"]))
                ),
            )
        case _:
            raise TypeUnknown(f"no hash in Spark for a column of this type: type={type_.get('type')}")
    return _xor_of(added, sql.xxhash64(f, sql.size(value).cast("long")))


def _xor_of(parts: Column, first: Column) -> Column:
    return sql.aggregate(parts, first, lambda left, right: left.bitwiseXOR(right))


def _long(number: int) -> Column:
    return sql.lit(number).cast("long")


# --- pipeline.verification.tally --------------------------------------------------------------------------------------
#
# Counts rows as ledgers do, in Spark. Owns the aggregation, and how its groups become facts.


SOURCE, OPERATION, ROWS, FIRST = "source", "operation", "rows", "first"
_LAST, _HIGH, _LOW, _HASH = "last", "high", "low", "hash"
_MODULUS = 1 << 64
_LOW_BITS = 32
_WIDE = "decimal(38, 0)"


def tally_rows(rows: DataFrame, fields: Sequence[Mapping[str, Any]], *, by: Sequence[str | Column] = ()) -> DataFrame:
    """Count rows by their source and operation, and by what else is asked for; fields are the table's.

    Hashes are summed in two halves, because a sum of whole ones would not fit a long.
    """
    slim = rows.select(
        *by,
        sql.col(cdc.SOURCE).alias(SOURCE),
        sql.col(cdc.OPERATION).alias(OPERATION),
        sql.col(cdc.SEQUENCE),
        row_hash(fields).alias(_HASH),
    )
    names = slim.columns[: len(by)]
    return slim.groupBy(*names, SOURCE, OPERATION).agg(
        sql.count(sql.lit(1)).alias(ROWS),
        sql.min(cdc.SEQUENCE).alias(FIRST),
        sql.max(cdc.SEQUENCE).alias(_LAST),
        sql.sum(sql.shiftright(_HASH, _LOW_BITS)).alias(_HIGH),
        sql.sum(sql.col(_HASH).bitwiseAND(sql.lit((1 << _LOW_BITS) - 1))).alias(_LOW),
    )


def add_tallies(tallies: DataFrame, *, by: Sequence[str]) -> DataFrame:
    """Add up tallies that were made by more than `by`; a file's sums fit a long, those of billions of rows may not."""
    return tallies.groupBy(*by, SOURCE, OPERATION).agg(
        sql.sum(ROWS).alias(ROWS),
        sql.min(FIRST).alias(FIRST),
        sql.max(_LAST).alias(_LAST),
        sql.sum(sql.col(_HIGH).cast(_WIDE)).alias(_HIGH),
        sql.sum(sql.col(_LOW).cast(_WIDE)).alias(_LOW),
    )


def facts_of(groups: Iterable[Row]) -> dict[SourceId, RowFacts]:
    """Make facts of the groups of a tally."""
    return join_facts({SourceId(group[SOURCE]): _facts(group)} for group in groups)


def _facts(group: Row) -> RowFacts:
    return RowFacts(
        rows=group[ROWS],
        first=group[FIRST],
        last=group[_LAST],
        operations={group[OPERATION]: group[ROWS]},
        checksum=((int(group[_HIGH]) << _LOW_BITS) + int(group[_LOW])) % _MODULUS,
    )


# --- pipeline.verification.duplicates ---------------------------------------------------------------------------------
#
# Looks for changes that are in a table more than once, in Spark. Owns the query.
#
# The rules are those of writer/verification/duplicates.py: a sequence is there once of a source that never started
# over,
# once at any moment of receipt of others; rows that were only READ are there once at any moment.


# Sequences that a report names of each source; all are counted.
EXAMPLES_MAX = 10

_READ_ROW, _COUNT, _DUPLICATES_MOMENTS, _AGAIN, _DUPLICATES_HASH = "read_row", "count", "moments", "again", "hash"
_KEY = (cdc.SOURCE, cdc.SEQUENCE, _READ_ROW)


def find_duplicates(rows: DataFrame, one_epoch: Collection[str]) -> Iterator[Finding]:
    """Find changes that are there again; `one_epoch` names the sources that never started over."""
    suspects = _suspects(rows).cache()
    doubled = _doubled(suspects, one_epoch).cache()
    try:
        if suspects.isEmpty():
            return
        counts = doubled.groupBy(cdc.SOURCE).agg(sql.sum(_AGAIN).alias(_AGAIN)).orderBy(cdc.SOURCE).collect()
        for row in counts:
            own = doubled.where(sql.col(cdc.SOURCE) == row[cdc.SOURCE]).select(cdc.SEQUENCE).distinct()
            shown = ", ".join(str(each[0]) for each in own.orderBy(cdc.SEQUENCE).limit(EXAMPLES_MAX).collect())
            text = f"{row[_AGAIN]:,} rows are there again, such as sequences {shown}"
            yield Finding(Kind.DUPLICATE, text, source=row[cdc.SOURCE])
    finally:
        doubled.unpersist()
        suspects.unpersist()


def _suspects(rows: DataFrame) -> DataFrame:
    """Leave out the rows whose key is there once, which are nearly all: by a hash, so that little is moved about."""
    was_read = sql.col(cdc.OPERATION) == Operation.READ.value
    keys = rows.where(sql.col(cdc.SEQUENCE).isNotNull()).select(
        cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, sql.when(was_read, sql.col(cdc.ROW_ID)).alias(_READ_ROW)
    )
    hashed = keys.withColumn(_DUPLICATES_HASH, sql.xxhash64(*_KEY))
    again = hashed.groupBy(_DUPLICATES_HASH).agg(sql.count(sql.lit(1)).alias(_COUNT)).where(sql.col(_COUNT) > 1)
    return hashed.join(again.select(_DUPLICATES_HASH), on=_DUPLICATES_HASH, how="left_semi").drop(_DUPLICATES_HASH)


def _doubled(keys: DataFrame, one_epoch: Collection[str]) -> DataFrame:
    moments = keys.groupBy(*_KEY, cdc.INGESTED_AT).agg(sql.count(sql.lit(1)).alias(_COUNT))
    counted = moments.groupBy(*_KEY).agg(
        sql.sum(_COUNT).alias(_COUNT), sql.count(sql.lit(1)).alias(_DUPLICATES_MOMENTS)
    )
    is_once = sql.col(_READ_ROW).isNull() & (sql.col(cdc.SOURCE).isin(*one_epoch) if one_epoch else sql.lit(False))
    again = sql.col(_COUNT) - sql.when(is_once, 1).otherwise(sql.col(_DUPLICATES_MOMENTS))
    return counted.withColumn(_AGAIN, again).where(sql.col(_AGAIN) > 0)


# --- pipeline.verification.live_files ---------------------------------------------------------------------------------
#
# The data files of snapshots, from Iceberg's metadata tables. Owns the queries.
#
# A file's snapshot is the one that added it. Snapshots that a compaction has emptied are looked up in one query over
# all
# of them, because there may be hundreds.


PATH, SNAPSHOT, RECORDS = "path", "snapshot_id", "records"

_ADDED, _DELETED = 1, 2
_DATA = 0


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a snapshot is part of the table: rows, by the manifests, and files."""

    rows: int
    files: int


def live_files(spark: SparkSession, table: str, version: int) -> DataFrame:
    """Give the data files of a version: path, snapshot and how many records the manifest says."""
    return spark.sql(
        f"SELECT data_file.file_path AS {PATH}, {SNAPSHOT}, data_file.record_count AS {RECORDS}"
        f" FROM {table}.entries VERSION AS OF {version} WHERE status <> {_DELETED} AND data_file.content = {_DATA}"
    )


def count_delete_files(spark: SparkSession, table: str, version: int) -> int:
    """Count the delete files of a version."""
    found = spark.sql(f"SELECT count(*) FROM {table}.delete_files VERSION AS OF {version}").collect()
    count: int = found[0][0]
    return count


def held_by_snapshot(files: DataFrame) -> dict[int, Held]:
    """Count what is left of each snapshot."""
    rows = files.groupBy(SNAPSHOT).agg({RECORDS: "sum", PATH: "count"}).collect()
    return {row[SNAPSHOT]: Held(row[f"sum({RECORDS})"], row[f"count({PATH})"]) for row in rows}


def find_gone(
    spark: SparkSession, table: str, *, live: DataFrame, snapshot_ids: Collection[int], rewrite_ids: Collection[int]
) -> dict[int, set[str]]:
    """Find files that snapshots have added, that are not live, and that no rewrite says it has replaced."""
    if not snapshot_ids:
        return {}
    entries = spark.sql(
        f"SELECT DISTINCT {SNAPSHOT}, status, data_file.file_path AS {PATH} FROM {table}.all_entries"
        f" WHERE data_file.content = {_DATA} AND status IN ({_ADDED}, {_DELETED})"
    )
    added = entries.where((entries["status"] == _ADDED) & entries[SNAPSHOT].isin(*snapshot_ids))
    removed = entries.where((entries["status"] == _DELETED) & entries[SNAPSHOT].isin(*(rewrite_ids or [-1])))
    gone = added.join(live.select(PATH), on=PATH, how="left_anti").join(removed.select(PATH), on=PATH, how="left_anti")
    found: dict[int, set[str]] = {}
    for row in gone.collect():
        found.setdefault(row[SNAPSHOT], set()).add(row[PATH])
    return found


# --- pipeline.verification.reads --------------------------------------------------------------------------------------
#
# What a verification reads from a table. Owns which version of it shows the rows of which files whole.
#
# Spark reads rows by one schema. A column that was dropped is in the files and in what was recorded of them, but not in
# the newest schema: files from before are read as of the last snapshot that still had it.
#
#     version 9, schema 2: id, name           all other files
#     version 5, schema 1: id, name, price    files of snapshots 1 to 5


@dataclass(frozen=True, slots=True)
class Read:
    """One scan: the version, its columns, and of whose files; of no snapshots' in particular, of all that are left."""

    version: int
    fields: Sequence[Mapping[str, Any]]
    snapshot_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reads:
    """All scans, and whether they show every column of every file."""

    scans: Sequence[Read]
    are_whole: bool


def plan_reads(document: Mapping[str, Any], snapshot_ids: Sequence[int]) -> Reads:
    """Plan the scans of a table as of the last of some snapshots, the oldest first; older ones may be expired."""
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    schema_ids = {each: by_id[each].get("schema-id") for each in snapshot_ids}
    head = snapshot_ids[-1]
    newest = _fields(document, schema_ids[head])
    shown = field_ids(newest)
    groups: dict[int, list[int]] = {}
    for snapshot_id, schema_id in schema_ids.items():
        if not field_ids(_fields(document, schema_id)) <= shown:
            groups.setdefault(schema_id, []).append(snapshot_id)
    older = [Read(ids[-1], _fields(document, schema_id), frozenset(ids)) for schema_id, ids in groups.items()]
    every = {field_id for schema in document["schemas"] for field_id in field_ids(schema["fields"])}
    has_expired = by_id[snapshot_ids[0]].get("parent-snapshot-id") is not None
    return Reads((Read(head, newest), *older), are_whole=every <= shown or not has_expired)


def _fields(document: Mapping[str, Any], schema_id: int | None) -> Sequence[Mapping[str, Any]]:
    return current_fields(document) if schema_id is None else fields_of(document, schema_id)


# --- pipeline.verification.verifier -----------------------------------------------------------------------------------


# Files with other numbers of rows than their manifest says that are named; all are counted in their snapshot.
MISCOUNTED_SHOWN_MAX = 20

_FILE = "_file"
_DATA_FILE = re.compile(r"[a-z0-9]+:/\S+?\.parquet")
_NOT_WHOLE = (
    "columns were dropped, and snapshots from before are expired: verify the table without --spark, rows are not"
    " compared with the totals"
)


class SparkVerifier:
    """One verification of one table, as of one version of its metadata."""

    def __init__(
        self,
        spark: SparkSession,
        table: str,
        document: Mapping[str, Any],
        *,
        name: str,
        on_step: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.report = Report(name)
        self._spark = spark
        self._table = table
        self._document = document
        self._properties: Mapping[str, str] = document.get("properties") or {}
        self._progress: Progress = progress_from_text(self._properties.get(PROGRESS_PROPERTY))
        self._on_step = on_step
        self._totals = self._read_totals()

    def _read_totals(self) -> Totals | None:
        try:
            return totals_from_text(self._properties.get(TOTALS_PROPERTY))
        except LedgerUnreadable as error:
            self.report.findings.append(Finding(Kind.UNREADABLE, str(error)))
            return None

    def run(self, *, after_id: int | None = None, to_id: int | None = None) -> Report:
        """Check the records, read all files and compare.

        Raises:
            CatalogError: the table has no such snapshot.
        """
        main_id = ((self._document.get("refs") or {}).get("main") or {}).get("snapshot-id")
        head_id = to_id if to_id is not None else main_id
        self.report.snapshot_id = head_id
        if head_id is None:
            empty = count_backfilled(self._properties, (), known_after={None})
            compare_whole(self.report, self._totals, empty, is_whole=True)
            return self.report
        self._on_step("comparing records")
        history = read_history(self._document, head_id)
        is_whole = after_id is None and head_id == main_id
        self.report.findings += check_history(history, self._progress, self._totals if is_whole else None)
        self._check_delete_files(head_id)
        chosen = choose_after(history, after_id)
        files = live_files(self._spark, self._table, head_id)
        if after_id is not None:
            files = files.where(files[SNAPSHOT].isin(*(each.snapshot_id for each in chosen)))
        files = files.cache()
        try:
            self._check_files(history, chosen, files, is_part=after_id is not None, is_whole=is_whole)
        finally:
            files.unpersist()
        return self.report

    def _check_delete_files(self, head_id: int) -> None:
        head = next(each for each in self._document["snapshots"] if each["snapshot-id"] == head_id)
        if (head.get("summary") or {}).get("total-delete-files") == "0":
            return
        count = count_delete_files(self._spark, self._table, head_id)
        if count:
            text = f"rows are deleted by delete files of somebody else: delete_files={count}"
            self.report.findings.append(Finding(Kind.LOSS, text, head_id))

    def _check_files(
        self, history: History, chosen: Sequence[Recorded], files: DataFrame, *, is_part: bool, is_whole: bool
    ) -> None:
        held = held_by_snapshot(files)
        self.report.files = sum(each.files for each in held.values())
        reads = plan_reads(self._document, [each.snapshot_id for each in history.snapshots])
        self._on_step(f"counting {sum(each.rows for each in held.values()):,} rows")
        counted = self._by_file(reads, files, is_part=is_part).cache()
        try:
            by_snapshot = self._facts_by_snapshot(counted, files)
            self._note_miscounted(counted, files)
            self._on_step("looking for duplicates")
            rows = self._of(files if is_part else None, reads.scans[0])
            one_epoch = sources_of_one_epoch(self._progress, self._totals)
            self.report.findings += find_duplicates(rows, one_epoch)
        except Exception as error:  # noqa: BLE001 - raised again unless it is a file that cannot be read
            self._note_unreadable(error)
            return
        finally:
            counted.unpersist()
        self._check_snapshots(history, chosen, files, held=held, by_snapshot=by_snapshot)
        self._compare_totals(history, by_snapshot, is_whole=is_whole, are_whole=reads.are_whole)

    # -- rows

    def _by_file(self, reads: Reads, files: DataFrame, *, is_part: bool) -> DataFrame:
        """Count rows by file, those of dropped columns by an older schema."""
        newest, *older = reads.scans
        elsewhere = frozenset[int]().union(*(read.snapshot_ids for read in older))
        rest = files if is_part else None
        if elsewhere:
            rest = files.where(~files[SNAPSHOT].isin(*elsewhere))
        tallies = tally_rows(self._of(rest, newest), newest.fields, by=(_FILE,))
        for read in older:
            own = files.where(files[SNAPSHOT].isin(*read.snapshot_ids))
            tallies = tallies.unionByName(tally_rows(self._of(own, read), read.fields, by=(_FILE,)))
        return tallies

    def _of(self, files: DataFrame | None, read: Read) -> DataFrame:
        """Give the rows of some files or of all, as a version of the table shows them."""
        rows = self._spark.sql(f"SELECT *, {_FILE} FROM {self._table} VERSION AS OF {read.version}")
        if files is None:
            return rows
        wanted = files.select(files[PATH].alias(_FILE))
        return rows.join(sql.broadcast(wanted), on=_FILE, how="left_semi")

    def _facts_by_snapshot(self, counted: DataFrame, files: DataFrame) -> dict[int, dict[SourceId, RowFacts]]:
        joined = counted.join(files, counted[_FILE] == files[PATH], how="inner").select(SNAPSHOT, *counted.columns)
        groups: dict[int, list[Any]] = {}
        for row in add_tallies(joined, by=(SNAPSHOT,)).collect():
            self.report.rows += row[ROWS]
            if row[FIRST] is not None:  # rows of others may lack what ours have
                groups.setdefault(row[SNAPSHOT], []).append(row)
        return {snapshot_id: facts_of(rows) for snapshot_id, rows in groups.items()}

    def _note_miscounted(self, counted: DataFrame, files: DataFrame) -> None:
        """Tell of files that hold other numbers of rows than their manifest says."""
        rows = counted.groupBy(sql.col(_FILE).alias(PATH)).agg(sql.sum(ROWS).alias(ROWS))
        found = sql.coalesce(sql.col(ROWS), sql.lit(0))
        joined = files.join(rows, on=PATH, how="left").where(found != sql.col(RECORDS))
        for row in joined.orderBy(PATH).limit(MISCOUNTED_SHOWN_MAX).collect():
            count = row[ROWS] or 0
            kind = Kind.LOSS if count < row[RECORDS] else Kind.SURPLUS
            text = f"file has {count:,} rows, its manifest says {row[RECORDS]:,}"
            self.report.findings.append(Finding(kind, text, row[SNAPSHOT], file=row[PATH]))

    def _note_unreadable(self, error: Exception) -> None:
        """Tell of a data file that Spark cannot read; any other failure is no finding but an error."""
        named = _DATA_FILE.search(str(error)) if is_spark_error(error) else None
        if named is None:
            raise error
        text = f"not a readable file of this table, nothing else was compared: {message_of(error)}"
        self.report.findings.append(Finding(Kind.UNREADABLE, text, file=named.group()))

    # -- comparing

    def _check_snapshots(
        self,
        history: History,
        chosen: Sequence[Recorded],
        files: DataFrame,
        *,
        held: Mapping[int, Held],
        by_snapshot: Mapping[int, Mapping[SourceId, RowFacts]],
    ) -> None:
        nothing = Held(0, 0)
        short = [
            each.snapshot_id
            for each in chosen
            if each.ledger is not None and held.get(each.snapshot_id, nothing).rows < each.ledger.rows
        ]
        rewrites = [each.snapshot_id for each in history.snapshots if each.is_rewrite]
        gone = find_gone(self._spark, self._table, live=files, snapshot_ids=short, rewrite_ids=rewrites)
        for each in chosen:
            self.report.snapshots[each.snapshot_id] = self._check_snapshot(
                each,
                by_snapshot.get(each.snapshot_id, {}),
                gone=gone.get(each.snapshot_id, set()),
                is_short=each.snapshot_id in short,
            )

    def _check_snapshot(
        self, snapshot: Recorded, found: Mapping[SourceId, RowFacts], *, gone: set[str], is_short: bool
    ) -> State:
        if not snapshot.is_own or not snapshot.is_append:
            return State.REWRITE if snapshot.is_rewrite else State.FOREIGN
        if snapshot.ledger is None:
            return State.NOT_RECORDED
        if gone:
            self.report.findings.append(describe_gone(gone, snapshot_id=snapshot.snapshot_id))
        elif is_short:
            return State.REWRITTEN
        differences = list(compare_ledger(snapshot.ledger.facts, found, snapshot_id=snapshot.snapshot_id))
        self.report.findings += differences
        return State.DIFFERENT if differences else State.VERIFIED

    def _compare_totals(
        self,
        history: History,
        by_snapshot: Mapping[int, Mapping[SourceId, RowFacts]],
        *,
        is_whole: bool,
        are_whole: bool,
    ) -> None:
        foreign = {each.snapshot_id for each in history.snapshots if each.is_append and not each.is_own}
        self.report.facts = join_facts(facts for each, facts in by_snapshot.items() if each not in foreign)
        if is_whole and not are_whole:
            self.report.notes.append(_NOT_WHOLE)
            return
        chunks = ((each.chunk, each.ledger) for each in history.snapshots)
        backfilled = count_backfilled(self._properties, chunks, known_after=history.known_after)
        compare_whole(self.report, self._totals, backfilled, is_whole=is_whole)


def open_verifier(
    spark: SparkSession, name: TableName, catalog: str, *, on_step: Callable[[str], object] = lambda _: None
) -> SparkVerifier:
    """Open a table to verify it as it is now, beside whoever commits to it.

    Raises: NoDocument; what Spark says of a table that is not there.
    """
    table = name.sql(catalog)
    return SparkVerifier(spark, table, load_document(spark, table), name=str(name), on_step=on_step)
