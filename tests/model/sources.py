"""Sources that keep to the protocol: what they send, what they hold an ack for, and what they do when refused.

A source counts its changes 0, 1, 2 ... in each epoch; on the wire they are so many times its stride, because a source
may leave numbers out. It speaks on one connection at a time, resumes where it is told to, and sends a refused batch
again, the same under the same number, before anything behind it. A source that opens a connection without `connect`
asks nobody: it sends again, in other cuts, all that it has no ack for. What it sent on a connection that it gave up may
still arrive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import orjson

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.protocol.messages import AckLevel

# Numbers of batches may begin anywhere.
FIRST_NUMBER = 7


@dataclass(frozen=True, slots=True)
class Batch:
    """The changes `first` to `stop` (which is not among them), as one message."""

    epoch: int
    number: int
    first: int
    stop: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service says to a batch, or to all up to it (`persisted`)."""

    status: str
    number: int


@dataclass(slots=True)
class Source:
    """One source and its book: changes below `acked[epoch]` are acked."""

    name: SourceId
    stride: int = 1
    names_previous: bool = False
    epoch: int = 0
    next: int = 0
    number: int = 0
    numbered: bool = True
    asks: bool = True
    ack_level: AckLevel = "durable"
    acked: dict[int, int] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    in_flight: deque[Batch] = field(default_factory=deque)
    bodies: set[bytes] = field(default_factory=set)

    def resume(self, *, numbered: bool, ack_level: AckLevel, durable: int | None) -> None:
        """Begin on a new connection, behind what is durable."""
        self.numbered = numbered or ack_level == "committed"  # a receipt names a number, so there must be one
        self.ack_level = ack_level
        self.asks = True
        self.number = FIRST_NUMBER if self.numbered else 0
        self.next = 0 if durable is None else durable + 1
        self.batches.clear()
        self.in_flight.clear()

    def go_on(self, *, numbered: bool) -> None:
        """Begin on a new connection behind what is acked, as one who does not ask."""
        self.resume(numbered=numbered, ack_level="durable", durable=self.acked.get(self.epoch, 0) - 1)
        self.asks = False

    def batch(self, *, back: int, size: int, padding: int) -> Batch:
        """Make the next batch, or the one again that is due again.

        A new one may go `back` over what was sent, and then on to its end at least: a source that left out what it sent
        before would have to know what became of it.
        """
        if self.number not in self.batches:
            first = max(0, self.next - back)
            stop = max(self.next, first + size)
            body = self._body(first, stop, padding)
            self.batches[self.number] = Batch(self.epoch, self.number, first, stop, body)
        batch = self.batches[self.number]
        self.next = max(self.next, batch.stop)
        self.number += 1
        self.in_flight.append(batch)
        self.bodies.add(batch.body)
        return batch

    def malformed(self) -> bytes:
        """Make the next batch, but spoiled on its way. Numbers tell which one it was; without them nothing could."""
        assert self.numbered
        batch = self.batch(back=0, size=2, padding=0)
        return batch.body.replace(b'"firstEventSequence":', b'"firstEventSequence":9')

    def hear(self, answer: Answer) -> None:
        """Take an answer: they come in the order of the batches, but for receipts."""
        if answer.status == "persisted":
            if self.ack_level == "committed":
                self._note_acked(self.batches[answer.number])
            return
        batch = self._answered(answer)
        if answer.status == "nack":
            self.number = min(self.number, batch.number)
            if not self.asks:
                self._cut_anew(batch)
        else:
            self._note_acked(batch)

    def _cut_anew(self, refused: Batch) -> None:
        """Go back to what was refused, and send it in other batches."""
        self.next = min(self.next, refused.first)
        self.batches = {number: batch for number, batch in self.batches.items() if number < self.number}

    def _answered(self, answer: Answer) -> Batch:
        """Find the batch that an answer is about: the next, unless those before it are answered by receipts alone."""
        while True:
            batch = self.in_flight.popleft()
            if self.ack_level == "durable" or batch.number == answer.number:
                break
        assert not self.numbered or batch.number == answer.number, f"answers are out of order: {answer} for {batch}"
        return batch

    def _note_acked(self, batch: Batch) -> None:
        self.acked[batch.epoch] = max(self.acked.get(batch.epoch, 0), batch.stop)

    def _body(self, first: int, stop: int, padding: int) -> bytes:
        message = {
            "type": "cdc_batch",
            "sourceDoId": self.name,
            **({"sequenceNumber": self.number} if self.numbered else {}),
            **(
                {"firstEventSequence": first * self.stride, "lastEventSequence": (stop - 1) * self.stride}
                if first < stop
                else {}
            ),
            **({"previousSequence": (first - 1) * self.stride} if self.names_previous and first else {}),
            "events": [
                {"sequence": index * self.stride, "operation": "INSERT", "table": "t", "after": {"pad": "x" * padding}}
                for index in range(first, stop)
            ],
        }
        return orjson.dumps(message)


def sequences_of(body: bytes) -> list[int]:
    """Read the sequences of a batch back."""
    return [event["sequence"] for event in orjson.loads(body)["events"]]
