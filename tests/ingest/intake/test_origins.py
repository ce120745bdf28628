from lakefeed.contract.changes import SourceId
from lakefeed.ingest.intake.sources import Origins

SHOP, BANK = SourceId("shop"), SourceId("bank")


def test_newest_text_of_each_source_is_kept():
    origins = Origins(max_bytes=100)
    for source, text in ((SHOP, "one"), (BANK, "two"), (SHOP, "three"), (BANK, "")):
        origins.record(source, text)
    assert origins.texts() == {SHOP: "three", BANK: "two"}
    assert origins.get(SourceId("nobody")) == ""


def test_room_counts_names_and_texts_and_what_is_replaced():
    origins = Origins(max_bytes=14)
    origins.record(SHOP, "12345")
    assert origins.has_room_for(SHOP, "1234567890")
    assert not origins.has_room_for(SHOP, "12345678901")
    assert origins.has_room_for(BANK, "1")
    assert not origins.has_room_for(BANK, "12")
