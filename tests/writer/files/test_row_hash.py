"""A row's hash is what docs/verification.md defines, whatever way its values came into memory."""

from __future__ import annotations

import datetime as dt
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType
from lakefeed.writer.files.row_hash import BLOCK_ROWS, hash_rows
from lakefeed.writer.files.xxh64 import LEAD_BYTES, TRAIL_BYTES, Scratch, hash_longs, hash_short_slices, hash_texts
from tests.writer.files.reference import made_up, row_hash, x64, xxh64

DOCS = Path(__file__).parents[3] / "docs" / "verification.md"

FIELDS = (
    Field(1, "truth", "boolean"),
    Field(2, "small", "int"),
    Field(3, "large", "long"),
    Field(4, "single", "float"),
    Field(5, "real", "double"),
    Field(6, "money", "decimal(9,2)"),
    Field(7, "vast", "decimal(38,4)"),
    Field(28, "tiny", "decimal(38,20)"),
    Field(8, "words", "string"),
    Field(9, "bytes", "binary"),
    Field(10, "block", "fixed[5]"),
    Field(11, "day", "date"),
    Field(12, "hour", "time"),
    Field(13, "clock", "timestamp"),
    Field(14, "moment", "timestamptz"),
    Field(15, "line", StructType((Field(16, "sku", "string"), Field(17, "count", "int")))),
    Field(18, "tags", ListType(19, "string")),
    Field(20, "lines", ListType(21, StructType((Field(22, "sku", "string"), Field(23, "sizes", ListType(24, "int")))))),
    Field(25, "rates", MapType(26, "string", 27, "double")),
)
LONG_ENDS = (10**18 - 1, 10**18, 2**63 - 1, 2**63)  # where a long ends and bytes begin
MAKERS = {
    "truth": lambda r: r.random() < 0.5,
    "small": lambda r: r.randint(-(2**31), 2**31 - 1),
    "large": lambda r: r.randint(-(2**63), 2**63 - 1),
    "single": lambda r: float(np.float32(r.choice([r.uniform(-1e9, 1e9), float("nan"), -0.0]))),
    "real": lambda r: r.choice([r.uniform(-1e300, 1e300), float("inf"), -0.0]),
    "money": lambda r: Decimal(f"{r.randint(-999_999_999, 999_999_999)}e-2"),
    "vast": lambda r: Decimal(f"{r.choice([-1, 1]) * r.choice([r.getrandbits(r.randint(0, 125)), *LONG_ENDS])}e-4"),
    "tiny": lambda r: Decimal(f"{r.choice([-1, 1]) * r.getrandbits(r.randint(0, 90))}e-20"),
    "words": lambda r: "".join(r.choice("aZ09 é☂") for _ in range(r.choice([0, 1, 7, 8, 15, 31, 33, 90, 700]))),
    "bytes": lambda r: r.randbytes(r.choice([0, 3, 4, 5, 12, 32, 64, 255, 256, 257, 512, 513])),
    "block": lambda r: r.randbytes(5),
    "day": lambda r: dt.date(1582, 10, 4) + dt.timedelta(days=r.randint(0, 300_000)),
    "hour": lambda r: dt.time(r.randint(0, 23), 59, 1, r.randint(0, 999_999)),
    "clock": lambda r: dt.datetime(1969, 12, 31) + dt.timedelta(microseconds=r.randint(0, 2**50)),
    "moment": lambda r: dt.datetime(2026, 11, 16, tzinfo=dt.UTC) + dt.timedelta(microseconds=r.randint(0, 2**40)),
    "line": lambda r: {"sku": r.choice([None, "a"]), "count": r.choice([None, 3])},
    "tags": lambda r: [r.choice([None, "", "x", "long" * 20]) for _ in range(r.randint(0, 4))],
    "lines": lambda r: [r.choice([None, {"sku": "a", "sizes": [1, None, 3]}]) for _ in range(r.randint(0, 3))],
    "rates": lambda r: [(key, r.choice([None, 1.5])) for key in r.sample(["EUR", "", "CHF"], r.randint(0, 3))],
}
SCHEMA = Schema(0, StructType(FIELDS))
ARROW = to_arrow_schema(SCHEMA)


