"""Bytes that JSON writes as text, read a whole column at a time: base64 and the digits of UUIDs. Owns both readings.

Base64 is taken in the one way that it is written: with padding, no white space, unused bits zero. So every text that
is read has one value, and every value one text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

UUID_BYTES = 16

_Bytes = npt.NDArray[np.uint8]

_QUAD = 4  # characters of base64, for three bytes
_PAD = 64
_NO_CODE = 255


def _codes(characters: bytes) -> _Bytes:
    codes = np.full(256, _NO_CODE, np.uint8)
    codes[np.frombuffer(characters, np.uint8)] = np.arange(len(characters), dtype=np.uint8)
    return codes


_BASE64 = _codes(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
_HEXADECIMAL = np.minimum(_codes(b"0123456789abcdef"), _codes(b"0123456789ABCDEF"))


def read_uuids(texts: pa.Array) -> pa.Array:
    """Read UUIDs, whose form is checked already, as bytes."""
    digits = _HEXADECIMAL[_characters(pc.replace_substring(texts, "-", "").drop_null())]
    values = (digits[0::2] << 4) | digits[1::2]
    count = len(values) // UUID_BYTES
    uuids = pa.Array.from_buffers(pa.binary(UUID_BYTES), count, [None, pa.py_buffer(values)])
    return _with_nulls_of(texts, uuids)


def read_base64(texts: pa.Array) -> pa.Array:
    """Read base64 as bytes.

    Raises: ValueError if any text is not written so.
    """
    present = texts.drop_null()
    lengths = pc.binary_length(present).to_numpy().astype(np.int64)
    codes = _BASE64[_characters(present)]
    if np.any(lengths % _QUAD) or np.any(codes == _NO_CODE):
        raise ValueError("not base64")
    quads = codes.reshape(-1, _QUAD)
    pads = quads == _PAD
    _check_padding(quads, pads, ends=np.cumsum(lengths // _QUAD) - 1, filled=lengths > 0)
    first, second, third, fourth = np.where(pads, 0, quads).T.astype(np.uint8)
    triples = np.stack([first << 2 | second >> 4, second << 4 | third >> 2, third << 6 | fourth], axis=1)
    values = triples[~np.stack([pads[:, 0], pads[:, 2], pads[:, 3]], axis=1)]
    sizes = lengths // _QUAD * 3 - _pads_of(pads, lengths)
    offsets = np.r_[0, np.cumsum(sizes)].astype(np.int32)
    binaries = pa.Array.from_buffers(pa.binary(), len(present), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    return _with_nulls_of(texts, binaries)


def _check_padding(
    quads: _Bytes, pads: npt.NDArray[np.bool_], *, ends: npt.NDArray[np.int64], filled: npt.NDArray[np.bool_]
) -> None:
    """Check that padding stands at the ends of texts alone, and that the bits beside it are zero."""
    padded = pads.any(axis=1)
    at_end = np.zeros(len(quads), bool)
    at_end[ends[filled]] = True
    one, two = pads[:, 3] & ~pads[:, 2], pads[:, 2]
    is_wrong = (padded & ~at_end) | pads[:, 0] | pads[:, 1] | (pads[:, 2] & ~pads[:, 3])
    is_wrong |= (one & (quads[:, 2] & 0x03 != 0)) | (two & (quads[:, 1] & 0x0F != 0))
    if is_wrong.any():
        raise ValueError("not the one way to write these bytes")


def _pads_of(pads: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count the padding of each text."""
    before = np.r_[0, np.cumsum(pads.sum(axis=1))]
    ends = np.cumsum(lengths // _QUAD)
    counts: npt.NDArray[np.int64] = before[ends] - before[ends - lengths // _QUAD]
    return counts


def _characters(texts: pa.Array) -> _Bytes:
    """Give the bytes of texts without nulls, one after the other."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return np.empty(0, np.uint8)
    first, last = np.frombuffer(offsets, np.int32)[[texts.offset, texts.offset + len(texts)]]
    return np.frombuffer(data, np.uint8)[first:last]


def _with_nulls_of(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Put values back where their texts were."""
    if not texts.null_count:
        return values
    present = texts.is_valid().to_numpy(zero_copy_only=False)
    return values.take(pa.array(np.cumsum(present) - 1, mask=~present))
