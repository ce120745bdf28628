"""S3 under faults: what is retried, what is not, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError

from lakefeed.contract.errors import StorageError
from lakefeed.settings import MIB
from lakefeed.storage import s3
from lakefeed.storage.store import ATTEMPTS_MAX, open_store
from tests.fault_proxy import Answer, CutRequest, CutResponse, Fault, FaultProxy, Silence, Slow, fault_proxy
from tests.lakefeed.storage.conftest import s3_config
from tests.s3_server import S3Server

BIG = os.urandom(11 * MIB)  # three parts of 5 MiB


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    return s3_server.create_bucket()


@pytest.fixture
async def store(s3_server, bucket, proxy):
    config = s3_config(s3_server, bucket, s3_endpoint=proxy.url, request_timeout_s=1.0)
    async with open_store(config) as opened:
        yield opened


PASSING = [
    Answer(500),
    Answer(503, body=b"<Error><Code>SlowDown</Code></Error>"),
    Answer(429),
    Answer(400, body=b"<Error><Code>RequestTimeout</Code></Error>"),
    Answer(500, forwarded=True),
    CutRequest(),
    CutResponse(),
    Silence(),
    Silence(forwarded=True),
]


@pytest.mark.parametrize("fault", PASSING, ids=repr)
async def test_transient_faults_are_retried(store, bucket, proxy, fault: Fault):
    writing = proxy.spoil(fault, method="PUT", times=2)
    reading = proxy.spoil(fault, method="GET", times=2)
    await store.write(f"s3://{bucket}/x", b"abc" * 1000)
    assert await store.read(f"s3://{bucket}/x") == b"abc" * 1000
    assert (writing.met, reading.met) == (2, 2)


async def test_only_the_parts_that_failed_are_sent_again(s3_server, bucket, proxy):
    spoiled = proxy.spoil(CutRequest(), path="partNumber=2", times=2)
    other = proxy.spoil(Slow(), path="partNumber=1")
    async with open_store(s3_config(s3_server, bucket, s3_endpoint=proxy.url)) as store:
        await store.write(f"s3://{bucket}/x", BIG)
        assert await store.read(f"s3://{bucket}/x") == BIG
    assert (spoiled.met, other.met) == (2, 1)


async def test_a_slow_store_is_waited_for(store, bucket, proxy):
    proxy.spoil(Slow(delay_s=0.2, bytes_per_s=50_000))
    await store.write(f"s3://{bucket}/x", b"abc" * 1000)
    assert await store.read(f"s3://{bucket}/x") == b"abc" * 1000


@pytest.mark.parametrize("status", [400, 403, 404])
async def test_a_refusal_is_raised_without_retries(store, bucket, proxy, status):
    refused = proxy.spoil(Answer(status))
    with pytest.raises(StorageError, match=f"cannot write object: .*{status}.*: location=s3://{bucket}/x"):
        await store.write(f"s3://{bucket}/x", b"abc")
    assert refused.met == 1


async def test_an_outage_is_raised_after_a_few_attempts(store, bucket, proxy):
    failed = proxy.spoil(Answer(503))
    with pytest.raises(StorageError, match=f"cannot write object: .*503.*: location=s3://{bucket}/x"):
        await store.write(f"s3://{bucket}/x", b"abc")
    assert failed.met == ATTEMPTS_MAX


async def test_a_store_that_is_gone_is_found_again(store, bucket, proxy):
    await store.write(f"s3://{bucket}/x", b"abc")
    proxy.stop()
    with pytest.raises(StorageError, match="cannot read object"):
        await store.read(f"s3://{bucket}/x")
    proxy.resume()
    assert await store.read(f"s3://{bucket}/x") == b"abc"


@pytest.mark.parametrize("fault", [Answer(403), Answer(503)], ids=repr)
@pytest.mark.parametrize("request_", ["partNumber=2", r"POST .*uploadId"], ids=["part", "complete"])
async def test_an_upload_in_parts_that_fails_leaves_no_parts(s3_server, store, bucket, proxy, fault, request_):
    method, _, path = request_.rpartition(" ")
    failed = proxy.spoil(fault, method=method or "PUT", path=path)
    with pytest.raises(StorageError, match=f"location=s3://{bucket}/x"):
        await store.write(f"s3://{bucket}/x", BIG)
    assert failed.met >= 1
    with contextlib.closing(s3_server.client()) as client:
        assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    assert s3_server.keys(bucket) == []


async def test_an_upload_whose_completion_was_not_answered_is_whole(s3_server, store, bucket, proxy):
    proxy.spoil(Silence(forwarded=True), method="POST", path="uploadId", times=1)
    with contextlib.suppress(StorageError):  # the store may say that there is no such upload any more
        await store.write(f"s3://{bucket}/x", BIG)
    assert await store.read(f"s3://{bucket}/x") == BIG


async def test_bodies_on_the_way_are_bounded_over_all_uploads(store, bucket, monkeypatch):
    now, most = 0, 0
    ask = s3.S3Store._request

    async def count(self, request):
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            return await ask(self, request)
        finally:
            now -= 1

    monkeypatch.setattr(s3.S3Store, "_request", count)
    await asyncio.gather(*(store.write(f"s3://{bucket}/{n}", b"x") for n in range(3 * s3.PARALLEL_BODIES)))
    assert most == s3.PARALLEL_BODIES


@pytest.mark.parametrize("checksum", ["crc32", "md5", "none"])
@pytest.mark.parametrize("data", [b"abc", BIG], ids=["small", "in parts"])
async def test_every_kind_of_checksum_is_taken(s3_server, bucket, checksum, data):
    async with open_store(s3_config(s3_server, bucket, s3_checksum=checksum)) as store:
        await store.write(f"s3://{bucket}/x", data)
        assert await store.read(f"s3://{bucket}/x") == data


@pytest.mark.parametrize(
    ("checksum", "wrong"), [("crc32", {"ChecksumCRC32": "AAAAAA=="}), ("md5", {"ContentMD5": "A" * 22 + "=="})]
)
async def test_a_body_that_does_not_fit_its_checksum_is_refused_by_the_store(
    s3_server, bucket, monkeypatch, checksum, wrong
):
    monkeypatch.setitem(s3._DIGESTS, checksum, lambda _: wrong)
    async with open_store(s3_config(s3_server, bucket, s3_checksum=checksum)) as store:
        with pytest.raises(StorageError, match=r"BadDigest|InvalidDigest"):
            await store.write(f"s3://{bucket}/x", b"abc")
    assert s3_server.keys(bucket) == []


async def test_wrong_keys_are_a_storage_error(s3_server, bucket):
    config = s3_config(s3_server, bucket, s3_access_key_id="nobody", s3_secret_access_key="nothing")
    async with open_store(config) as store:
        with pytest.raises(StorageError, match=r"cannot write object: .*InvalidAccessKeyId"):
            await store.write(f"s3://{bucket}/x", b"abc")


async def test_keys_come_from_a_profile_when_none_are_given(s3_server, bucket, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    credentials.write_text(
        f"[lake]\naws_access_key_id={s3_server.access_key_id}\naws_secret_access_key={s3_server.secret_access_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    config = s3_config(s3_server, bucket, s3_access_key_id="", s3_secret_access_key="", s3_profile="lake")
    async with open_store(config) as store:
        await store.write(f"s3://{bucket}/x", b"abc")
    assert s3_server.keys(bucket) == ["x"]


async def test_a_profile_that_does_not_exist_is_an_error_at_the_start(s3_server, bucket):
    with pytest.raises(StorageError, match=r"cannot open S3: .*nobody"):
        async with open_store(s3_config(s3_server, bucket, s3_profile="nobody")):
            pass


async def test_a_session_token_is_sent_with_its_keys(s3_server, bucket, proxy):
    passed = proxy.spoil(Slow())
    config = s3_config(s3_server, bucket, s3_endpoint=proxy.url, s3_session_token="temporary")
    async with open_store(config) as store:
        with contextlib.suppress(StorageError):  # the server knows no temporary keys
            await store.write(f"s3://{bucket}/x", b"abc")
    assert passed.last_headers["x-amz-security-token"] == "temporary"


@pytest.mark.parametrize("status", [400, 403, 404, 409])
def test_refusals_are_not_transient(status):
    assert not s3.is_transient(ClientError({"ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"))
