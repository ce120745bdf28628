from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.sources import decode_head, encode_head


def test_head_survives_being_written_and_read():
    marks = {SourceId('quo"te'): Position(0, 7), SourceId("größe"): Position(9, 2**63 - 1)}
    origins = {SourceId("größe"): '{"key":[1,2]}'}
    assert decode_head(encode_head(marks, origins)) == (marks, origins)
    assert decode_head(encode_head({}, {})) == ({}, {})
