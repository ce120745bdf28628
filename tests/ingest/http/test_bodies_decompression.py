"""Compressed bodies: whole ones come out as they went in, however they are cut; all others are refused."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.http.bodies import MEMBERS_MAX, Decompressor

TEXT = b"".join(b'{"id": %d, "name": "name of %d"}\n' % (number, number * 7919) for number in range(2_000))


def bare_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


CODINGS = [
    ("gzip", gzip.compress(TEXT)),
    ("x-gzip", gzip.compress(TEXT)),
    ("GZIP", gzip.compress(TEXT[:30_000]) + gzip.compress(b"") + gzip.compress(TEXT[30_000:])),
    ("deflate", zlib.compress(TEXT)),
    ("deflate", bare_deflate(TEXT)),
]
IDS = ["gzip", "x-gzip", "gzip in members", "deflate", "deflate without a header"]


def inflate(coding: str, body: bytes, *, max_bytes: int = len(TEXT), piece_bytes: int = 1_000) -> bytes:
    decompressor = Decompressor(coding, max_bytes=max_bytes)
    pieces = [body[place : place + piece_bytes] for place in range(0, len(body), piece_bytes)]
    unpacked = b"".join(decompressor.feed(piece) for piece in pieces)
    decompressor.finish()
    return unpacked


@pytest.mark.parametrize(("coding", "body"), CODINGS, ids=IDS)
@pytest.mark.parametrize("piece_bytes", [1, 17, 4_096, 10**6])
def test_body_comes_out_as_it_went_in_however_it_arrives(coding, body, piece_bytes):
    assert inflate(coding, body, piece_bytes=piece_bytes) == TEXT


@pytest.mark.parametrize("coding", ["", "identity", " Identity "])
def test_body_that_is_not_compressed_is_only_counted(coding):
    assert inflate(coding, TEXT) == TEXT
    assert not Decompressor(coding, max_bytes=10).expands
    with pytest.raises(ProtocolError, match="body: expected at most 10 bytes") as caught:
        inflate(coding, TEXT, max_bytes=10)
    assert caught.value.reason == "payload_too_large"


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, deflate", "gzip;q=1", "x"])
def test_unknown_content_encoding_is_refused_with_the_name_of_the_header(coding):
    with pytest.raises(ProtocolError, match="Content-Encoding: expected gzip, deflate or identity"):
        Decompressor(coding, max_bytes=10)


@pytest.mark.parametrize(("coding", "body"), CODINGS, ids=IDS)
def test_body_that_is_cut_off_anywhere_is_refused(coding, body):
    ends_of_members = {len(gzip.compress(TEXT[:30_000])), len(gzip.compress(TEXT[:30_000]) + gzip.compress(b""))}
    for end in [*range(0, len(body), 97), *range(len(body) - 30, len(body))]:
        if coding == "GZIP" and end in ends_of_members:
            continue  # whole by itself: nobody can tell that another member was to follow
        with pytest.raises(ProtocolError, match="body: was cut off before the end of the compressed data") as caught:
            inflate(coding, body[:end])
        assert caught.value.reason == "invalid_format"


@pytest.mark.parametrize(("coding", "body"), CODINGS, ids=IDS)
def test_body_above_the_limit_is_refused_and_one_at_the_limit_is_not(coding, body):
    assert inflate(coding, body, max_bytes=len(TEXT)) == TEXT
    with pytest.raises(ProtocolError, match=f"body: expected at most {len(TEXT) - 1} bytes") as caught:
        inflate(coding, body, max_bytes=len(TEXT) - 1)
    assert caught.value.reason == "payload_too_large"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bomb_is_never_unpacked_beyond_the_limit(coding):
    bomb = {"gzip": gzip.compress, "deflate": zlib.compress}[coding](b"x" * 50_000_000)
    with pytest.raises(ProtocolError, match="body: expected at most 1000 bytes"):
        inflate(coding, bomb, max_bytes=1_000, piece_bytes=10**6)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", b"no gzip at all"),
        ("gzip", gzip.compress(TEXT) + b"and more"),
        ("gzip", gzip.compress(TEXT)[:-8] + bytes(8)),
        ("gzip", zlib.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)[:-4] + b"\0\0\0\0"),
        ("deflate", zlib.compress(TEXT) + b"\0"),
        ("deflate", bare_deflate(TEXT) + zlib.compress(TEXT)),
        ("deflate", b"\xff" * 100),
    ],
)
def test_body_that_is_something_else_is_refused_by_the_name_of_its_coding(coding, body):
    with pytest.raises(ProtocolError, match=f"^body: expected .*: {coding}$") as caught:
        inflate(coding, body, max_bytes=10**7)
    assert caught.value.reason == "invalid_format"


def test_members_are_limited_so_that_empty_ones_do_not_keep_anybody_busy():
    assert inflate("gzip", gzip.compress(b"x") * MEMBERS_MAX) == b"x" * MEMBERS_MAX
    with pytest.raises(ProtocolError, match="expected nothing behind the end"):
        inflate("gzip", gzip.compress(b"x") * (MEMBERS_MAX + 1))


def test_whatever_byte_is_changed_nothing_else_comes_out_than_what_went_in():
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for coding, body in (("gzip", CODINGS[0][1]), ("deflate", CODINGS[3][1])):
        for _ in range(200):
            place = chance.randrange(len(body))
            changed = body[:place] + bytes([body[place] ^ (1 << chance.randrange(8))]) + body[place + 1 :]
            try:
                unpacked = inflate(coding, changed)
            except ProtocolError:
                continue
            assert unpacked == TEXT, f"seed={seed}"  # a flag, name or time in the head, which says nothing of the text
