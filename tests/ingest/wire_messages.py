"""Messages of the wire protocol as bytes, for tests of what is read from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.messages import decode_message


def frame(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, **fields}).encode()


def event(sequence: int = 1, **fields: Any) -> dict[str, Any]:
    return {"sequence": sequence, "operation": "INSERT", "table": "users", "after": {"id": sequence}, **fields}


def batch(*sequences: int, **fields: Any) -> bytes:
    return frame("cdc_batch", **{"sourceDoId": "shop", "events": [event(each) for each in sequences], **fields})


def refusal(body: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode_message(body)
    return caught.value
