"""Encoded documents: the bytes of a file equal its document, however a commit changes the snapshots."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.catalog.metadata.document import EncodedDocument, encode_document


def snapshot(number: int) -> dict[str, Any]:
    return {"snapshot-id": number, "summary": {"operation": "append", "note": 'a quote " and ]}'}}


# What a commit may do: add so many, remove the oldest or newest so many, or write equal ones anew.
_ACTIONS = st.lists(st.tuples(st.sampled_from(("add", "expire", "roll back", "copy")), st.integers(0, 3)), max_size=12)


@given(_ACTIONS)
def test_encoded_bytes_equal_the_document_after_any_sequence_of_changes(actions):
    number, document = 0, {"format-version": 2, "snapshots": []}
    written = encode_document(document)
    for action, count in actions:
        kept = document["snapshots"]
        if action == "add":
            kept = [*kept, *(snapshot(number + more) for more in range(count))]
            number += count
        elif action == "copy":
            kept = [dict(each) for each in kept]
        else:
            kept = kept[count:] if action == "expire" else kept[: len(kept) - count]
        document = {**document, "snapshots": kept, "last-updated-ms": number}
        written = encode_document(document, written)
        assert orjson.loads(written.raw) == document


def test_bytes_of_older_snapshots_are_copied():
    first = {"format-version": 2, "snapshots": [snapshot(1), snapshot(2)]}
    plain = encode_document(first)
    marked = EncodedDocument(first, plain.raw.replace(b'"snapshot-id":1', b'"snapshot-id" : 1'), plain.snapshots_at)
    third = encode_document({"format-version": 2, "snapshots": [*first["snapshots"], snapshot(3)]}, marked)
    assert b'"snapshot-id" : 1' in third.raw, "serialised anew"
    assert [each["snapshot-id"] for each in orjson.loads(third.raw)["snapshots"]] == [1, 2, 3]


def test_bytes_of_other_snapshots_are_not_copied():
    base = encode_document({"format-version": 2, "snapshots": [snapshot(1)]})
    changed = {"format-version": 2, "snapshots": [snapshot(1) | {"schema-id": 7}, snapshot(2)]}
    assert orjson.loads(encode_document(changed, base).raw) == changed


def test_field_named_snapshots_that_is_no_list_is_encoded_unchanged():
    first = {"view-uuid": "u", "snapshots": {"a": 1}}
    second = first | {"location": "/v"}
    assert orjson.loads(encode_document(second, encode_document(first)).raw) == second
