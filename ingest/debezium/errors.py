"""The one error that reading Debezium's requests raises."""

from __future__ import annotations

from ingest.errors import IngestError


class DebeziumMalformed(IngestError):
    """A request is not what Debezium sends: refuse it whole. Names the place and the rule, never a value."""

    def __init__(self, place: str, rule: str) -> None:
        super().__init__(f"{place}: {rule}")
        self.place = place
        self.rule = rule
