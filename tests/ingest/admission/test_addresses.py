"""Whose address counts, and what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lakefeed.ingest.admission.addresses import (
    client_address,
    is_private,
    masked,
    parse_address,
    subnet_of,
)
from lakefeed.ingest.config import IngestConfig, Network

PROXIES = IngestConfig(trusted_proxies="10.0.0.0/8, 2001:db8::1").proxy_networks()


def address_of(peer: str, trusted: Sequence[Network] = PROXIES, *, connecting: str = "", forwarded: str = "") -> str:
    headers = {"CF-Connecting-IP": connecting, "X-Forwarded-For": forwarded}
    return str(client_address(peer, trusted, headers.__getitem__))


def test_address_of_the_socket_counts_whatever_headers_say():
    assert address_of("203.0.113.7", connecting="198.51.100.1", forwarded="198.51.100.2") == "203.0.113.7"


def test_no_proxy_is_trusted_by_default():
    assert address_of("10.0.0.1", (), connecting="198.51.100.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"connecting": "198.51.100.1", "forwarded": "198.51.100.2"}, "198.51.100.1"),
        ({"forwarded": "198.51.100.2"}, "198.51.100.2"),
        ({"forwarded": "1.2.3.4, 198.51.100.2, 10.9.9.9"}, "198.51.100.2"),
        ({"forwarded": "10.1.1.1, 10.2.2.2"}, "10.1.1.1"),
        ({"forwarded": "who knows"}, "10.0.0.1"),
        ({"forwarded": "who knows, 10.3.3.3"}, "10.3.3.3"),
        ({"connecting": "nonsense"}, "10.0.0.1"),
        ({}, "10.0.0.1"),
    ],
)
def test_behind_a_trusted_proxy_the_last_address_that_is_no_proxy_counts(headers, expected):
    assert address_of("10.0.0.1", **headers) == expected


def test_ipv4_that_travels_as_ipv6_is_ipv4():
    assert str(parse_address("::ffff:203.0.113.7")) == "203.0.113.7"
    assert address_of("::ffff:10.0.0.1", connecting="8.8.8.8") == "8.8.8.8"


def test_text_that_is_no_address_is_none():
    assert parse_address("") is None
    assert parse_address("300.1.1.1") is None
    assert address_of("") == "None"


@pytest.mark.parametrize(
    ("address", "subnet"), [("8.8.4.200", "8.8.4.0"), ("2a00:1450:4001:81b:1:2:3:4", "2a00:1450:4001:81b::")]
)
def test_subnet_is_a_24_or_a_64(address, subnet):
    assert str(subnet_of(parse_address(address))) == subnet


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.9", "172.16.5.4", "169.254.1.1", "fd00::1"]
)
def test_loopback_and_private_ranges_are_private(address):
    assert is_private(parse_address(address))


def test_public_addresses_are_not_private():
    assert not is_private(parse_address("8.8.8.8"))
    assert not is_private(parse_address("2a00:1450:4001:81b::1"))


def test_last_part_is_masked():
    assert masked(parse_address("8.8.4.200")) == "8.8.4.xxx"
    assert masked(parse_address("2a00:1450:4001:81b::1")) == "2a00:1450:4001:081b:0000:0000:0000:xxxx"
    assert masked(None) == ""


def test_network_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="has host bits set"):
        IngestConfig(trusted_proxies="10.0.0.1/8")
