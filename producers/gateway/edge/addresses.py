"""The address that a caller's connections are counted under. Pure."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from fairlane.settings import Network

_NETWORK_BITS: Final = 64
"""Low-order bits of an IPv6 address that one customer may choose freely (RFC 6177)."""
_MOST_PROXIES: Final = 16
"""Proxies that a call may have passed: a header has room for thousands of entries."""


def address_of(peer: Any, forwarded: Sequence[bytes] = (), trusted: Sequence[Network] = ()) -> str:
    """The address shared by all connections of one caller; with IPv6 its /64 network.

    Args:
        peer: remote address as reported by a transport.
        forwarded: values of the X-Forwarded-For headers, in order.
        trusted: networks of proxies. The last entry outside them is the address that the outermost proxy saw; entries
            to the left of it come from the caller and are not trusted. Without such an entry, or if it is no address,
            the peer is the caller.
    """
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    address = _parsed(host)
    if address is None:
        return host
    if forwarded and _is_in(address, trusted):
        address = _forwarded_for(forwarded, trusted) or address
    if isinstance(address, IPv6Address):
        address = IPv6Address(int(address) >> _NETWORK_BITS << _NETWORK_BITS)
    return str(address)


def _forwarded_for(forwarded: Sequence[bytes], trusted: Sequence[Network]) -> IPv4Address | IPv6Address | None:
    # With more entries, the first element is the unsplit rest, which is no address.
    for entry in reversed(b",".join(forwarded).rsplit(b",", _MOST_PROXIES)):
        address = _parsed(entry.decode("latin-1").strip(" \t"))
        if address is None or not _is_in(address, trusted):
            return address
    return None


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _is_in(address: IPv4Address | IPv6Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
