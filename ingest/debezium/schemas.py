"""Kafka Connect's `{"schema": ..., "payload": ...}` around a value. Owns the taking apart, and remembers schemas.

Every event of a table repeats its schema, which is ten times the size of the row: each is understood once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from ingest.debezium.errors import DebeziumMalformed
from ingest.debezium.images import decode_object
from ingest.debezium.values import Converter, TypeSchema, converters_of

# Tables, times their versions, that are remembered; larger schemas than this are read anew, so memory stays bounded.
SCHEMAS_MAX = 512
SCHEMA_MAX_BYTES = 64 * 1024

_WRAPPING = {"schema", "payload"}
_NULL = b"null"

_decode_schema = msgspec.json.Decoder(TypeSchema).decode


@dataclass(frozen=True, slots=True)
class ValueSchema:
    """How the fields of a value are read, and, for those that are rows themselves, their columns."""

    converters: dict[str, Converter] = field(default_factory=dict)
    rows: dict[str, dict[str, Converter]] = field(default_factory=dict)

    def row(self, name: str) -> dict[str, Converter]:
        """Tell how the columns of a field are read."""
        return self.rows.get(name, {})


NO_SCHEMA = ValueSchema()


def split_schema(json: bytes | msgspec.Raw, place: str) -> tuple[msgspec.Raw, ValueSchema]:
    """Part a value from its schema; a value that came without one is given as it is.

    Raises: DebeziumMalformed.
    """
    value = msgspec.Raw(bytes(json).strip())
    if not bytes(value).startswith(b"{"):
        return value, NO_SCHEMA
    fields = decode_object(json, place)
    if fields.keys() != _WRAPPING:
        return value, NO_SCHEMA
    return fields["payload"], _understood(bytes(fields["schema"]), f"{place}.schema")


def _understood(schema: bytes, place: str) -> ValueSchema:
    if schema == _NULL:
        return NO_SCHEMA
    try:
        return _remembered(schema) if len(schema) <= SCHEMA_MAX_BYTES else _understand(schema)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DebeziumMalformed(place, "expected a schema of Kafka Connect") from None


def _understand(schema: bytes) -> ValueSchema:
    fields = _decode_schema(schema).fields or []
    rows = {each.field: converters_of(each.fields) for each in fields if each.field is not None and each.fields}
    return ValueSchema(converters_of(fields), rows)


_remembered = lru_cache(maxsize=SCHEMAS_MAX)(_understand)
