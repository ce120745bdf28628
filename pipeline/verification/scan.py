"""Spark verification scan: reads a change table's files in Spark, for contract/verification.py to compare.

    row_hash      the hash of a row, as docs/verification.md defines it; writer/files/row_hash.py has it for Arrow
    tally_rows    rows counted as ledgers count them
    plan_reads    which version of the table shows the rows of which files whole
    verify_table  plan, scan, compare

This is for tables that one machine would read too long; the report is that of `lakefeed verify` without Spark. Nothing
is written. A file that cannot be read ends the scan: the report then names that file and Spark's error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sql

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation, SourceId
from lakefeed.contract.errors import TypeUnknown
from lakefeed.contract.ledger import CHECKSUM_MODULUS, Facts, RowFacts, join_facts
from lakefeed.contract.verification import (
    EXAMPLES_MAX,
    Duplicates,
    Finding,
    Kind,
    Plan,
    Range,
    Report,
    Scanned,
    compare,
    file_miscounted,
    plan,
)
from lakefeed.pipeline.spark.failures import message_of, spark_errors
from lakefeed.pipeline.spark.tables import (
    TableIdentifier,
    fields_of,
    load_metadata,
    names_by_id,
    quoted,
)

# Parts of the row hash: values longer than PART_BYTES are hashed in parts, decimals of up to LONG_DIGITS digits as one
# long. Iceberg reserves ids above LAST_FIELD_ID for columns that tables do not list, such as row ids in files.
PART_BYTES = 256
LONG_DIGITS = 18
LAST_FIELD_ID = 2_147_483_446

# Files whose rows differ from their manifest's count that are named; all are counted in their snapshot.
MISCOUNTED_SHOWN_MAX = 20

_AS_LONG = frozenset(("boolean", "int", "long"))
_MOMENTS = frozenset(("timestamp", "timestamptz"))
_BYTES = frozenset(("string", "binary"))

# Columns of tallies: a hash is summed in two halves, because a sum of whole ones would not fit a long.
SOURCE, OPERATION, ROWS, FIRST = "source", "operation", "rows", "first"
_LAST, _HIGH, _LOW, _HASH = "last", "high", "low", "hash"
_LOW_BITS = 32
_WIDE = "decimal(38, 0)"

# Columns of file lists, and values of Iceberg's metadata tables.
PATH, SNAPSHOT, RECORDS = "path", "snapshot_id", "records"
_FILE = "_file"
_ADDED, _DELETED = 1, 2
_DATA = 0

# Columns of the search for duplicates.
_READ_ROW, _COUNT, _RECEIPTS, _SURPLUS = "read_row", "count", "receipts", "surplus"
_KEY = (cdc.SOURCE, cdc.SEQUENCE, _READ_ROW)

_DATA_FILE = re.compile(r"[a-z0-9]+:/\S+?\.parquet")


def verify_table(
    spark: SparkSession,
    name: TableIdentifier,
    catalog: str,
    wanted: Range,
    *,
    on_step: Callable[[str], object] = lambda _: None,
) -> Report:
    """Verify a table as it is now. Other processes may commit to it meanwhile.

    Raises: MetadataUnavailable; CatalogError if there is no such snapshot; Spark's error if there is no such table.
    """
    table = name.sql(catalog)
    document = load_metadata(spark, table)
    on_step("comparing records")
    chosen = plan(str(name), document, wanted)
    return compare(chosen, _Scan(spark, table, document, chosen, on_step=on_step).run())


class _Scan:
    """One scan of one table, as of one version of its metadata."""

    def __init__(
        self,
        spark: SparkSession,
        table: str,
        document: Mapping[str, Any],
        chosen: Plan,
        *,
        on_step: Callable[[str], object],
    ) -> None:
        self._spark = spark
        self._table = table
        self._document = document
        self._plan = chosen
        self._on_step = on_step

    def run(self) -> Scanned:
        """Read all files that the plan asks for."""
        head = self._plan.head
        if head is None:
            return Scanned()
        scanned = Scanned()
        document = next(each for each in self._document["snapshots"] if each["snapshot-id"] == head.snapshot_id)
        if (document.get("summary") or {}).get("total-delete-files") != "0":
            count = f"SELECT count(*) FROM {self._table}.delete_files VERSION AS OF {head.snapshot_id}"
            scanned.delete_files = self._spark.sql(count).collect()[0][0]
        files = self._spark.sql(
            f"SELECT data_file.file_path AS {PATH}, {SNAPSHOT}, data_file.record_count AS {RECORDS}"
            f" FROM {self._table}.entries VERSION AS OF {head.snapshot_id}"
            f" WHERE status <> {_DELETED} AND data_file.content = {_DATA}"
        )
        if self._plan.is_part:
            files = files.where(files[SNAPSHOT].isin(*(each.snapshot_id for each in self._plan.snapshots)))
        files = files.cache()
        try:
            held = files.groupBy(SNAPSHOT).agg({RECORDS: "sum", PATH: "count"}).collect()
            scanned.files = sum(row[f"count({PATH})"] for row in held)
            scanned.live_rows = {row[SNAPSHOT]: row[f"sum({RECORDS})"] for row in held}
            self._read_rows(files, scanned)
            if not scanned.is_cut_short:
                scanned.gone = self._find_gone(files, scanned.live_rows)
        finally:
            files.unpersist()
        return scanned

    def _read_rows(self, files: DataFrame, scanned: Scanned) -> None:
        reads = plan_reads(self._document, [each.snapshot_id for each in self._plan.history])
        scanned.has_hidden_columns = not reads.are_whole
        self._on_step(f"counting {sum(scanned.live_rows.values()):,} rows")
        counted = self._tally_by_file(reads, files).cache()
        try:
            scanned.facts = self._facts_by_snapshot(counted, files, scanned)
            scanned.findings += self._find_miscounted(counted, files)
            self._on_step("looking for duplicates")
            rows = self._rows_of(files if self._plan.is_part else None, reads.scans[0])
            scanned.duplicates = find_duplicates(rows, self._plan.one_epoch)
        except spark_errors() as error:
            named = _DATA_FILE.search(str(error))
            if named is None:
                raise
            text = f"not a readable file of this table, nothing else was compared: {message_of(error)}"
            scanned.findings.append(Finding(Kind.UNREADABLE, text, file=named.group()))
            scanned.is_cut_short = True
        finally:
            counted.unpersist()

    def _tally_by_file(self, reads: Reads, files: DataFrame) -> DataFrame:
        """Count rows by file; files with columns that were dropped later are read by an older schema."""
        newest, *older = reads.scans
        elsewhere = frozenset[int]().union(*(read.snapshot_ids for read in older))
        rest = files if self._plan.is_part else None
        if elsewhere:
            rest = files.where(~files[SNAPSHOT].isin(*elsewhere))
        tallies = tally_rows(self._rows_of(rest, newest), newest.fields, by=(_FILE,))
        for read in older:
            own = files.where(files[SNAPSHOT].isin(*read.snapshot_ids))
            tallies = tallies.unionByName(tally_rows(self._rows_of(own, read), read.fields, by=(_FILE,)))
        return tallies

    def _rows_of(self, files: DataFrame | None, read: Read) -> DataFrame:
        """Return the rows of some files, or of all, as a version of the table shows them."""
        rows = self._spark.sql(f"SELECT *, {_FILE} FROM {self._table} VERSION AS OF {read.version}")
        if files is None:
            return rows
        wanted = files.select(files[PATH].alias(_FILE))
        return rows.join(sql.broadcast(wanted), on=_FILE, how="left_semi")

    def _facts_by_snapshot(self, counted: DataFrame, files: DataFrame, scanned: Scanned) -> dict[int, Facts]:
        joined = counted.join(files, counted[_FILE] == files[PATH], how="inner").select(SNAPSHOT, *counted.columns)
        # A file's sums fit a long; those of a snapshot with billions of rows may not.
        summed = joined.groupBy(SNAPSHOT, SOURCE, OPERATION).agg(
            sql.sum(ROWS).alias(ROWS),
            sql.min(FIRST).alias(FIRST),
            sql.max(_LAST).alias(_LAST),
            sql.sum(sql.col(_HIGH).cast(_WIDE)).alias(_HIGH),
            sql.sum(sql.col(_LOW).cast(_WIDE)).alias(_LOW),
        )
        groups: dict[int, list[Row]] = {}
        for row in summed.collect():
            scanned.rows += row[ROWS]
            if row[FIRST] is not None:  # rows of other writers may lack our columns
                groups.setdefault(row[SNAPSHOT], []).append(row)
        return {snapshot_id: facts_of(rows) for snapshot_id, rows in groups.items()}

    def _find_miscounted(self, counted: DataFrame, files: DataFrame) -> list[Finding]:
        rows = counted.groupBy(sql.col(_FILE).alias(PATH)).agg(sql.sum(ROWS).alias(ROWS))
        found = sql.coalesce(sql.col(ROWS), sql.lit(0))
        joined = files.join(rows, on=PATH, how="left").where(found != sql.col(RECORDS))
        return [
            file_miscounted(row[PATH], rows=row[ROWS] or 0, recorded=row[RECORDS], snapshot_id=row[SNAPSHOT])
            for row in joined.orderBy(PATH).limit(MISCOUNTED_SHOWN_MAX).collect()
        ]

    def _find_gone(self, live: DataFrame, live_rows: Mapping[int, int]) -> dict[int, set[str]]:
        """Find files that snapshots added, that are not live, and that no rewrite says it has replaced.

        One query for all snapshots: a compaction may have emptied hundreds.
        """
        short_ids = [each.snapshot_id for each in self._plan.short_of_rows(live_rows)]
        if not short_ids:
            return {}
        entries = self._spark.sql(
            f"SELECT DISTINCT {SNAPSHOT}, status, data_file.file_path AS {PATH} FROM {self._table}.all_entries"
            f" WHERE data_file.content = {_DATA} AND status IN ({_ADDED}, {_DELETED})"
        )
        rewrite_ids = [each.snapshot_id for each in self._plan.rewrites] or [-1]
        added = entries.where((entries["status"] == _ADDED) & entries[SNAPSHOT].isin(*short_ids))
        replaced = entries.where((entries["status"] == _DELETED) & entries[SNAPSHOT].isin(*rewrite_ids))
        gone = added.join(live.select(PATH), on=PATH, how="left_anti")
        found: dict[int, set[str]] = {}
        for row in gone.join(replaced.select(PATH), on=PATH, how="left_anti").collect():
            found.setdefault(row[SNAPSHOT], set()).add(row[PATH])
        return found


@dataclass(frozen=True, slots=True)
class Read:
    """One scan: a version of the table, its columns, and the snapshots whose files it reads; empty for all others."""

    version: int
    fields: Sequence[Mapping[str, Any]]
    snapshot_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reads:
    """All scans, and whether they show every column of every file."""

    scans: Sequence[Read]
    are_whole: bool


def plan_reads(document: Mapping[str, Any], snapshot_ids: Sequence[int]) -> Reads:
    """Plan the scans of a table as of the last of some snapshots, the oldest first; older ones may be expired.

    Spark reads rows by one schema. A dropped column is in the files and in what was recorded of them, but not in the
    newest schema: files from before are read as of the last snapshot that still had it.

        version 9, schema 2: id, name           all other files
        version 5, schema 1: id, name, price    files of snapshots 1 to 5
    """
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document["snapshots"]}
    schema_ids = {each: by_id[each].get("schema-id") for each in snapshot_ids}
    head = snapshot_ids[-1]
    newest = fields_of(document, schema_ids[head])
    shown = names_by_id(newest).keys()
    groups: dict[int, list[int]] = {}
    for snapshot_id, schema_id in schema_ids.items():
        if not names_by_id(fields_of(document, schema_id)).keys() <= shown:
            groups.setdefault(schema_id, []).append(snapshot_id)
    older = [Read(ids[-1], fields_of(document, schema_id), frozenset(ids)) for schema_id, ids in groups.items()]
    every = {field_id for schema in document["schemas"] for field_id in names_by_id(schema["fields"])}
    has_expired = by_id[snapshot_ids[0]].get("parent-snapshot-id") is not None
    return Reads((Read(head, newest), *older), are_whole=every <= shown or not has_expired)


def find_duplicates(rows: DataFrame, one_epoch: Collection[str]) -> dict[str, Duplicates]:
    """Find changes that exist more than once, by source. The rules are those of writer/verify.py.

    First a hash of the key leaves out the rows whose key exists once, which are nearly all, so that little is shuffled.
    """
    was_read = sql.col(cdc.OPERATION) == Operation.READ.value
    keys = rows.where(sql.col(cdc.SEQUENCE).isNotNull()).select(
        cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, sql.when(was_read, sql.col(cdc.ROW_ID)).alias(_READ_ROW)
    )
    hashed = keys.withColumn(_HASH, sql.xxhash64(*_KEY))
    repeated = hashed.groupBy(_HASH).agg(sql.count(sql.lit(1)).alias(_COUNT)).where(sql.col(_COUNT) > 1)
    suspects = hashed.join(repeated.select(_HASH), on=_HASH, how="left_semi").drop(_HASH).cache()
    received = suspects.groupBy(*_KEY, cdc.INGESTED_AT).agg(sql.count(sql.lit(1)).alias(_COUNT))
    counted = received.groupBy(*_KEY).agg(sql.sum(_COUNT).alias(_COUNT), sql.count(sql.lit(1)).alias(_RECEIPTS))
    is_once = sql.col(_READ_ROW).isNull() & (sql.col(cdc.SOURCE).isin(*one_epoch) if one_epoch else sql.lit(False))
    surplus = sql.col(_COUNT) - sql.when(is_once, 1).otherwise(sql.col(_RECEIPTS))
    doubled = counted.withColumn(_SURPLUS, surplus).where(sql.col(_SURPLUS) > 0).cache()
    try:
        if suspects.isEmpty():
            return {}
        found = {}
        for row in doubled.groupBy(cdc.SOURCE).agg(sql.sum(_SURPLUS).alias(_SURPLUS)).collect():
            own = doubled.where(sql.col(cdc.SOURCE) == row[cdc.SOURCE]).select(cdc.SEQUENCE).distinct()
            examples = [each[0] for each in own.orderBy(cdc.SEQUENCE).limit(EXAMPLES_MAX).collect()]
            found[row[cdc.SOURCE]] = Duplicates(row[_SURPLUS], examples)
        return found
    finally:
        doubled.unpersist()
        suspects.unpersist()


def tally_rows(rows: DataFrame, fields: Sequence[Mapping[str, Any]], *, by: Sequence[str | Column] = ()) -> DataFrame:
    """Count rows by source and operation, and by further columns; `fields` are the table's."""
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


