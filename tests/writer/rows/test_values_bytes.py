from __future__ import annotations

import base64
import uuid

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.writer.rows.values import Misfit, read_base64, read_texts, read_uuids


@given(st.lists(st.none() | st.binary(max_size=9), max_size=8), st.integers(0, 3))
def test_base64_is_read_as_the_bytes_that_were_written(values, offset):
    texts = pa.array([None if value is None else base64.b64encode(value).decode() for value in values], pa.string())
    assert read_base64(texts.slice(offset)).to_pylist() == values[offset:]


@given(st.lists(st.text("AZaz09+/=\nß Bg", max_size=9), min_size=1, max_size=4))
def test_base64_that_is_written_otherwise_is_refused(texts):
    def canonical(text: str) -> bytes | None:
        try:
            value = base64.b64decode(text, validate=True)
        except ValueError:
            return None
        return value if base64.b64encode(value).decode() == text else None

    expected = [canonical(text) for text in texts]
    if None in expected:
        with pytest.raises(ValueError, match="base64"):
            read_base64(pa.array(texts))
    else:
        assert read_base64(pa.array(texts)).to_pylist() == expected


@given(st.lists(st.none() | st.uuids(), max_size=6), st.integers(0, 2), st.booleans())
def test_uuids_are_read_in_either_case(values, offset, upper):
    written = [None if value is None else str(value).upper() if upper else str(value) for value in values]
    read = read_uuids(pa.array(written, pa.string()).slice(offset))
    assert [None if value is None else uuid.UUID(bytes=value) for value in read.to_pylist()] == values[offset:]


@pytest.mark.parametrize("text", ["AAAA", "AAAAAAA=", ""])
def test_bytes_of_another_length_do_not_fit_a_fixed_type(text):
    with pytest.raises(Misfit):
        read_texts(pa.array([text]), "fixed[4]")
    assert read_texts(pa.array(["AAAAAA==", None]), "fixed[4]").to_pylist() == [bytes(4), None]
