"""The update engine against an independent one: generated commits give the same table when PyIceberg's applies them.

Each commit is made of updates that fit the table as it is, as a client would send them, and after each comes one that
no table may take. PyIceberg's way of reading a document drops what it does not know, so that both are compared after
having been read by it; `comparable` says in what else it differs from Iceberg's own builder, which ours follows.

Of the third version PyIceberg 0.12 knows documents, row lineage, default values and the types but `variant`. It does
not know the way there from the second version, encryption keys (neither the updates nor the field), nor a snapshot's
`key-id`. An upgrade is therefore ours alone, must change nothing else, and is handed over to PyIceberg; keys are
compared with a model in a few lines. Snapshots leave no gap in the row ids: after one, others count on from their last
number, ours from the snapshot's, so that no id is given twice. The rest has the examples of test_updates.py only.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.update import TableUpdate, update_table_metadata

from lakefeed.catalog.errors import CatalogError
from lakefeed.catalog.metadata.updates import apply_updates, parse_updates
from tests.catalog.documents import LOCATION, NOW_MS, field, new_table, schema, set_main, snapshot

PARSED = TypeAdapter(tuple[TableUpdate, ...])

COMMITS_MAX = 12
UPDATES_MAX = 4

TRANSFORMS = ("identity", "bucket[4]", "truncate[3]", "void")
NAMES = st.sampled_from(["a", "b", "c"])
TYPES = ("int", "string", "date")
TYPES_SINCE_V3 = ("timestamp_ns", "timestamptz_ns", "unknown", "geometry", "geography")
# As JSON has them, in columns of the third version.
DEFAULTS = {"int": (0, 7), "string": ("", "none"), "date": ("1970-01-01", "2026-11-16")}
KEY_IDS = st.sampled_from(["k1", "k2", "k3"])
REFS = st.sampled_from(["dev", "v1", "v2"])


def highest(items: list[dict[str, Any]], key: str) -> int:
    return max(item[key] for item in items)


def current_schema(table: dict[str, Any]) -> dict[str, Any]:
    return next(each for each in table["schemas"] if each["schema-id"] == table["current-schema-id"])


class Commit:
    """Draws updates that fit a table, following what those before them make of it."""

    def __init__(self, table: dict[str, Any], number: int, draw: Any) -> None:
        self.table = table
        self.updates: list[dict[str, Any]] = []
        self._number = number
        self._draw = draw
        self._appended = False

    def add(self, update: dict[str, Any]) -> None:
        """Add an update, if it changes something: PyIceberg makes a new version of a table also for nothing."""
        applied = apply_updates(self.table, [update], base_location="", now_ms=NOW_MS)
        if applied is not None:
            self.updates.append(update)
            self.table = applied.document

    def maybe_draw_one(self) -> None:
        kinds = [name for name in dir(self) if name.startswith("draw_")]
        if self._appended:
            # A state that was never visible is no history, so a commit moves main once. PyIceberg logs it anyway.
            kinds = [name for name in kinds if name not in ("draw_snapshot", "draw_ref", "draw_ref_removal")]
        getattr(self, self._draw(st.sampled_from(kinds)))()

    def _last_added_or(self, number: int) -> int:
        return self._draw(st.sampled_from([-1, number]))

    def draw_properties(self) -> None:
        self.add({"action": "set-properties", "updates": self._draw(st.dictionaries(NAMES, NAMES, min_size=1))})

    def draw_property_removal(self) -> None:
        if known := sorted(self.table["properties"]):
            self.add({"action": "remove-properties", "removals": [self._draw(st.sampled_from(known))]})

    def draw_location(self) -> None:
        self.add({"action": "set-location", "location": f"{LOCATION}/{self._draw(NAMES)}"})

    def draw_schema(self) -> None:
        number = highest(self.table["schemas"], "schema-id") + 1
        fields, column = list(current_schema(self.table)["fields"]), self.table["last-column-id"] + 1
        if self._draw(st.booleans()):
            fields.append(self._new_field(column))
        else:
            at = self._draw(st.integers(0, len(fields) - 1))
            fields[at] = {**fields[at], "name": f"n{number}"}
        self.add({"action": "add-schema", "schema": {**schema(*fields), "schema-id": number}, "last-column-id": column})
        if self._draw(st.booleans()):
            self.add_last("set-current-schema", "schema-id", number)

    def _new_field(self, column: int) -> dict[str, Any]:
        is_v3 = self.table["format-version"] == 3
        type_ = self._draw(st.sampled_from(TYPES + TYPES_SINCE_V3 * is_v3))
        defaults: dict[str, Any] = {}
        if is_v3 and type_ in DEFAULTS:
            chosen = self._draw(st.sets(st.sampled_from(["initial-default", "write-default"])))
            defaults = {name: self._draw(st.sampled_from(DEFAULTS[type_])) for name in sorted(chosen)}
        return field(column, f"c{column}", type_, **defaults)

    def add_last(self, action: str, key: str, number: int) -> None:
        """Set what was added just now, by its number or as the last one: that is known in its own commit only."""
        self.updates.append({"action": action, key: self._last_added_or(number)})
        self.table = apply_updates(
            self.table, [{"action": action, key: number}], base_location="", now_ms=NOW_MS
        ).document

    def draw_current_schema(self) -> None:
        number = self._draw(st.sampled_from([each["schema-id"] for each in self.table["schemas"]]))
        used = {part["source-id"] for spec in self.table["partition-specs"] for part in spec["fields"]}
        used |= {part["source-id"] for order in self.table["sort-orders"] for part in order["fields"]}
        chosen = next(each for each in self.table["schemas"] if each["schema-id"] == number)
        if used <= {each["id"] for each in chosen["fields"]}:
            self.add({"action": "set-current-schema", "schema-id": number})

    def draw_schema_removal(self) -> None:
        used = {self.table["current-schema-id"]} | {each["schema-id"] for each in self.table["snapshots"]}
        if free := [each["schema-id"] for each in self.table["schemas"] if each["schema-id"] not in used]:
            self.add({"action": "remove-schemas", "schema-ids": [self._draw(st.sampled_from(free))]})

    def _source(self) -> int:
        usable = [each["id"] for each in current_schema(self.table)["fields"] if each["type"] in ("long", "string")]
        return self._draw(st.sampled_from(usable))

    def draw_spec(self) -> None:
        number = highest(self.table["partition-specs"], "spec-id") + 1
        # In format 1 the id of a field is its position.
        field_id = 1000 if self.table["format-version"] == 1 else self.table["last-partition-id"] + 1
        part = {
            "source-id": self._source(),
            "field-id": field_id,
            "name": f"p{number}",
            "transform": self._draw(st.sampled_from(TRANSFORMS)),
        }
        self.add({"action": "add-spec", "spec": {"spec-id": number, "fields": [part]}})
        if self._draw(st.booleans()):
            self.add_last("set-default-spec", "spec-id", number)

    def draw_default_spec(self) -> None:
        number = self._draw(st.sampled_from([each["spec-id"] for each in self.table["partition-specs"]]))
        self.add({"action": "set-default-spec", "spec-id": number})

    def draw_spec_removal(self) -> None:
        default = self.table["default-spec-id"]
        if free := [each["spec-id"] for each in self.table["partition-specs"] if each["spec-id"] != default]:
            self.add({"action": "remove-partition-specs", "spec-ids": [self._draw(st.sampled_from(free))]})

    def draw_sort_order(self) -> None:
        number = highest(self.table["sort-orders"], "order-id") + 1
        direction, nulls = self._draw(st.sampled_from([("asc", "nulls-first"), ("desc", "nulls-last")]))
        # Every order has one more term, because PyIceberg lets its caller find equal orders.
        parts = [
            {"source-id": self._source(), "transform": "identity", "direction": direction, "null-order": nulls}
            for _ in range(number)
        ]
        self.add({"action": "add-sort-order", "sort-order": {"order-id": number, "fields": parts}})
        if self._draw(st.booleans()):
            self.add_last("set-default-sort-order", "sort-order-id", number)

    def draw_snapshot(self) -> None:
        self._appended = True
        table, main = self.table, self.table["refs"].get("main", {}).get("snapshot-id")
        rows = self._draw(st.sampled_from([0, 1, 5, 2**40]))
        lineage = {"first-row-id": table["next-row-id"], "added-rows": rows} if table["format-version"] == 3 else {}
        new = snapshot(self._number, table.get("last-sequence-number", 0) + 1, main, **lineage)
        if table["format-version"] == 1:
            new.pop("sequence-number")
        new["schema-id"] = table["current-schema-id"]
        self.add({"action": "add-snapshot", "snapshot": new})
        self.add(set_main(self._number) if self._draw(st.booleans()) else self._ref(self._number))

    def _ref(self, snapshot_id: int) -> dict[str, Any]:
        kind = self._draw(st.sampled_from(["branch", "tag"]))
        ages = {"max-ref-age-ms": 1_000} if self._draw(st.booleans()) else {}
        named = {"ref-name": self._draw(REFS), "type": kind, "snapshot-id": snapshot_id}
        return {"action": "set-snapshot-ref", **named, **ages}

    def draw_ref(self) -> None:
        if known := [each["snapshot-id"] for each in self.table["snapshots"]]:
            snapshot_id = self._draw(st.sampled_from(known))
            self.add(self._ref(snapshot_id) if self._draw(st.booleans()) else set_main(snapshot_id))

    def draw_ref_removal(self) -> None:
        if known := sorted(self.table["refs"]):
            self.add({"action": "remove-snapshot-ref", "ref-name": self._draw(st.sampled_from(known))})

    def draw_snapshot_removal(self) -> None:
        if len(self.table["snapshots"]) > 1:
            oldest = self.table["snapshots"][0]["snapshot-id"]
            # History starts after the last removed snapshot. PyIceberg keeps the entries before it if main came back to
            # a snapshot that was removed later.
            if oldest != self.table["refs"].get("main", {}).get("snapshot-id"):
                self.add({"action": "remove-snapshots", "snapshot-ids": [oldest]})

    def draw_statistics(self) -> None:
        if known := [each["snapshot-id"] for each in self.table["snapshots"]]:
            facts = {
                "snapshot-id": self._draw(st.sampled_from(known)),
                "statistics-path": f"{LOCATION}/metadata/{self._number}.stats",
                "file-size-in-bytes": 10,
            }
            whole = {**facts, "file-footer-size-in-bytes": 1, "blob-metadata": []}
            chosen = self._draw(st.sampled_from([("statistics", whole), ("partition-statistics", facts)]))
            self.add({"action": f"set-{chosen[0]}", chosen[0]: chosen[1]})

    def draw_statistics_removal(self) -> None:
        for kind in ("statistics", "partition-statistics"):
            if known := [each["snapshot-id"] for each in self.table[kind]]:
                self.add({"action": f"remove-{kind}", "snapshot-id": self._draw(st.sampled_from(known))})

    def draw_upgrade(self) -> None:
        if self.table["format-version"] == 1:
            self.add({"action": "upgrade-format-version", "format-version": 2})


# Updates that every table rejects.
FORBIDDEN: tuple[dict[str, Any], ...] = (
    {"action": "upgrade-format-version", "format-version": 0},
    {"action": "upgrade-format-version", "format-version": 9},
    {"action": "set-current-schema", "schema-id": 777},
    {"action": "set-default-spec", "spec-id": 777},
    {"action": "set-default-sort-order", "sort-order-id": 777},
    {"action": "set-snapshot-ref", "ref-name": "x", "type": "branch", "snapshot-id": 777},
    {"action": "set-snapshot-ref", "ref-name": "x", "type": "leaf", "snapshot-id": 1},
    {"action": "no-such-thing"},
)


def forbidden_here(table: dict[str, Any]) -> list[dict[str, Any]]:
    """List updates that this table rejects: snapshots whose sequence number or first row id is too low."""
    snapshots, version = table["snapshots"], table["format-version"]
    lineage = {"first-row-id": table["next-row-id"], "added-rows": 1} if version == 3 else {}
    found = [{**snapshots[0], **lineage}] if snapshots else []
    if version == 3:
        found.append(snapshot(777, table["last-sequence-number"] + 1))
        if table["next-row-id"] > 0:
            behind = {"first-row-id": table["next-row-id"] - 1, "added-rows": 1}
            found.append(snapshot(777, table["last-sequence-number"] + 1, **behind))
    if version == 2 and table["last-sequence-number"] > 0:
        found.append(snapshot(777, table["last-sequence-number"], 1))
    return [{"action": "add-snapshot", "snapshot": each} for each in found]


def apply_ours(table: dict[str, Any], updates: list[dict[str, Any]], location: str) -> dict[str, Any]:
    applied = apply_updates(table, parse_updates(updates), base_location=location, now_ms=NOW_MS)
    return table if applied is None else applied.document


def apply_theirs(table: TableMetadata, updates: list[dict[str, Any]], location: str) -> TableMetadata:
    return update_table_metadata(table, PARSED.validate_python(updates), metadata_location=location)


def comparable(table: TableMetadata) -> dict[str, Any]:
    """Show a table without the times that PyIceberg sets, and without what refers to removed snapshots.

    Of those it keeps partition statistics and forgets that they were parents, unlike Iceberg's builder; and what v1
    repeats for old readers it leaves as it was.
    """
    document = table.model_dump(mode="json", by_alias=True)
    known = {each["snapshot-id"] for each in document["snapshots"]}
    for each in document["snapshots"]:
        if each.get("parent-snapshot-id") not in known:
            each.pop("parent-snapshot-id", None)
    statistics = document["partition-statistics"]
    for legacy in ("schema", "partition-spec"):
        document.pop(legacy, None)
    return document | {
        "partition-statistics": [each for each in statistics if each["snapshot-id"] in known],
        "snapshot-log": [each["snapshot-id"] for each in document["snapshot-log"]],
        "metadata-log": [each["metadata-file"] for each in document["metadata-log"]],
        "last-updated-ms": None,
        # Clients write -1 or nothing for "no snapshot".
        "current-snapshot-id": None
        if document.get("current-snapshot-id") == -1
        else document.get("current-snapshot-id"),
    }


@pytest.mark.parametrize("version", ["1", "2", "3"])
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_generated_commits_make_the_same_table_as_an_independent_engine_does(version: str, data: st.DataObject):
    ours = new_table(properties={"format-version": version})
    theirs = TableMetadataUtil.parse_obj(ours)
    for number in range(1, data.draw(st.integers(1, COMMITS_MAX)) + 1):
        commit = Commit(ours, number, data.draw)
        for _ in range(data.draw(st.integers(1, UPDATES_MAX))):
            commit.maybe_draw_one()
        location = f"{LOCATION}/metadata/{number:05d}-x.metadata.json"
        ours = apply_ours(ours, commit.updates, location)
        theirs = apply_theirs(theirs, commit.updates, location)
        # In format 1, PyIceberg reads another id than is written if specs were removed.
        written = {"last-partition-id": ours["last-partition-id"]}
        assert comparable(TableMetadataUtil.parse_obj(ours)) | written == comparable(theirs), commit.updates
        forbidden = [data.draw(st.sampled_from([*FORBIDDEN, *forbidden_here(ours)]))]
        with pytest.raises(CatalogError):
            apply_ours(ours, forbidden, location)
        with pytest.raises((ValueError, ValidationError, NotImplementedError)):
            apply_theirs(theirs, forbidden, location)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(data=st.data())
def test_upgrade_to_the_third_version_changes_nothing_else_and_what_follows_is_the_same(data: st.DataObject):
    ours = new_table(properties={"format-version": "2"})
    upgrade_after = data.draw(st.integers(0, COMMITS_MAX // 2))
    theirs = TableMetadataUtil.parse_obj(ours)
    for number in range(1, COMMITS_MAX + 1):
        location = f"{LOCATION}/metadata/{number:05d}-x.metadata.json"
        if number == upgrade_after + 1:
            before = comparable(theirs)
            ours = apply_ours(ours, [{"action": "upgrade-format-version", "format-version": 3}], location)
            theirs = TableMetadataUtil.parse_obj(ours)
            changed = {"format-version": 3, "next-row-id": 0, "metadata-log": [*before["metadata-log"], location]}
            assert comparable(theirs) == before | changed
            continue
        commit = Commit(ours, number, data.draw)
        for _ in range(data.draw(st.integers(1, UPDATES_MAX))):
            commit.maybe_draw_one()
        ours, theirs = (
            apply_ours(ours, commit.updates, location),
            apply_theirs(theirs, commit.updates, location),
        )
        assert comparable(TableMetadataUtil.parse_obj(ours)) == comparable(theirs), commit.updates


@hypothesis.given(data=st.data())
def test_encryption_keys_are_those_that_were_added_first_and_not_removed(data: st.DataObject):
    table = new_table(properties={"format-version": "3"})
    rest, model = {**table}, dict[str, dict[str, str]]()
    for number in range(data.draw(st.integers(1, COMMITS_MAX))):
        key = {"key-id": data.draw(KEY_IDS), "encrypted-key-metadata": f"{number:04d}", "encrypted-by-id": "kms"}
        if data.draw(st.booleans()):
            update = {"action": "add-encryption-key", "encryption-key": key}
            model.setdefault(key["key-id"], key)
        else:
            update = {"action": "remove-encryption-key", "key-id": key["key-id"]}
            model.pop(key["key-id"], None)
        table = apply_ours(table, [update], LOCATION)
        assert table.get("encryption-keys", []) == list(model.values())
        logs = {name: table[name] for name in ("metadata-log", "last-updated-ms")}
        assert {name: table[name] for name in rest} == rest | logs