def random_rows(count: int, seed: int = 7) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {name: None if chance.random() < 0.2 else make(chance) for name, make in MAKERS.items()} for _ in range(count)
    ]


def expected(rows: list[dict[str, Any]]) -> list[int]:
    return [row_hash(FIELDS, row) for row in rows]


def cuts(lengths: range) -> tuple[list[tuple[int, int]], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    slices = [(start, length) for length in lengths for start in (0, 1, 5, 8)]
    starts, lengths_ = (np.array(each, np.int64) for each in zip(*slices, strict=True))
    return slices, starts, lengths_


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_bytes_of_any_length_have_their_xxh64(seed: int) -> None:
    data = random.Random(1).randbytes(40)
    slices, starts, lengths = cuts(range(32))
    found = hash_short_slices(np.frombuffer(data + bytes(8), np.uint64), starts, lengths, seed)
    assert found.tolist() == [xxh64(data[start : start + length], seed) for start, length in slices]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("longest", [7, 23, 256])
def test_texts_of_any_length_have_the_xxh64_of_what_makes_them_whole_words(seed: int, longest: int) -> None:
    data = random.Random(1).randbytes(272)
    words = np.frombuffer(b"\xff" * LEAD_BYTES + data + b"\xff" * TRAIL_BYTES, np.uint64)
    for lengths in (range(longest + 1), range(longest, longest + 1)):
        slices, starts, each = cuts(lengths)
        found = hash_texts(words, starts, each, seed, Scratch())
        assert found.tolist() == [xxh64(made_up(data[start : start + length]), seed) for start, length in slices]


def test_published_examples_of_xxh64_hold() -> None:
    assert xxh64(b"", 0) == 0xEF46DB3751D8E999
    assert xxh64(b"xxhash", 20141025) == 0xB559B98D844E0635
    assert xxh64(b"Nobody inspects the spammish repetition", 0) == 0xFBCEA83C8A378BF1


def test_each_long_can_have_a_seed_of_its_own() -> None:
    values, seeds = np.array([0, -1, 2**62], np.int64), np.array([7, 2**64 - 1, 0], np.uint64)
    packed = [int(value).to_bytes(8, "little", signed=True) for value in values]
    assert hash_longs(values, seeds).tolist() == [xxh64(p, int(s)) for p, s in zip(packed, seeds, strict=True)]


def test_values_of_every_type_hash_as_defined() -> None:
    rows = random_rows(400)
    assert hash_rows(pa.Table.from_pylist(rows, schema=ARROW), list(ARROW)).tolist() == expected(rows)


def test_slices_chunks_and_blocks_do_not_matter() -> None:
    rows = random_rows(60)
    table = pa.Table.from_pylist(rows, schema=ARROW)
    cut = pa.concat_tables([table.slice(3, 20), table.slice(23, 1), table.slice(24)])
    assert hash_rows(cut, list(ARROW)).tolist() == expected(rows[3:])
    many = pa.concat_tables([table] * (BLOCK_ROWS // 60 + 2)).combine_chunks()
    assert hash_rows(many, list(ARROW)).tolist() == expected(rows) * (BLOCK_ROWS // 60 + 2)


def test_values_that_repeat_hash_as_any_other() -> None:
    field = Field(8, "words", "string")
    rows = [{"words": value} for value in ["INSERT", "DELETE", None, "INSERT"] * 500]
    table = pa.Table.from_pylist(rows, schema=to_arrow_schema(Schema(0, StructType((field,)))))
    assert hash_rows(table, list(table.schema)).tolist() == [row_hash((field,), row) for row in rows]


def test_a_parquet_file_gives_the_same_hashes_back(tmp_path: Path) -> None:
    rows = random_rows(50)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=ARROW), path, store_schema=False, row_group_size=7)
    read = pq.read_table(path)
    assert hash_rows(read, list(read.schema)).tolist() == expected(rows)


def one(type_: str, value: Any, **options: Any) -> int:
    field = Field(options.get("id", 9), options.get("name", "x"), type_)
    table = pa.Table.from_pylist([{field.name: value}], schema=to_arrow_schema(Schema(0, StructType((field,)))))
    return int(hash_rows(table, list(table.schema))[0])


def test_what_iceberg_calls_the_same_value_hashes_the_same() -> None:
    assert one("int", -5) == one("long", -5)
    assert one("float", 0.15625) == one("double", 0.15625)
    assert one("decimal(9,2)", Decimal("-1.28")) == one("decimal(38,2)", Decimal("-1.28"))
    assert one("double", -0.0) == one("double", 0.0)
    assert one("string", "a", name="old") == one("string", "a", name="new")


def test_a_column_that_rows_did_not_have_adds_nothing() -> None:
    rows = random_rows(20)
    older = pa.Table.from_pylist(rows, schema=ARROW)
    added = older.append_column(
        pa.field("late", pa.int64(), metadata={b"PARQUET:field_id": b"99"}), pa.nulls(20, pa.int64())
    )
    assert hash_rows(added, list(added.schema)).tolist() == expected(rows)


def test_what_differs_hashes_differently() -> None:
    line = Field(1, "line", StructType((Field(2, "sku", "string"),)))
    tags, rates = Field(3, "tags", ListType(4, "int")), Field(5, "rates", MapType(6, "string", 7, "int"))
    variants = [
        {"line": None, "tags": None, "rates": None},
        {"line": {"sku": None}, "tags": None, "rates": None},
        {"line": {"sku": ""}, "tags": None, "rates": None},
        {"line": None, "tags": [], "rates": None},
        {"line": None, "tags": [None], "rates": None},
        {"line": None, "tags": [1, 2], "rates": None},
        {"line": None, "tags": [2, 1], "rates": None},
        {"line": None, "tags": None, "rates": []},
        {"line": None, "tags": None, "rates": [("a", None)]},
        {"line": None, "tags": None, "rates": [("a", 1), ("b", 2)]},
        {"line": None, "tags": None, "rates": [("a", 2), ("b", 1)]},
    ]
    schema = to_arrow_schema(Schema(0, StructType((line, tags, rates))))
    hashes = hash_rows(pa.Table.from_pylist(variants, schema=schema), list(schema)).tolist()
    assert len(set(hashes)) == len(variants)
    assert one("string", "a", id=1) != one("string", "a", id=2)
    assert one("long", None) != one("long", 0)


def test_nanoseconds_hash_as_longs() -> None:
    moments = pa.table(
        [pa.array([-7, None, 2**62], pa.timestamp("ns"))], schema=pa.schema([_with_id(pa.timestamp("ns"))])
    )
    longs = pa.table([pa.array([-7, None, 2**62])], schema=pa.schema([_with_id(pa.int64())]))
    assert hash_rows(moments, list(moments.schema)).tolist() == hash_rows(longs, list(longs.schema)).tolist()


def _with_id(type_: pa.DataType) -> pa.Field:
    return pa.field("x", type_, metadata={b"PARQUET:field_id": b"9"})


def test_columns_that_files_have_beside_the_tables_own_add_nothing() -> None:
    row_id = pa.field("_row_id", pa.int64(), metadata={b"PARQUET:field_id": b"2147483540"})
    table = pa.table([pa.array([1]), pa.array([7])], schema=pa.schema([ARROW.field("large"), row_id]))
    assert hash_rows(table, list(table.schema)).tolist() == [x64(x64(3, 1))]


def test_examples_in_the_documentation_hold() -> None:
    found = re.findall(
        r"^\| `(\d+)` \| (\S+) \| `(.*)` \| `([0-9a-f]{16})` \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(found) >= 8
    readers: dict[str, Any] = {
        "string": str,
        "boolean": lambda text: text == "true",
        "double": float,
        "date": dt.date.fromisoformat,
        "timestamptz": dt.datetime.fromisoformat,
        "binary": bytes.fromhex,
    }
    for id_, type_, text, hash_ in found:
        read = Decimal if type_.startswith("decimal") else readers.get(type_, int)
        assert f"{one(type_, read(text), id=int(id_)):016x}" == hash_, text
