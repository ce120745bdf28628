"""Google Cloud Storage and Azure under faults, and errors for missing libraries and invalid settings."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from lakefeed.contract.errors import StorageError
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import ATTEMPTS_MAX, open_store
from tests.fault_proxy import Answer, CutRequest, CutResponse, Fault, fault_proxy
from tests.lakefeed.storage.conftest import azure_place, gcs_place


@pytest.fixture(params=["gcs", "azure"])
def proxied(request):
    """A place behind a proxy, and the proxy."""
    if request.param == "gcs":
        server = request.getfixturevalue("gcs_server")
        place = gcs_place(server)
        yield dataclasses.replace(place, config=dataclasses.replace(place.config, request_timeout_s=1.0)), server.proxy
        server.proxy.lift()
        return
    azure_server = request.getfixturevalue("azure_server")
    place = azure_place(azure_server)
    base, account = azure_server.endpoint.rsplit("/", 1)
    with fault_proxy(base) as proxy:
        config = dataclasses.replace(place.config, azure_endpoint=f"{proxy.url}/{account}", request_timeout_s=1.0)
        yield dataclasses.replace(place, config=config), proxy


@pytest.mark.parametrize("fault", [Answer(500), Answer(503), Answer(429), CutRequest(), CutResponse()], ids=repr)
async def test_transient_faults_are_retried(proxied, fault: Fault):
    place, proxy = proxied
    writing = proxy.spoil(fault, method="PUT", times=2)
    async with open_store(place.config) as store:
        await store.write(f"{place.root}/x", b"abc" * 1000)
        assert await store.read(f"{place.root}/x") == b"abc" * 1000
    assert writing.met == 2


@pytest.mark.parametrize("status", [400, 403])
async def test_a_refusal_is_raised_without_retries_in_one_line(proxied, status):
    place, proxy = proxied
    refused = proxy.spoil(Answer(status))
    async with open_store(place.config) as store:
        with pytest.raises(StorageError, match=f"cannot write object: .*{status}.*: location={place.root}/x$"):
            await store.write(f"{place.root}/x", b"abc")
    assert refused.met == 1


async def test_an_outage_is_raised_after_a_few_attempts(proxied):
    place, proxy = proxied
    failed = proxy.spoil(Answer(503))
    async with open_store(place.config) as store:
        with pytest.raises(StorageError, match=r"cannot write object: .*503"):
            await store.write(f"{place.root}/x", b"abc")
    assert failed.met == ATTEMPTS_MAX


async def test_a_missing_library_is_an_error_that_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lakefeed.storage.cloud", None)
    with pytest.raises(StorageError, match=r"pip install 'lakefeed\[gcs\]'"):
        async with open_store(StorageConfig(warehouse="gs://bucket/w")):
            pass


async def test_invalid_settings_are_an_error_that_names_the_container():
    config = StorageConfig(warehouse="gs://bucket/w", gcs_service_account="/nowhere.json")
    async with open_store(config) as store:
        with pytest.raises(StorageError, match=r"cannot open container: .*: container=gs://bucket"):
            await store.write("gs://bucket/w/x", b"")