def facts_of(groups: Iterable[Row]) -> dict[SourceId, RowFacts]:
    """Return the facts of the groups of a tally."""
    return join_facts(
        {
            SourceId(group[SOURCE]): RowFacts(
                rows=group[ROWS],
                first=group[FIRST],
                last=group[_LAST],
                operations={group[OPERATION]: group[ROWS]},
                checksum=((int(group[_HIGH]) << _LOW_BITS) + int(group[_LOW])) % CHECKSUM_MODULUS,
            )
        }
        for group in groups
    )


def row_hash(fields: Sequence[Mapping[str, Any]]) -> Column:
    """Return the hash of a row, by the field ids of its table's Iceberg schema. Raise TypeUnknown for unknown types."""
    return sql.xxhash64(_joined(fields, lambda name: sql.col(quoted(name))))


def _joined(fields: Sequence[Mapping[str, Any]], value_of: Callable[[str], Column]) -> Column:
    """Combine what several fields add to the hash of their row."""
    joined = _long(0)
    for field in fields:
        if field["id"] <= LAST_FIELD_ID:
            joined = joined.bitwiseXOR(_added(field["id"], field["type"], value_of(field["name"])))
    return joined


def _added(field_id: int, type_: Any, value: Column) -> Column:
    """Return what a field adds to the hash of its row; nulls add nothing."""
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
    """Hash text or bytes; long ones in parts, which cost more."""
    data = value.cast("binary")
    size = sql.octet_length(data)
    last = sql.floor((size - 1) / PART_BYTES).cast("int")
    parts = sql.transform(
        sql.sequence(sql.lit(0), sql.greatest(last, sql.lit(0))),
        lambda i: sql.xxhash64(f, i.cast("long"), _whole_words(data.substr(i * PART_BYTES + 1, sql.lit(PART_BYTES)))),
    )
    return sql.when(size <= PART_BYTES, sql.xxhash64(f, _whole_words(data))).otherwise(_xor_of(parts, _long(0)))


def _whole_words(data: Column) -> Column:
    """Pad bytes to words of eight: before them, the length of the odd part and zeros."""
    leads = sql.array(*(sql.lit(bytes([odd]) + bytes(7 - odd)) for odd in range(8)))
    return sql.concat(sql.element_at(leads, sql.octet_length(data) % 8 + 1), data)


def _added_by_decimal(f: Column, kind: str, value: Column) -> Column:
    """Hash a decimal: Spark hashes up to 18 digits as an unscaled long, more as bytes."""
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
