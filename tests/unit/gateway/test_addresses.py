"""Which address a caller is counted by, with balancers in front and without."""

from collections.abc import Sequence
from ipaddress import ip_network

import pytest
from pydantic import ValidationError

from fairlane.settings import Settings
from producers.gateway.edge.connections import address_of

TRUSTED = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
BALANCER = ("10.0.0.1", 4711)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::"),
        (("testclient", 1), "testclient"),
        (None, ""),
        ("", ""),
    ],
)
def test_an_address_is_what_one_caller_has(peer: object, address: str) -> None:
    assert address_of(peer) == address
    assert address_of(peer, [b"198.51.100.1"], TRUSTED) == address


def test_nobody_is_believed_by_default() -> None:
    assert address_of(BALANCER, [b"198.51.100.1"]) == "10.0.0.1"


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ([b"198.51.100.1"], "198.51.100.1"),
        ([b"2001:db8:1:2:3:4:5:6"], "2001:db8:1:2::"),
        ([b"::ffff:198.51.100.1"], "198.51.100.1"),
        # What the caller wrote itself stands to the left, whatever it is.
        ([b"203.0.113.9, 198.51.100.1"], "198.51.100.1"),
        ([b"10.0.0.9 ,198.51.100.1\t"], "198.51.100.1"),
        ([b"garbage", b"198.51.100.1"], "198.51.100.1"),
        ([b"203.0.113.9", b"198.51.100.1, 10.2.3.4"], "198.51.100.1"),
        # Through several balancers.
        ([b"198.51.100.1, 10.2.3.4, fd00::1, ::ffff:10.1.1.1"], "198.51.100.1"),
        ([b"198.51.100.1", b"10.2.3.4"], "198.51.100.1"),
        # Nobody said anything that counts.
        ([], "10.0.0.1"),
        ([b""], "10.0.0.1"),
        ([b"10.2.3.4, 10.2.3.5"], "10.0.0.1"),
        ([b"198.51.100.1, garbage"], "10.0.0.1"),
        ([b"198.51.100.1, "], "10.0.0.1"),
        ([b"198.51.100.1, garbage, 10.2.3.4"], "10.0.0.1"),
        ([b"198.51.100.1:4711"], "10.0.0.1"),
        ([b"[2001:db8::1]"], "10.0.0.1"),
        ([b"unknown"], "10.0.0.1"),
        ([b"\xb2.0.0.1"], "10.0.0.1"),
        ([b"198.51.100.1" + 5_000 * b",10.2.3.4"], "10.0.0.1"),
    ],
)
def test_a_trusted_balancer_says_who_calls(forwarded: Sequence[bytes], address: str) -> None:
    assert address_of(BALANCER, forwarded, TRUSTED) == address


@pytest.mark.parametrize("peer", [("::ffff:10.0.0.1", 1, 0, 0), ("fd00::5", 1, 0, 0)])
def test_a_balancer_is_known_by_either_kind_of_address(peer: object) -> None:
    assert address_of(peer, [b"198.51.100.1"], TRUSTED) == "198.51.100.1"


def test_networks_are_read_from_the_settings() -> None:
    assert Settings().trusted_proxies == ()
    assert Settings(gateway_trusted_proxies="10.0.0.0/8, fd00::/8,").trusted_proxies == TRUSTED
    assert Settings(gateway_trusted_proxies="192.0.2.7").trusted_proxies == (ip_network("192.0.2.7/32"),)
    for wrong in ("balancer", "10.0.0.1/8", "10.0.0.0/8 fd00::/8"):
        with pytest.raises(ValidationError):
            Settings(gateway_trusted_proxies=wrong)
