"""The update engine on documents: every kind of update, on plain values."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lakefeed.catalog.errors import CommitFailed, ValidationFailed
from lakefeed.catalog.metadata.document import only_referenced_snapshots
from lakefeed.catalog.metadata.updates import apply_updates
from tests.catalog.documents import (
    LOCATION,
    NOW_MS,
    UUID,
    add_snapshot,
    append,
    field,
    new_table,
    schema,
    set_main,
    snapshot,
)

BASE_LOCATION = f"{LOCATION}/metadata/00003-x.metadata.json"


def apply(base: dict, *updates: dict, now_ms: int = NOW_MS + 1000) -> dict:
    """Apply updates, checking that the base is left as it was."""
    before = copy.deepcopy(base)
    applied = apply_updates(base, list(updates), base_location=BASE_LOCATION, now_ms=now_ms)
    assert base == before
    return base if applied is None else applied.document


def changes_nothing(base: dict, *updates: dict) -> bool:
    return apply_updates(base, list(updates), base_location=BASE_LOCATION, now_ms=NOW_MS) is None


def refused(base: dict, *updates: dict, error: type[Exception] = ValidationFailed) -> str:
    with pytest.raises(error) as caught:
        apply(base, *updates)
    return str(caught.value)


def ids(items: list[dict], key: str = "snapshot-id") -> list[Any]:
    return [item[key] for item in items]


@pytest.fixture
def table() -> dict:
    return new_table()


@pytest.fixture
def filled(table: dict) -> dict:
    table = apply(table, *append(1, 1))
    table = apply(table, *append(2, 2, 1))
    return apply(table, *append(3, 3, 2))


def test_snapshot_becomes_current_and_is_logged(table: dict):
    after = apply(table, *append(1, 1))
    assert after["snapshots"] == [snapshot(1, 1)]
    assert after["current-snapshot-id"] == 1
    assert after["last-sequence-number"] == 1
    assert after["refs"] == {"main": {"snapshot-id": 1, "type": "branch"}}
    assert after["snapshot-log"] == [{"timestamp-ms": NOW_MS + 1, "snapshot-id": 1}]


def test_commit_shares_with_its_base_what_it_does_not_change(filled: dict):
    after = apply(filled, *append(4, 4, 3))
    assert after["schemas"] is filled["schemas"]
    assert all(new is old for new, old in zip(after["snapshots"], filled["snapshots"], strict=False))


def test_snapshot_id_that_exists_is_refused(filled: dict):
    assert refused(filled, add_snapshot(2, 9)) == "Snapshot already exists for id: 2"


def test_sequence_number_that_was_given_out_is_a_conflict(filled: dict):
    message = refused(filled, add_snapshot(9, 3, 2), error=CommitFailed)
    assert message == "Cannot add snapshot with sequence number 3 older than last sequence number 3"


def test_timestamps_never_decrease_even_if_a_clock_goes_back(filled: dict):
    late = {"timestamp-ms": NOW_MS - 10_000_000}
    after = apply(filled, *append(4, 4, 3, **late), now_ms=NOW_MS - 5_000_000)
    assert after["last-updated-ms"] == filled["last-updated-ms"]
    assert after["snapshot-log"][-1]["timestamp-ms"] == filled["snapshot-log"][-1]["timestamp-ms"]


def test_snapshot_that_was_current_only_inside_one_commit_is_not_logged(table: dict):
    after = apply(table, *append(1, 1), *append(2, 2, 1))
    assert ids(after["snapshots"]) == [1, 2]
    assert ids(after["snapshot-log"]) == [2]


def test_removing_snapshots_removes_their_refs_statistics_and_older_history(filled: dict):
    tag = {"action": "set-snapshot-ref", "ref-name": "v1", "type": "tag", "snapshot-id": 2}
    statistics = {
        "snapshot-id": 2,
        "statistics-path": "p",
        "file-size-in-bytes": 1,
        "file-footer-size-in-bytes": 1,
        "blob-metadata": [],
    }
    filled = apply(filled, tag, {"action": "set-statistics", "statistics": statistics})
    after = apply(filled, {"action": "remove-snapshots", "snapshot-ids": [2, 99]})
    assert ids(after["snapshots"]) == [1, 3]
    assert ids(after["snapshot-log"]) == [3]
    assert after["statistics"] == []
    assert after["refs"].keys() == {"main"}


def test_removing_one_snapshot_per_update_equals_removing_all_at_once(filled: dict):
    one_by_one = [{"action": "remove-snapshots", "snapshot-ids": [number]} for number in (1, 2)]
    assert apply(filled, *one_by_one) == apply(filled, {"action": "remove-snapshots", "snapshot-ids": [1, 2]})
    assert changes_nothing(filled, {"action": "remove-snapshots", "snapshot-ids": [99]})


def test_removing_main_empties_the_table_and_keeps_its_history(filled: dict):
    after = apply(filled, {"action": "remove-snapshot-ref", "ref-name": "main"})
    assert (after["current-snapshot-id"], after["refs"]) == (-1, {})
    assert len(after["snapshots"]) == 3
    replaced = apply(after, *append(4, 4))
    assert ids(replaced["snapshot-log"]) == [1, 2, 3, 4]
    assert changes_nothing(filled, {"action": "remove-snapshot-ref", "ref-name": "none"})


def test_ref_keeps_its_limits_and_they_are_checked(filled: dict):
    branch = {"action": "set-snapshot-ref", "ref-name": "dev", "type": "branch", "snapshot-id": 1}
    limits = {"min-snapshots-to-keep": 2, "max-snapshot-age-ms": 3, "max-ref-age-ms": 4}
    after = apply(filled, {**branch, **limits})
    assert after["refs"]["dev"] == {"snapshot-id": 1, "type": "branch", **limits}
    assert ids(after["snapshot-log"]) == [1, 2, 3]
    refused(filled, {**branch, "type": "tag", "min-snapshots-to-keep": 2})
    refused(filled, {**branch, "max-ref-age-ms": 0})
    refused(filled, {**branch, "ref-name": "main", "type": "tag"})
    assert refused(filled, {**branch, "snapshot-id": 9}) == "Cannot set dev to unknown snapshot: 9"


def test_going_back_to_an_older_snapshot_is_logged_as_of_now(filled: dict):
    after = apply(filled, set_main(1), now_ms=NOW_MS + 5000)
    assert after["snapshot-log"][-1] == {"timestamp-ms": NOW_MS + 5000, "snapshot-id": 1}


def test_added_schema_gets_the_next_id_and_an_equal_one_is_reused(table: dict):
    wider = schema(*table["schemas"][0]["fields"], field(3, "w", "decimal(9,2)"))
    add, use = (
        {"action": "add-schema", "schema": {**wider, "schema-id": 0}},
        {"action": "set-current-schema", "schema-id": -1},
    )
    after = apply(table, add, use)
    assert ids(after["schemas"], "schema-id") == [0, 1]
    assert (after["current-schema-id"], after["last-column-id"]) == (1, 3)
    spaced = copy.deepcopy(wider)
    spaced["fields"][2] |= {"type": "decimal(9, 2)", "doc": None}
    assert changes_nothing(after, {"action": "add-schema", "schema": spaced}, use)
    back = apply(after, {"action": "add-schema", "schema": schema()}, use)
    assert (back["current-schema-id"], len(back["schemas"]), back["last-column-id"]) == (0, 2, 3)


def test_minus_one_means_nothing_unless_something_was_added(table: dict):
    for update in (
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    ):
        assert "none has been added" in refused(table, update)


def test_unknown_ids_cannot_be_made_current(table: dict):
    assert "unknown id: 9" in refused(table, {"action": "set-current-schema", "schema-id": 9})
    assert "unknown id: 9" in refused(table, {"action": "set-default-spec", "spec-id": 9})
    assert "unknown id: 9" in refused(table, {"action": "set-default-sort-order", "sort-order-id": 9})


def spec_update(*fields: tuple[int, str, str], **more: Any) -> dict:
    listed = [{"source-id": source, "transform": transform, "name": name, **more} for source, transform, name in fields]
    return {"action": "add-spec", "spec": {"spec-id": 7, "fields": listed}}


USE_SPEC = {"action": "set-default-spec", "spec-id": -1}


def test_added_spec_numbers_its_fields_and_recycles_ids_of_equal_ones(table: dict):
    after = apply(table, spec_update((1, "bucket[4]", "b")), USE_SPEC)
    assert (after["default-spec-id"], after["last-partition-id"]) == (1, 1000)
    again = apply(after, spec_update((2, "identity", "v"), (1, "bucket[4]", "renamed")), USE_SPEC)
    assert ids(again["partition-specs"][2]["fields"], "field-id") == [1001, 1000]
    reused = apply(again, spec_update((1, "bucket[4]", "b")), USE_SPEC)
    assert (reused["default-spec-id"], len(reused["partition-specs"])) == (1, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([(9, "identity", "x")], "Cannot find source column for partition field: x"),
        ([(2, "day", "x")], "Invalid source type string for transform: day"),
        ([(1, "bucket[0]", "x")], "positive width"),
        ([(1, "bucket[4]", "v")], "Cannot create identity partition sourced from different field in schema: v"),
        ([(1, "identity", "")], "Cannot use empty partition name"),
        ([(1, "identity", "x"), (2, "identity", "x")], "Cannot use partition name more than once: x"),
    ],
)
def test_spec_that_does_not_fit_is_refused(table: dict, fields: list, message: str):
    assert message in refused(table, spec_update(*fields))


def test_void_field_that_a_v1_table_keeps_for_a_removed_one_may_be_named_like_its_column(table: dict):
    table = apply({**table, "format-version": 1}, spec_update((2, "identity", "v")), USE_SPEC)
    removed = apply(table, spec_update((2, "void", "v"), **{"field-id": 1000}), USE_SPEC)
    assert removed["partition-specs"][removed["default-spec-id"]]["fields"][0]["transform"] == "void"
    other_column = spec_update((1, "void", "v"), **{"field-id": 1000})
    assert refused(table, other_column) == "Cannot create identity partition sourced from different field in schema: v"


@pytest.mark.parametrize("transform", ["identity", "bucket[4]", "truncate[2]"])
def test_partition_field_of_any_transform_may_be_named_like_its_own_column(table: dict, transform: str):
    after = apply(table, spec_update((2, transform, "v")), USE_SPEC)
    assert after["partition-specs"][after["default-spec-id"]]["fields"][0]["name"] == "v"


def test_column_cannot_take_the_name_of_a_partition_field_of_another_column_not_even_of_an_old_spec(table: dict):
    """Java binds every spec to the current schema when it reads a table, and would fail on this one."""
    table = apply(table, spec_update((1, "bucket[4]", "taken")), USE_SPEC)
    table = apply(table, spec_update((2, "identity", "v")), USE_SPEC)
    add = {"action": "add-schema", "schema": schema(field(1, "id"), field(2, "v", "string"), field(3, "taken"))}
    message = refused(table, add, {"action": "set-current-schema", "schema-id": -1})
    assert message == "Cannot create identity partition sourced from different field in schema: taken"


def test_column_may_take_the_name_of_an_old_partition_field_whose_column_is_gone(table: dict):
    table = apply(table, spec_update((2, "identity", "v")), USE_SPEC)
    table = apply(table, spec_update(), USE_SPEC)
    use = {"action": "set-current-schema", "schema-id": -1}
    dropped = apply(table, {"action": "add-schema", "schema": schema(field(1, "id"))}, use)
    renamed = {"action": "add-schema", "schema": schema(field(1, "id"), field(3, "v"))}
    assert apply(dropped, renamed, use)["last-column-id"] == 3


def test_column_that_partitions_the_table_cannot_be_dropped(table: dict):
    table = apply(table, spec_update((2, "identity", "v")), USE_SPEC)
    drop = {"action": "add-schema", "schema": schema(field(1, "id"))}
    message = refused(table, drop, {"action": "set-current-schema", "schema-id": -1})
    assert message == "Cannot find source column for partition field: v"


def order_update(source: int, order_id: int = 5) -> dict:
    sort = {"source-id": source, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}
    return {"action": "add-sort-order", "sort-order": {"order-id": order_id, "fields": [sort]}}


def test_added_sort_order_gets_the_next_id_and_unsorted_stays_zero(table: dict):
    use = {"action": "set-default-sort-order", "sort-order-id": -1}
    after = apply(table, order_update(1), use)
    after = apply(after, order_update(2, 1), use)
    assert (ids(after["sort-orders"], "order-id"), after["default-sort-order-id"]) == ([0, 1, 2], 2)
    assert apply(after, order_update(1), use)["default-sort-order-id"] == 1
    unsorted = {"action": "add-sort-order", "sort-order": {"order-id": 9, "fields": []}}
    assert apply(after, unsorted, use)["default-sort-order-id"] == 0


def test_current_schema_and_default_spec_cannot_be_removed_and_others_can(table: dict):
    table = apply(table, spec_update((2, "identity", "v")), {"action": "add-schema", "schema": schema(field(1, "x"))})
    assert refused(table, {"action": "remove-schemas", "schema-ids": [0]}) == "Cannot remove the current schema"
    specs = {"action": "remove-partition-specs", "spec-ids": [0]}
    assert refused(table, specs) == "Cannot remove the default partition spec"
    after = apply(
        table,
        {"action": "remove-schemas", "schema-ids": [1, 9]},
        {"action": "remove-partition-specs", "spec-ids": [1, 9]},
    )
    assert (ids(after["schemas"], "schema-id"), ids(after["partition-specs"], "spec-id")) == ([0], [0])


def test_properties_are_set_and_removed(table: dict):
    after = apply(table, {"action": "set-properties", "updates": {"a": "1", "format-version": "3"}})
    assert after["properties"] == {**table["properties"], "a": "1"}
    assert after["format-version"] == 2
    gone = apply(after, {"action": "remove-properties", "removals": ["a", "none"]})
    assert gone["properties"] == table["properties"]
    assert changes_nothing(table, {"action": "remove-properties", "removals": ["none"]})
    assert changes_nothing(after, {"action": "set-properties", "updates": {"a": "1"}})


def test_location_and_uuid(table: dict):
    assert apply(table, {"action": "set-location", "location": "file:///x/"})["location"] == "file:///x"
    assert changes_nothing(table, {"action": "assign-uuid", "uuid": UUID.upper()})
    other = UUID.replace("1", "2")
    assert "Cannot reassign uuid" in refused(table, {"action": "assign-uuid", "uuid": other})


def upgrade(version: int) -> dict:
    return {"action": "upgrade-format-version", "format-version": version}


def test_format_version_only_goes_up(table: dict):
    after = apply(table, upgrade(3))
    assert (after["format-version"], after["next-row-id"], after["current-snapshot-id"]) == (3, 0, None)
    assert changes_nothing(after, upgrade(3))
    assert refused(after, upgrade(2)) == "Cannot downgrade v3 table to v2"
    assert "unsupported" in refused(after, upgrade(4))


def test_v1_table_repeats_schema_and_spec_until_it_is_upgraded():
    table = new_table(properties={"format-version": "1"})
    assert table["schema"] == table["schemas"][0]
    assert table["partition-spec"] == []
    first = {key: value for key, value in snapshot(1, 0).items() if key != "sequence-number"}
    table = apply(table, {"action": "add-snapshot", "snapshot": first}, set_main(1))
    assert "last-sequence-number" not in table
    after = apply(table, upgrade(2))
    assert after["last-sequence-number"] == 0
    assert "schema" not in after
    assert "partition-spec" not in after


def test_statistics_are_replaced_per_snapshot_and_removed(filled: dict):
    def statistics(path: str) -> dict:
        return {"snapshot-id": 1, "statistics-path": path, "file-size-in-bytes": 1}

    set_one = {"action": "set-partition-statistics", "partition-statistics": statistics("a")}
    set_two = {"action": "set-partition-statistics", "partition-statistics": statistics("b")}
    after = apply(apply(filled, set_one), set_two)
    assert after["partition-statistics"] == [statistics("b")]
    gone = apply(after, {"action": "remove-partition-statistics", "snapshot-id": 1})
    assert gone["partition-statistics"] == []
    assert changes_nothing(filled, {"action": "remove-statistics", "snapshot-id": 99})


def test_encryption_keys_need_v3_and_are_added_once(table: dict):
    add = {"action": "add-encryption-key", "encryption-key": {"key-id": "k", "encrypted-key-metadata": "AA=="}}
    assert "until v3" in refused(table, add)
    after = apply(table, upgrade(3), add)
    assert ids(after["encryption-keys"], "key-id") == ["k"]
    assert changes_nothing(after, add)
    assert apply(after, {"action": "remove-encryption-key", "key-id": "k"})["encryption-keys"] == []
    assert changes_nothing(table, {"action": "remove-encryption-key", "key-id": "k"})


def test_initial_default_is_fixed_while_rows_depend_on_it():
    def columns(default: int | None) -> dict:
        more = {} if default is None else {"initial-default": default}
        return {
            "action": "add-schema",
            "schema": schema(field(1, "id"), field(2, "v", "string"), field(3, "d", **more)),
        }

    table = apply(new_table(properties={"format-version": "3"}), *append(1, 1, **{"first-row-id": 0, "added-rows": 1}))
    use = {"action": "set-current-schema", "schema-id": -1}
    table = apply(table, columns(5), use)
    assert "Cannot change initial default of column: d" in refused(table, columns(6), use)
    replaced = apply(table, {"action": "remove-snapshot-ref", "ref-name": "main"}, columns(6), use)
    assert replaced["current-schema-id"] == 2


def test_metadata_log_is_cut_in_the_commit_that_says_so(table: dict):
    for number in range(5):
        table = apply(table, {"action": "set-properties", "updates": {"n": str(number)}})
    cut = {"write.metadata.previous-versions-max": "2", "write.metadata.delete-after-commit.enabled": "true"}
    update = {"action": "set-properties", "updates": cut}
    applied = apply_updates(table, [update], base_location="newest", now_ms=NOW_MS)
    assert ids(applied.document["metadata-log"], "metadata-file") == [BASE_LOCATION, "newest"]
    assert applied.expired_files == (BASE_LOCATION,) * 4


def test_unreadable_limit_means_the_default(table: dict):
    for nonsense in ("many", "-1", "", "²"):
        update = {"action": "set-properties", "updates": {"write.metadata.previous-versions-max": nonsense}}
        assert len(apply(table, update)["metadata-log"]) == 1


def test_only_referenced_snapshots_are_shown_and_the_document_is_untouched(filled: dict):
    shown = only_referenced_snapshots(filled)
    assert ids(shown["snapshots"]) == [3]
    assert ids(filled["snapshots"]) == [1, 2, 3]
