"""Internet addresses of clients. Owns reading them, also from behind proxies, and showing them without telling all."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# What one customer of a provider usually has at hand: limits per address alone are easy to get around.
_SUBNET_BITS = {4: 24, 6: 64}
_ADDRESS_BITS = {4: 32, 6: 128}


def parse_address(text: str) -> Address | None:
    """Read an address, None if it is none. IPv4 that travels as IPv6 is IPv4."""
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def parse_networks(text: str) -> tuple[Network, ...]:
    """Read addresses and networks that are separated by commas.

    Raises: ValueError.
    """
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def client_address(
    peer: str, trusted: Sequence[Network], *, connecting: str | None = None, forwarded: str | None = None
) -> Address | None:
    """Find the client's address.

    What proxies say of it (`connecting`, or the chain `forwarded`) counts only behind a trusted one: anybody can write
    a header. Of a chain, the last address that is not a trusted proxy's is the one that we know of.
    """
    address = parse_address(peer)
    if address is None or not _is_trusted(address, trusted):
        return address
    if connecting is not None and (told := parse_address(connecting)) is not None:
        return told
    for text in reversed((forwarded or "").split(",")):
        told = parse_address(text)
        if told is None:
            return address
        address = told
        if not _is_trusted(told, trusted):
            return told
    return address


def _is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    return any(address in network for network in trusted)


def is_private(address: Address) -> bool:
    """Tell addresses of this machine and of private networks, behind which many clients may share one."""
    return address.is_private or address.is_loopback or address.is_link_local


def subnet_of(address: Address) -> Address:
    """Give the first address of its subnet: /24, of IPv6 /64."""
    host_bits = _ADDRESS_BITS[address.version] - _SUBNET_BITS[address.version]
    return type(address)(int(address) >> host_bits << host_bits)


def masked(address: Address | None) -> str:
    """Show an address without its last part."""
    if address is None:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return f"{str(address).rpartition('.')[0]}.xxx"
    return f"{address.exploded.rpartition(':')[0]}:xxxx"
