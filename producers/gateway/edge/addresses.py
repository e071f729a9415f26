"""Which address a caller is counted by. Pure."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from fairlane.settings import Network

_NETWORK_BITS: Final = 64
"""One customer of a provider has so many bits of addresses to choose from (RFC 6177)."""
_MOST_PROXIES: Final = 16
"""That a call may have come through: a head has room for thousands of entries."""


def address_of(peer: Any, forwarded: Sequence[bytes] = (), trusted: Sequence[Network] = ()) -> str:
    """The address that all connections of one caller share, or its /64 network of IPv6.

    Args:
        peer: the other end of the connection, as a transport has it.
        forwarded: the values of its X-Forwarded-For headers, in their order.
        trusted: networks of proxies. The last entry that is not theirs is what the outermost of them saw; whatever
            stands to the left of it was sent by the caller, who may write anything. Where there is no such entry, or
            none that can be read, the peer is the caller.
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
    # With more entries the first of these is a list of its own, and no address.
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
