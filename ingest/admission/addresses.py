"""Client addresses: parse them, find them behind trusted proxies, mask them for display."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lakefeed.ingest.config import Network

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# What one customer of a provider usually has: a limit per address alone is easy to evade.
_SUBNET_BITS = {4: 24, 6: 64}
_ADDRESS_BITS = {4: 32, 6: 128}


def parse_address(text: str) -> Address | None:
    """Return the address, or None if the text is not one. An IPv4-mapped IPv6 address becomes IPv4."""
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def client_address(peer: str, trusted: Sequence[Network], header: Callable[[str], str]) -> Address | None:
    """Return the client's address. `header` returns a header of its request, empty if it has none.

    The headers of a proxy (`CF-Connecting-IP`, or the chain in `X-Forwarded-For`) count only if the peer is trusted,
    because any client can send them. In a chain, the last address that is not a trusted proxy is the client.
    """
    address = parse_address(peer)
    if address is None or not _is_trusted(address, trusted):
        return address
    if (claimed := parse_address(header("CF-Connecting-IP"))) is not None:
        return claimed
    for text in reversed(header("X-Forwarded-For").split(",")):
        claimed = parse_address(text)
        if claimed is None:
            return address
        address = claimed
        if not _is_trusted(claimed, trusted):
            return claimed
    return address


def _is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    return any(address in network for network in trusted)


def is_private(address: Address) -> bool:
    """Return whether the address is of this machine or a private network, where many clients may share one."""
    return address.is_private or address.is_loopback or address.is_link_local


def subnet_of(address: Address) -> Address:
    """Return the first address of the subnet: /24 of IPv4, /64 of IPv6."""
    host_bits = _ADDRESS_BITS[address.version] - _SUBNET_BITS[address.version]
    return type(address)(int(address) >> host_bits << host_bits)


def masked(address: Address | None) -> str:
    """Return the address without its last part."""
    if address is None:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return f"{str(address).rpartition('.')[0]}.xxx"
    return f"{address.exploded.rpartition(':')[0]}:xxxx"
