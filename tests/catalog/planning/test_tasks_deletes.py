"""Delete files: which ones apply to a data file, and how they are shown to clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lakefeed.catalog.planning.evaluate import ScanSpec
from lakefeed.catalog.planning.tasks import FILE_PATH_ID, DeleteIndex, delete_file_json
from lakefeed.iceberg.manifests import Content, Entry, Status
from tests.catalog.planning.scans import make_spec

BY_DAY = make_spec([("moment", "day")])
UNPARTITIONED = ScanSpec(1, ())
BY_VOID = replace(make_spec([("moment", "void")]), spec_id=2)
SPECS = {0: BY_DAY, 1: UNPARTITIONED, 2: BY_VOID}


def file_of(
    path: str, sequence: int, *, spec: ScanSpec = BY_DAY, day: Any = 1, content: Content = Content.DATA, **more: Any
) -> Entry:
    file = {"file_path": path, "record_count": 1, "file_format": "PARQUET", "file_size_in_bytes": 1, **more}
    partition = (day,) * len(spec.fields)
    return Entry(Status.ADDED, 1, sequence, content, spec.spec_id, file, partition, None)


def deletes_for(data: Entry, *deletes: Entry) -> list[str]:
    return [entry.file["file_path"] for entry in DeleteIndex(deletes, SPECS).find(data)]


POSITION, EQUALITY = Content.POSITION_DELETES, Content.EQUALITY_DELETES


@pytest.mark.parametrize(("sequence", "applies"), [(4, False), (5, True), (6, True)])
def test_position_deletes_apply_to_files_that_are_not_newer(sequence: int, applies: bool):
    assert bool(deletes_for(file_of("f", 5), file_of("d", sequence, content=POSITION))) == applies


@pytest.mark.parametrize(("sequence", "applies"), [(4, False), (5, False), (6, True)])
def test_equality_deletes_apply_to_files_that_are_older(sequence: int, applies: bool):
    assert bool(deletes_for(file_of("f", 5), file_of("d", sequence, content=EQUALITY))) == applies


@pytest.mark.parametrize("content", [POSITION, EQUALITY])
def test_deletes_stay_in_their_partition(content: Content):
    delete = file_of("d", 9, content=content)
    assert deletes_for(file_of("f", 5, day=1), delete) == ["d"]
    assert deletes_for(file_of("f", 5, day=2), delete) == []
    assert deletes_for(file_of("f", 5, spec=UNPARTITIONED), delete) == []


@pytest.mark.parametrize("spec", [UNPARTITIONED, BY_VOID])
def test_equality_deletes_of_an_unpartitioned_spec_apply_everywhere(spec: ScanSpec):
    delete = file_of("d", 9, spec=spec, day=None, content=EQUALITY)
    assert deletes_for(file_of("f", 5, day=2), delete) == ["d"]
    assert deletes_for(file_of("f", 5, spec=UNPARTITIONED), delete) == ["d"]


def test_position_deletes_that_name_their_file_are_for_it_alone():
    named = file_of("named", 9, content=POSITION, referenced_data_file="f")
    bounds = [{"key": FILE_PATH_ID, "value": b"f"}]
    bounded = file_of("bounded", 9, content=POSITION, lower_bounds=bounds, upper_bounds=bounds)
    assert deletes_for(file_of("f", 5), named, bounded) == ["named", "bounded"]
    assert deletes_for(file_of("g", 5), named, bounded) == []


def test_deletion_vector_takes_the_place_of_position_deletes():
    vector = file_of("v", 9, content=POSITION, referenced_data_file="f", content_offset=4, content_size_in_bytes=40)
    older = file_of("d", 8, content=POSITION)
    equality = file_of("e", 9, content=EQUALITY)
    assert deletes_for(file_of("f", 5), older, vector, equality) == ["e", "v"]
    assert deletes_for(file_of("g", 5), older, vector, equality) == ["e", "d"]


def test_deletes_apply_within_a_partition_of_nan():
    nan, other = float("nan"), float("-nan")
    assert deletes_for(file_of("f", 5, day=nan), file_of("d", 9, day=other, content=POSITION)) == ["d"]


def test_delete_file_is_shown_with_what_readers_need():
    vector = file_of("v", 9, content=POSITION, referenced_data_file="f", content_offset=4, content_size_in_bytes=40)
    assert delete_file_json(vector, BY_DAY) == {
        "content": "position-deletes",
        "file-path": "v",
        "file-format": "parquet",
        "spec-id": 0,
        "partition": ["1970-01-02"],
        "file-size-in-bytes": 1,
        "record-count": 1,
        "referenced-data-file": "f",
        "content-offset": 4,
        "content-size-in-bytes": 40,
    }
    equality = file_of("e", 9, content=EQUALITY, equality_ids=[1, 2], sort_order_id=0, key_metadata=b"\xab")
    shown = delete_file_json(equality, BY_DAY)
    assert (shown["content"], shown["equality-ids"], shown["sort-order-id"]) == ("equality-deletes", [1, 2], 0)
    assert shown["key-metadata"] == "AB"
