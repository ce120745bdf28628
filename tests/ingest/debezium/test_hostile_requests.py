"""Whatever is sent, reading it gives events or the one error, and the error shows nothing of what was sent."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import DebeziumMalformed
from lakefeed.ingest.debezium.forms import read_context
from lakefeed.ingest.debezium.positions import Positions
from lakefeed.ingest.debezium.transactions import TransactionTally
from tests.ingest.debezium.recordings import CONFIG, NAMES, Request, load

SEED = 20261116
MUTATIONS_PER_VARIANT = 1_500
CANARY = "c4n4ry"
LEAVES = [None, True, -1, 2**70, 1.5, "", CANARY, [], {}, [CANARY], {CANARY: CANARY}, "\x00", "[1,2]", "NaN"]


def cut(body: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(body))
    stop = min(len(body), start + rng.randint(1, 30))
    with_what = rng.choice([b"", b"{", b"]", b'"', b"\xff", b"null", b"1e999", b"\\ud800", body[start:stop] * 2])
    return body[:start] + with_what + body[stop:]


def swap(body: bytes, rng: random.Random) -> bytes:
    """Put another value somewhere into the document."""
    document = json.loads(body)
    node: Any = document
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        place = rng.choice(places)
        child = node[place]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.2:
            node[place] = rng.choice(LEAVES)
            return json.dumps(document).encode()
        node = child


def mutated(request: Request, rng: random.Random) -> Request:
    body = rng.choice([cut, swap])(request.body, rng)
    headers = {
        name: cut(value.encode(), rng).decode(errors="replace") if rng.random() < 0.1 else value
        for name, value in request.headers.items()
    }
    return Request(headers, body)


@pytest.mark.parametrize("variant", NAMES)
def test_mutated_requests_raise_nothing_but_the_one_error(variant):
    rng = random.Random(f"{SEED} {variant}")
    positions, tally = Positions(), TransactionTally()
    refusals = []
    for _ in range(MUTATIONS_PER_VARIANT):
        request = mutated(rng.choice(load(variant)), rng)
        try:
            events = read_events(request.body, request.headers, CONFIG)
            context = read_context(request.headers)
        except DebeziumMalformed as error:
            refusals.append(str(error))
            continue
        positions = positions.plan(events, run_id=context.run_id).after
        for event in events:
            tally.observe(event)

    assert 0 < len(refusals) < MUTATIONS_PER_VARIANT
    assert not [refusal for refusal in refusals if CANARY in refusal]
