"""The form in which columns are declared: what it says, and what breaks its rules."""

from __future__ import annotations

import json

import pytest

from lakefeed.iceberg.types import Field, ListType, MapType, StructType
from lakefeed.writer.rows.declaration import (
    DeclarationMalformed,
    declaration_from_text,
    parse_declaration,
    parse_declarations,
    without_nanoseconds,
)

EVERYTHING = {
    "columns": {
        "id": "long",
        "price": "decimal(18,2)",
        "code": {"type": "fixed[4]"},
        "document": "json",
        "tags": {"type": "list", "element": "string"},
        "home": {
            "type": "struct",
            "fields": {"zip": {"type": "int", "renamedFrom": "code"}, "extra": {"type": "json"}},
        },
        "rates": {"type": "map", "key": "date", "value": {"type": "list", "element": "double"}},
        "customer": {"type": "string", "renamedFrom": "client"},
    },
    "identifier": ["id"],
}


def test_every_part_of_the_form_is_read():
    home = StructType((Field(0, "zip", "int", doc='formerly ["code"]'), Field(0, "extra", "string", doc="json")))
    assert parse_declaration(EVERYTHING, path="t").fields == (
        Field(0, "id", "long", doc="key"),
        Field(0, "price", "decimal(18, 2)"),
        Field(0, "code", "fixed[4]"),
        Field(0, "document", "string", doc="json"),
        Field(0, "tags", ListType(0, "string")),
        Field(0, "home", home),
        Field(0, "rates", MapType(0, "date", 0, ListType(0, "double"))),
        Field(0, "customer", "string", doc='formerly ["client"]'),
    )
    assert declaration_from_text(json.dumps(EVERYTHING)) == parse_declaration(EVERYTHING, path="t")


def column(declared) -> dict:
    return {"columns": {"c": declared}}


def nested(levels: int):
    return "long" if not levels else {"type": "list", "element": nested(levels - 1)}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "tables.t: expected an object"),
        ({"colums": {}}, "tables.t.colums: expected one of columns, identifier"),
        ({"columns": []}, "tables.t.columns: expected an object"),
        (column("bigint"), "tables.t.columns.c: expected a type, one of boolean, int, long"),
        (column({"type": "text"}), "tables.t.columns.c.type: expected a type"),
        (column(7), "tables.t.columns.c: expected the name of a type, or an object with `type`"),
        (column({}), "tables.t.columns.c.type: expected a type"),
        (column("decimal(39, 2)"), "tables.t.columns.c: expected at most 38 digits"),
        (column("decimal(3, 4)"), "tables.t.columns.c: expected at most 38 digits"),
        (column("fixed[0]"), "tables.t.columns.c: expected a type"),
        (column({"type": "long", "required": True}), "tables.t.columns.c.required: expected one of type"),
        (column({"type": "list"}), "tables.t.columns.c.element: expected the name of a type"),
        (column({"type": "list", "element": "json"}), "tables.t.columns.c.element: expected a type"),
        (column({"type": "list", "element": "long", "key": "long"}), "tables.t.columns.c.key: expected one of"),
        (column({"type": "struct", "fields": {}}), "tables.t.columns.c.fields: expected at least one field"),
        (column({"type": "map", "key": "double", "value": "int"}), "tables.t.columns.c.key: expected a type whose"),
        (column({"type": "long", "renamedFrom": "c"}), "tables.t.columns.c.renamedFrom: expected another name"),
        (column({"type": "long", "renamedFrom": 1}), "tables.t.columns.c.renamedFrom: expected a name"),
        (column(nested(12)), "expected at most 12 levels"),
        ({"columns": {"_cdc_source": "string"}}, "tables.t.columns._cdc_source: expected another name"),
        ({"columns": {"a\u0000": "string"}}, "expected a name of 1 to 255 characters"),
        ({"columns": {"a": "string", "A": "string"}}, "tables.t.columns: expected names that differ by more than case"),
        (
            {"columns": {"a": "string", "b": {"type": "int", "renamedFrom": "a"}}},
            "tables.t.columns: expected names that differ by more than case",
        ),
        ({"columns": {f"c{n}": "int" for n in range(2001)}}, "tables.t.columns: expected at most 2000 columns"),
        ({"columns": {"a": "int"}, "identifier": ["b"]}, "tables.t.identifier: expected a list of names of declared"),
        ({"columns": {"a": "int"}, "identifier": "a"}, "tables.t.identifier: expected a list of names of declared"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_place_and_the_rule(document, message):
    with pytest.raises(DeclarationMalformed) as error:
        parse_declarations({"t": document}, path="tables")
    assert message in str(error.value)


def test_formats_without_nanoseconds_have_microseconds_instead():
    types = {"a": "timestamp_ns", "b": {"type": "list", "element": "timestamptz_ns"}}
    fields = without_nanoseconds(parse_declaration({"columns": types}, path="t").fields)
    assert [field.type for field in fields] == ["timestamp", ListType(0, "timestamptz")]
