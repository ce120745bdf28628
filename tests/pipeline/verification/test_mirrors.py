from __future__ import annotations

from typing import Any

from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from lakefeed.pipeline.verification.mirrors import fields_as_of, fields_in


def field(number: int, name: str, type_: Any = "long") -> dict[str, Any]:
    return {"id": number, "name": name, "type": type_, "required": False}


def struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


def document(*schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """A table whose snapshot 10 was written with schema 0, and so on."""
    return {
        "schemas": [{"schema-id": number, "fields": fields} for number, fields in enumerate(schemas)],
        "current-schema-id": len(schemas) - 1,
        "snapshots": [{"snapshot-id": 10 + number, "schema-id": number} for number in range(len(schemas))],
    }


def columns(*names: str) -> StructType:
    return StructType([StructField(name, LongType()) for name in names])


def names(fields: Any) -> list[str]:
    return [each["name"] for each in fields]


def test_columns_have_the_names_of_the_mirror_before_and_after_it_follows_a_rename() -> None:
    table = document([field(1, "id"), field(2, "_cdc_before")], [field(1, "number"), field(2, "_cdc_before")])
    assert names(fields_as_of(table, 10)) == ["id", "_cdc_before"]
    assert names(fields_in(columns("number", "_cdc_row_id"), table, 10)) == ["number", "_cdc_before"]
    assert names(fields_in(columns("id", "_cdc_row_id"), table, 10)) == ["id", "_cdc_before"]


def test_names_that_another_column_has_taken_over_are_distinguished() -> None:
    table = document([field(1, "a"), field(2, "b")], [field(1, "b"), field(2, "c"), field(3, "a")])
    assert names(fields_in(columns("a", "b"), table, 10)) == ["a", "b"]
    assert names(fields_in(columns("b", "c", "a"), table, 10)) == ["b", "c"]


def test_a_dropped_column_keeps_its_name_and_columns_that_a_mirror_lacks_keep_theirs() -> None:
    table = document([field(1, "a"), field(2, "b")], [field(1, "a")])
    assert names(fields_in(columns("a", "b"), table, 10)) == ["a", "b"]
    assert names(fields_in(columns("a"), table, 10)) == ["a", "b"]
    taken = document([field(1, "a"), field(2, "b")], [field(2, "a")])
    assert names(fields_in(columns("a", "b"), taken, 10)) == ["a", "b"]


def test_names_inside_of_lists_and_structs_are_followed_too() -> None:
    def lines(name: str) -> dict[str, Any]:
        element = {"type": "list", "element-id": 2, "element": struct(field(3, name)), "element-required": False}
        return field(1, "lines", element)

    mirror = StructType([StructField("lines", ArrayType(StructType([StructField("code", StringType())])))])
    [found] = fields_in(mirror, document([lines("sku")], [lines("code")]), 10)
    assert names(found["type"]["element"]["fields"]) == ["code"]
