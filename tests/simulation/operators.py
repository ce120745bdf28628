"""Other clients of the catalog: they compact, expire, roll back and drop tables, and remove properties.

Fake: the clients, written to Iceberg's REST specification. Their requests go through the network like all others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any

import orjson
from yarl import URL

from lakefeed.contract.changes import TableName
from lakefeed.contract.progress import PROGRESS_PROPERTY, ProgressUnreadable
from lakefeed.iceberg.manifests import (
    DataFile,
    ListHeader,
    ManifestList,
    apply_manifest,
    describe_manifest,
    encode_manifest,
    encode_manifest_list,
    list_manifests,
)
from lakefeed.writer.commit.state import progress_of, table_state_from
from tests.simulation.lake import live_files
from tests.simulation.network import HttpRequest, HttpResponse, Network, Process
from tests.simulation.storage import Objects

TIMEOUT_S = 10.0

_ANY = TableName(("any",), "any")


class Operator:
    """An operator with a REST client. Every operation returns what it did."""

    def __init__(
        self, network: Network, catalog: Callable[[], Process | None], objects: Objects, chance: random.Random
    ) -> None:
        self._network = network
        self._catalog = catalog
        self._objects = objects
        self._chance = chance
        self._process = Process("operator", copy_context())

    async def drop(self) -> str:
        """Drop a table, mostly with its files."""
        table = await self._choose()
        if table is None:
            return "drop: no table"
        purge = self._chance.random() < 0.5
        response = await self._send("DELETE", f"{table}?purgeRequested={str(purge).lower()}")
        return f"drop {table}: {_status(response)}"

    async def remove_marker(self) -> str:
        """Remove the property that holds the progress marker, if the snapshots can replace it."""
        table, document = await self._load()
        document["properties"] = {**document.get("properties", {})}
        document["properties"].pop(PROGRESS_PROPERTY, None)
        try:
            progress_of(_ANY, document)
        except ProgressUnreadable:  # the table would stop until an operator puts it back
            table = None
        if table is None:
            return "remove marker: nothing"
        return await self._commit({"action": "remove-properties", "removals": [PROGRESS_PROPERTY]}, table=table)

    async def expire(self) -> str:
        """Remove all snapshots but the current one."""
        table, document = await self._load()
        current = document.get("current-snapshot-id")
        old = [each["snapshot-id"] for each in document.get("snapshots") or () if each["snapshot-id"] != current]
        if table is None or not old or PROGRESS_PROPERTY not in document["properties"]:
            return "expire: nothing"
        return await self._commit({"action": "remove-snapshots", "snapshot-ids": old}, table=table)

    async def roll_back(self) -> str:
        """Move main back to an earlier snapshot; an append-only table has to allow it first."""
        table, document = await self._load()
        snapshots = document.get("snapshots") or []
        if table is None or len(snapshots) < 2:
            return "rollback: nothing"
        target = self._chance.choice(snapshots[:-1])["snapshot-id"]
        steps = (
            {"action": "set-properties", "updates": {"lakefeed.append-only": "false"}},
            {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": target},
            {"action": "set-properties", "updates": {"lakefeed.append-only": "true"}},
        )
        return "; ".join([await self._commit(step, table=table) for step in steps])

    async def compact(self) -> str:
        """Replace all data files by one with the same rows, as `rewrite_data_files` does."""
        table, document = await self._load()
        state = table_state_from(_ANY, document) if table is not None else None
        if table is None or state is None or state.manifest_list is None:
            return "compact: nothing"
        held, base = self._objects.held, f"{document['location']}/compacted-{self._chance.getrandbits(64)}"
        snapshot_id = self._chance.getrandbits(62)
        manifests = list_manifests(held[state.manifest_list], state.manifest_list)
        files = [file for each in reversed(manifests) for file in live_files(held[each.location], each)]
        rows = [row for file in files for row in orjson.loads(held[file])]
        file = DataFile(f"{base}.rows", (), len(rows), 1, {}, {}, {}, {}, {}, (4,), None)
        manifest = encode_manifest([file], shape=state.shape, snapshot_id=snapshot_id)
        described = describe_manifest(
            [file], shape=state.shape, snapshot_id=snapshot_id, location=f"{base}.avro", size_bytes=len(manifest)
        )
        number = document["last-sequence-number"] + 1
        header = ListHeader(snapshot_id, state.snapshot_id, number, state.format_version)
        listed = encode_manifest_list(apply_manifest(ManifestList(), described, sequence_number=number), header)
        held.update({file.location: orjson.dumps(rows), f"{base}.avro": manifest, f"{base}-list.avro": listed})
        snapshot = {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": state.snapshot_id,
            "sequence-number": number,
            "timestamp-ms": document["last-updated-ms"],
            "manifest-list": f"{base}-list.avro",
            "summary": {"operation": "replace"},
            "schema-id": document["current-schema-id"],
        }
        updates = (
            {"action": "add-snapshot", "snapshot": snapshot},
            {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id},
        )
        requirement = {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": state.snapshot_id}
        return await self._commit(*updates, table=table, requirements=[requirement])

    # -- requests

    async def _commit(
        self, *updates: Mapping[str, Any], table: str | None = None, requirements: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        table = table or await self._choose()
        action = updates[0]["action"]
        if table is None:
            return f"{action}: no table"
        body = orjson.dumps({"requirements": requirements, "updates": updates})
        return f"{action} {table}: {_status(await self._send('POST', table, body))}"

    async def _load(self) -> tuple[str | None, dict[str, Any]]:
        table = await self._choose()
        response = await self._send("GET", table) if table is not None else None
        if response is None or response.status != 200:
            return None, {}
        return table, orjson.loads(response.body)["metadata"]

    async def _choose(self) -> str | None:
        """Return the path of some change table."""
        namespace = self._chance.choice(("default", "sales"))
        response = await self._send("GET", f"/namespaces/{namespace}/tables")
        if response is None or response.status != 200:
            return None
        names = [each["name"] for each in orjson.loads(response.body)["identifiers"]]
        return f"/namespaces/{namespace}/tables/{self._chance.choice(names)}" if names else None

    async def _send(self, method: str, path: str, body: bytes = b"") -> HttpResponse | None:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._network.request(
                    self._process, self._catalog, HttpRequest(method, URL(path, encoded=True), headers, body)
                )
        except (ConnectionError, TimeoutError):
            return None


def _status(response: HttpResponse | None) -> str:
    return (
        "no answer"
        if response is None
        else f"{response.status}" + (f" {response.body[:200]!r}" if response.status >= 400 else "")
    )
