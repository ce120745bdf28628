"""Debezium's requests on a real log: what is remembered with them, over restarts, cancellations and other clients."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.debezium.events import DebeziumMalformed
from lakefeed.ingest.intake.debezium import REPORTS_SHOWN, TABLES_SHOWN, DebeziumIntake, DebeziumReceipt
from lakefeed.ingest.protocol.offers import Durable, NackReason, Refused
from tests.fakes import HeldFilesystem
from tests.ingest.debezium.envelopes import KEYED, envelope, header, mark, streamed
from tests.ingest.http_ingest import NOW_US, HttpIngestClient, serving_routes
from tests.ingest.offers import offer_of
from tests.ingest.running_intake import LARGE, fill_log, run_ready_tasks, until

SHOP = SourceId("shop")
HEARTBEAT = {"ts_ms": 1_794_802_444_929}


def in_transaction(row: int, transaction: str = "5", **fields: Any) -> dict[str, Any]:
    document = streamed(90, 100 + row, row, **fields)
    document["transaction"] = {"id": f"{transaction}:{100 + row}", "total_order": row, "data_collection_order": row}
    return document


def run(name: str) -> dict[str, str]:
    return {"X-DEBEZIUM-__DEBEZIUM.CONTEXT.RUNID": header({"schema": {"type": "string"}, "payload": name})}


async def take(
    intake: DebeziumIntake, *documents: Any, source: str = "shop", headers: dict[str, str] | None = None
) -> DebeziumReceipt:
    body = documents[0] if len(documents) == 1 else list(documents)
    async with asyncio.timeout(20):
        return await intake.accept(SourceId(source), json.dumps(body).encode(), headers or {})


def ids(client: HttpIngestClient, source: str = "shop") -> list[int]:
    return [row["id"] for row in client.accepted_rows(source)]


# -- numbers


async def test_changes_are_numbered_without_holes_from_the_time_on(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await take(client.debezium_intake, HEARTBEAT)
        await take(client.debezium_intake, streamed(90, 100, 1), HEARTBEAT, streamed(90, 105, 2))
        await take(client.debezium_intake, streamed(90, 110, 3))
        assert client.sequences() == [NOW_US, NOW_US + 1, NOW_US + 2]
        assert ids(client) == [1, 2, 3]


async def test_numbers_go_on_above_what_another_client_wrote_under_the_same_name_before(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        intake = client.debezium_intake
        await client.running.verdicts(offer_of(2**60, epoch=3))
        await take(intake, streamed(90, 100, 1), headers=run("a"))
        await take(intake, streamed(90, 100, 1), streamed(90, 105, 2), headers=run("b"))
        await take(intake, HEARTBEAT)
        assert client.running.intake.durable_position(SHOP) == Position(3, 2**60 + 2)
        assert ids(client) == [2**60, 1, 2]


async def test_another_client_cannot_write_under_the_name_of_an_adapters_source(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await take(client.debezium_intake, streamed(90, 100, 1))
        (other,) = await client.running.offer(offer_of(NOW_US + 1, NOW_US + 2))
        refused = await other
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.retry) == (NackReason.INVALID_SEQUENCE, False)
        assert isinstance((await take(client.debezium_intake, streamed(90, 105, 2))).verdict, Durable)
        assert ids(client) == [1, 2]


async def test_source_without_numbers_left_is_refused(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await client.running.verdicts(offer_of(2**63 - 1))
        status, document = await client.debezium(streamed(90, 100, 1))
        assert (status, document["reason"]) == (409, "invalid_sequence")
        assert "used up its sequences" in document["error"]
        status, document = await client.rows({"id": 1})
        assert (status, document["reason"]) == (409, "invalid_sequence")


# -- what is remembered


async def test_state_becomes_durable_in_the_record_of_its_changes(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await take(client.debezium_intake, mark("BEGIN", "5:100"), in_transaction(1))
        (frame,) = client.running.frames()
        assert frame.origin == client.running.intake.adapter_states.get(SHOP)
        state = json.loads(frame.origin)
        assert state["positions"]["taken"] == frame.last_sequence
        assert state["tally"]["unended"]["5"]["arrived"] == 1


@pytest.mark.parametrize("trimmed", [False, True])
async def test_restart_forgets_nothing(tmp_path, trimmed):
    first, second = streamed(90, 100, 1), streamed(90, 105, 2)
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await take(client.debezium_intake, first, headers=run("a"))
        await take(client.debezium_intake, second, headers=run("a"))
        if trimmed:
            await fill_log(client.running)
            await client.running.log.trim(client.running.log.durable_end)
            assert client.sequences() == []
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        retried = await take(client.debezium_intake, second, headers=run("a"))
        resent = await take(client.debezium_intake, first, second, streamed(90, 110, 3), headers=run("b"))
        assert (retried.verdict, retried.repeated) == (None, 1)
        assert (resent.fresh, resent.repeated) == (1, 2)
        assert client.sequences()[-1] == NOW_US + 2


async def test_refused_request_is_remembered_by_nobody_and_new_when_it_returns(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await fill_log(client.running)
        request = streamed(90, 100, 1)
        request["after"]["padding"] = "x" * LARGE
        refused = await take(client.debezium_intake, request)
        assert isinstance(refused.verdict, Refused)
        assert client.running.intake.adapter_states.get(SHOP) == ""
        await client.running.log.trim(client.running.log.durable_end)
        assert isinstance((await take(client.debezium_intake, request)).verdict, Durable)
        assert ids(client) == [1]
        assert client.metric("lakefeed_ingest_received_changes_total") == 1


async def test_full_log_makes_the_answer_late_and_it_is_a_200_once_there_is_room(tmp_path):
    request = streamed(90, 100, 1)
    request["after"]["padding"] = "x" * LARGE
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await fill_log(client.running)
        answer = asyncio.create_task(client.debezium(request))
        await until(lambda: client.running.intake._dedup.is_blocked("shop"))
        assert not answer.done()
        await client.running.log.trim(client.running.log.durable_end)
        assert (await answer).document["eventsAccepted"] == 1
        assert client.metric("lakefeed_ingest_received_changes_total") == 1


async def test_requests_of_one_source_take_turns_and_those_of_others_do_not_wait(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, debezium=KEYED, files=files) as client:
        intake = client.debezium_intake
        await take(intake, HEARTBEAT)
        files.open_gate.clear()
        mine = [asyncio.create_task(take(intake, streamed(90, 100 + row, row))) for row in range(1, 6)]
        others = [asyncio.create_task(take(intake, streamed(90, 100, 1), source=f"other-{n}")) for n in range(5)]
        await until(lambda: len(client.running.intake._queue) + len(client.running.intake._group) == 6)
        files.open_gate.set()
        await asyncio.gather(*mine, *others)
        assert ids(client) == [1, 2, 3, 4, 5]
        assert [ids(client, f"other-{number}") for number in range(5)] == [[1]] * 5


async def test_request_that_was_abandoned_is_waited_for_by_the_next_one(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, debezium=KEYED, files=files) as client:
        intake = client.debezium_intake
        await take(intake, streamed(90, 100, 1), headers=run("a"))
        files.open_gate.clear()
        begun = files.begun
        abandoned = asyncio.create_task(take(intake, streamed(90, 105, 2), headers=run("a")))
        await until(lambda: files.begun > begun)
        abandoned.cancel()
        await run_ready_tasks()
        heartbeat = asyncio.create_task(take(intake, HEARTBEAT, headers=run("b")))
        await run_ready_tasks()
        files.open_gate.set()
        await heartbeat
        resent = await take(intake, streamed(90, 105, 2), headers=run("b"))
        assert (resent.fresh, resent.repeated) == (0, 1)
        assert ids(client) == [1, 2]


async def test_positions_of_too_many_sources_are_refused_and_harm_nobody(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await take(client.debezium_intake, streamed(90, 100, 1))
        client.running.intake.adapter_states.max_bytes = client.running.intake.adapter_states._bytes + 10
        status, document = await client.debezium(streamed(90, 100, 1), source="one too many")
        assert (status, document["reason"], document["shouldRetry"]) == (503, "buffer_full", False)
        assert (await client.debezium(streamed(90, 105, 2))).status == 200


async def test_answer_counts_changes_and_calls_only_those_that_came_before_duplicates(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        answers = [
            (await client.debezium(*documents, headers=run(name))).document
            for documents, name in [
                ([HEARTBEAT], "a"),
                ([streamed(90, 100, 1), HEARTBEAT], "a"),
                ([streamed(90, 100, 1), HEARTBEAT], "a"),
                ([streamed(90, 100, 1), streamed(90, 105, 2)], "b"),
                ([streamed(90, 105, 2)], "c"),
            ]
        ]
        counted = [(each["eventsReceived"], each["eventsAccepted"], each["isDuplicate"]) for each in answers]
        assert counted == [(0, 0, False), (1, 1, False), (1, 0, True), (2, 1, False), (1, 0, True)]


async def test_source_is_named_by_query_or_by_the_connector_or_by_default(tmp_path):
    named = {"X-DEBEZIUM-__DEBEZIUM.CONTEXT.CONNECTORLOGICALNAME": header({"schema": None, "payload": "rec"})}
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        for source, headers in (("shop", named), ("", named), ("", {})):
            assert (await client.debezium(streamed(90, 100, 1), source=source, headers=headers)).status == 200
        assert set(client.running.intake.sources()) == {"shop", "rec", "debezium"}


@pytest.mark.parametrize(
    ("body", "headers", "error"),
    [
        (b"", {}, "event: expected an object"),
        (b"[1", {}, "body: expected JSON"),
        (b"\xff", {}, "body: expected UTF-8"),
        (b"5", {}, "event: expected an object"),
        (b"[1]", {}, "events[0]: expected an object"),
        (b'[{"ts_ms":1},{"a":1}]', {}, "events[1]: expected a change, a transaction marker or a heartbeat"),
        (b"[" * 5_000, {}, "body: a value is nested too deeply"),
        (b'{"op":"x","source":{"table":"t"}}', {}, "event.op: expected one of"),
        (b'{"op":"c","source":{"table":"t"}}', {}, "event.after: expected a row"),
        (b'{"op":"c","source":{},"after":{}}', {}, "event.source.table: expected the name of a table"),
        (b'{"ts_ms":1}', {"X-DEBEZIUM-__DEBEZIUM.CONTEXT.RUNID": "!"}, "CONTEXT.RUNID: expected base64 of JSON"),
    ],
)
async def test_malformed_request_is_a_400_that_names_place_and_rule(tmp_path, body, headers, error):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        status, document = await client.post("/cdc/debezium", body, headers=headers, params={"source": "shop"})
        assert (status, document["reason"], document["shouldRetry"]) == (400, "invalid_format", False)
        assert error in document["error"]
        assert client.running.frames() == []
        assert client.metric("lakefeed_ingest_nacks_total", reason="invalid_format") == 1


async def test_source_that_is_no_name_is_a_400(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        status, document = await client.debezium(HEARTBEAT, source="a\x01b")
        assert (status, document["error"].partition(":")[0]) == (400, "source")


# -- transactions


async def test_transaction_of_which_changes_are_missing_is_reported(tmp_path, caplog):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        with caplog.at_level(logging.WARNING):
            await take(client.debezium_intake, mark("BEGIN", "5:100"), in_transaction(1))
            await take(client.debezium_intake, mark("END", "5:200", 3, t=2, u=1))
        (record,) = [record for record in caplog.records if record.message == "transaction_incomplete"]
        report = {
            "source": "shop",
            "reason": "missing",
            "transaction": "5",
            "arrived": 1,
            "expected": 3,
            "missing": {"public.t": 1, "public.u": 1},
        }
        assert {name: getattr(record, name) for name in report} == report
        assert list(client.debezium_intake.incomplete_transactions) == [report]
        assert client.metric("lakefeed_ingest_incomplete_transactions_total", reason="missing") == 1


async def test_request_that_is_retried_is_reported_once(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        for _ in range(3):
            await take(client.debezium_intake, mark("BEGIN", "5:100"), in_transaction(1), mark("END", "5:200", 3, t=3))
        assert len(client.debezium_intake.incomplete_transactions) == 1
        assert client.metric("lakefeed_ingest_duplicate_changes_total") == 2


@pytest.mark.parametrize("complete", [True, False])
async def test_transaction_is_counted_through_a_restart_in_its_middle(tmp_path: Path, complete: bool):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        await take(client.debezium_intake, mark("BEGIN", "5:100"), in_transaction(1), in_transaction(2))
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        if complete:
            await take(client.debezium_intake, in_transaction(3))
        await take(client.debezium_intake, mark("END", "5:200", 3, t=3))
        found = [
            (report["reason"], report["arrived"], report["missing"])
            for report in client.debezium_intake.incomplete_transactions
        ]
        assert found == ([] if complete else [("missing", 2, {"public.t": 1})])


async def test_report_is_made_although_nobody_waits_for_the_answer(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, debezium=KEYED, files=files) as client:
        await take(client.debezium_intake, mark("BEGIN", "5:100"))
        files.open_gate.clear()
        begun = files.begun
        abandoned = asyncio.create_task(take(client.debezium_intake, mark("END", "5:200", 3, t=3)))
        await until(lambda: files.begun > begun)
        abandoned.cancel()
        await run_ready_tasks()
        files.open_gate.set()
        await take(client.debezium_intake, HEARTBEAT)
        assert [report["arrived"] for report in client.debezium_intake.incomplete_transactions] == [0]


async def test_reports_that_are_shown_are_bounded_in_number_and_size(tmp_path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        tables = {f"t{number}": 1 for number in range(500)}
        for number in range(REPORTS_SHOWN + 5):
            await take(client.debezium_intake, mark("BEGIN", f"{number}:1"), mark("END", f"{number}:2", 500, **tables))
        assert len(client.debezium_intake.incomplete_transactions) == REPORTS_SHOWN
        assert {len(report["missing"]) for report in client.debezium_intake.incomplete_transactions} == {TABLES_SHOWN}
        assert client.metric("lakefeed_ingest_incomplete_transactions_total", reason="missing") == REPORTS_SHOWN + 5


# -- what must not be remembered


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (mark("END", "5:1", 2**70), "event.event_count"),
        (mark("END", "5:1", 3, t=2**70), "event.data_collections"),
        (mark("BEGIN", "5" * 300), "event.id"),
        (envelope("c", after={"id": 1}) | {"transaction": {"id": "x" * 300}}, "event.transaction.id"),
    ],
    ids=["count", "count of a table", "id of a mark", "id of a change"],
)
async def test_what_no_source_counts_or_names_like_that_is_malformed(tmp_path, document, path):
    async with serving_routes(tmp_path, debezium=KEYED) as client:
        with pytest.raises(DebeziumMalformed) as error:
            await take(client.debezium_intake, document)
        assert error.value.path == path
        assert client.running.frames() == []
