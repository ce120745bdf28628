"""Types and schemas: their JSON, their parts, and the walks over nested ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lakefeed.contract.errors import TypeUnknown
from lakefeed.iceberg.types import (
    Field,
    ListType,
    MapType,
    StructType,
    children,
    decimal_parts,
    fixed_length,
    map_type,
    promotes,
    schema_from_json,
    schema_to_json,
    type_from_json,
    walk,
    written_fields,
)

POINT = StructType((Field(4, "x", "long", required=True), Field(5, "y", "variant")))
NESTED = StructType(
    (
        Field(1, "id", "long", required=True),
        Field(2, "points", ListType(3, POINT)),
        Field(6, "tags", MapType(7, "string", 8, ListType(9, "decimal(9, 2)"))),
    )
)


def test_walk_yields_every_field_with_those_around_it():
    found = [(".".join(field.name for field in path), path[-1].id) for path in walk(NESTED)]
    assert found == [
        ("id", 1),
        ("points", 2),
        ("points.element", 3),
        ("points.element.x", 4),
        ("points.element.y", 5),
        ("tags", 6),
        ("tags.key", 7),
        ("tags.value", 8),
        ("tags.value.element", 9),
    ]


def test_map_type_rebuilds_one_level_and_the_caller_goes_deeper():
    def renumbered(field: Field) -> Field:
        return replace(field, id=field.id + 100, type=map_type(field.type, renumbered))

    assert [path[-1].id for path in walk(map_type(NESTED, renumbered))] == [101, 102, 103, 104, 105, 106, 107, 108, 109]
    assert map_type(NESTED, lambda field: field) == NESTED
    assert map_type("long", renumbered) == "long"


def test_map_key_is_always_required():
    assert [field.required for field in children(MapType(1, "string", 2, "long"))] == [True, False]


@pytest.mark.parametrize("text", ["decimal(9,2)", "decimal(9, 2)", "decimal( 9 , 2 )"])
def test_decimals_are_read_as_every_writer_spells_them(text):
    assert decimal_parts(text) == (9, 2)


def test_parameters_are_read_from_their_own_type_only():
    assert decimal_parts("double") is None
    assert fixed_length("fixed[16]") == 16
    assert fixed_length("binary") is None


@pytest.mark.parametrize(
    ("from_", "to", "expected"),
    [
        ("int", "long", True),
        ("float", "double", True),
        ("decimal(9,2)", "decimal(18, 2)", True),
        ("decimal(9,2)", "decimal(9, 2)", False),
        ("decimal(9,2)", "decimal(18,3)", False),
        ("decimal(18,2)", "decimal(9,2)", False),
        ("long", "int", False),
        ("int", "int", False),
        ("int", "double", False),
        ("date", "timestamp", False),
    ],
)
def test_promotions_are_those_of_every_format(from_, to, expected):
    assert promotes(from_, to) == expected


def test_columns_of_unknown_types_are_not_written_unless_they_are_required():
    assert [field.name for field in written_fields(NESTED)] == ["id", "tags"]
    [written] = written_fields(StructType((Field(1, "v", "variant", required=True),)))
    assert written.name == "v"


def test_keys_of_a_later_version_survive_a_change_of_the_schema():
    document = {
        "type": "struct",
        "schema-id": 3,
        "identifier-field-ids": [1],
        "fields": [
            {"id": 1, "name": "id", "required": True, "type": "long", "write-default": 7, "masked-by": {"policy": "p"}},
            {
                "id": 2,
                "name": "tags",
                "required": False,
                "doc": "labels",
                "type": {
                    "type": "list",
                    "element-id": 3,
                    "element-required": False,
                    "element": {
                        "type": "map",
                        "key-id": 4,
                        "key": "string",
                        "value-id": 5,
                        "value": "timestamp_ns",
                        "value-required": False,
                        "sorted": True,
                    },
                    "bounded": 10,
                },
            },
        ],
        "owner": "data team",
    }
    schema = schema_from_json(document)
    assert schema_to_json(schema) == document

    added = Field(6, "added", "string")
    evolved = replace(schema, schema_id=4, columns=StructType((*schema.columns.fields, added)))
    fields = [*document["fields"], {"id": 6, "name": "added", "required": False, "type": "string"}]
    assert schema_to_json(evolved) == {**document, "schema-id": 4, "fields": fields}


def test_nested_type_of_a_later_format_is_reported():
    with pytest.raises(TypeUnknown, match="type=union"):
        type_from_json({"type": "union", "members": []})
