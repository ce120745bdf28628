"""Metrics per source: who gets a label, what the others share, and what is told while nothing is known."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.metrics import IngestCounts, SourceCollector
from lakefeed.ingest.protocol.offers import Fresh
from tests.ingest.offers import offer_of


class Watched:
    """Sources with their marks, and a registry that looks at them."""

    def __init__(self, labels_max: int, **durable: int) -> None:
        self.durable = {SourceId(name): Position(0, sequence) for name, sequence in durable.items()}
        self.committed: dict[str, Position] = {}
        self.counts = IngestCounts()
        self.registry = CollectorRegistry()
        collector = SourceCollector(
            self.counts, sources=lambda: self.durable, committed=self.committed.get, labels_max=labels_max
        )
        self.registry.register(collector)

    def value(self, name: str, source: str) -> float | None:
        return self.registry.get_sample_value(f"lakefeed_ingest_source_{name}", {"source": source})


def test_counts_and_sequence_of_each_source():
    watched = Watched(10, shop=9, bank=4)
    watched.counts.add_durable([Fresh(offer_of(7, 8, 9), after_sequence=7), Fresh(offer_of(4, source="bank"), -1)])
    watched.counts.add_duplicate(offer_of(1, 2))
    assert watched.value("durable_changes_total", "shop") == 2
    assert watched.value("duplicate_changes_total", "shop") == 3
    assert watched.value("last_durable_sequence", "shop") == 9
    assert watched.value("durable_changes_total", "bank") == 1
    assert watched.value("duplicate_changes_total", "bank") == 0


def test_first_by_name_have_their_own_label_and_the_rest_share_one():
    watched = Watched(2, a=1, b=2, c=30, d=40)
    watched.committed |= {"c": Position(0, 10), "d": Position(0, 39)}
    watched.counts.add_durable([Fresh(offer_of(1, source=name), -1) for name in "abcd"])
    assert [watched.value("durable_changes_total", name) for name in ("a", "b", "c", "other")] == [1, 1, None, 2]
    assert watched.value("commit_lag_sequences", "other") == 20, "the worst of them"
    assert watched.value("last_durable_sequence", "other") is None


def test_source_that_is_called_other_has_no_label_of_its_own():
    watched = Watched(5, other=1, z=2)
    watched.counts.add_durable([Fresh(offer_of(1, source="other"), -1)])
    assert watched.value("durable_changes_total", "other") == 1
    assert watched.value("last_durable_sequence", "z") == 2


def test_what_others_share_never_falls_when_a_new_name_takes_a_label():
    watched = Watched(1, b=1, c=1)
    watched.counts.add_durable([Fresh(offer_of(1, source=name), -1) for name in "bc"])
    before = watched.value("durable_changes_total", "other")
    watched.durable[SourceId("a")] = Position(0, 0)
    assert watched.value("durable_changes_total", "other") == before + 1


def test_lag_is_what_is_durable_and_not_committed_and_absent_while_unknown():
    watched = Watched(5, new=9, behind=9, over=9)
    watched.committed |= {"behind": Position(0, 4), "over": Position(0, 9)}
    assert [watched.value("commit_lag_sequences", name) for name in ("new", "behind", "over")] == [None, 5, 0]
    watched.durable[SourceId("over")] = Position(1, 2)
    assert watched.value("commit_lag_sequences", "over") == 3, "nothing of the new epoch is committed"


def test_no_source_no_sample():
    assert Watched(5).value("durable_changes_total", "other") is None
    assert Watched(0, a=1).value("durable_changes_total", "other") == 0
