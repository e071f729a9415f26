"""The issuer's keys: which are used, when they are fetched, and what holds while they cannot be."""

import asyncio
import json
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.gateway.identity.jwks import (
    LONGEST_STALE_MS,
    REFRESH_MS,
    REST_MS,
    KeySet,
    KeySetSource,
)
from producers.gateway.identity.signing_keys import MOST_KEYS, KeySetError, parse_key_set
from tests.kit.identity_kit import Clock, FakeIssuer, ec_key, http_server, key_set, public_jwk, rsa_key, with_body
from tests.kit.waiting import eventually_async

RSA, EC = public_jwk(rsa_key(), kid="rsa-1"), public_jwk(ec_key(), kid="ec-1")

# --- which keys


def test_the_keys_of_an_issuer() -> None:
    found = parse_key_set(key_set(RSA, EC))
    assert {name: key.algorithm_name for name, key in found.items()} == {"rsa-1": "RS256", "ec-1": "ES256"}


@pytest.mark.parametrize(
    "jwk",
    [
        {},
        {**RSA, "kid": None},
        {**RSA, "kid": 7},
        {**RSA, "kid": ""},
        {**RSA, "kid": "k" * 257},
        {**RSA, "use": "enc"},
        {**RSA, "key_ops": ["encrypt"]},
        {**RSA, "key_ops": "verify"},
        {**RSA, "alg": "RS512"},
        {**RSA, "alg": "HS256"},
        {**RSA, "alg": "none"},
        {**RSA, "alg": ["RS256"]},
        {**RSA, "kty": "EC"},
        {**RSA, "kty": ["RSA"]},
        {**RSA, "crv": {"P-256": 1}},
        {**RSA, "n": "AQ"},
        {**RSA, "n": None},
        {**RSA, "e": 65_537},
        {**RSA, "d": "AQ"},
        {**EC, "crv": "P-384"},
        {**EC, "crv": None},
        {**EC, "x": "AAAA"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "oct-1"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AAAA", "kid": "okp-1"},
        public_jwk(rsa_key("small", 1_024), kid="small"),
        "rsa-1",
        None,
    ],
)
def test_a_key_that_cannot_be_used_is_passed_over(jwk: Any) -> None:
    assert parse_key_set(key_set(jwk, EC)).keys() == {"ec-1"}


def test_of_two_keys_with_one_id_the_first_counts() -> None:
    (found,) = parse_key_set(key_set(RSA, public_jwk(rsa_key("other"), kid="rsa-1"))).values()
    assert found.key.public_numbers() == rsa_key().public_key().public_numbers()


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"{}", b"\xff\xfe", b'{"keys": {}}', b"[" * 100_000, key_set(*[RSA] * (MOST_KEYS + 1)), b"<html>"],
)
def test_what_is_no_key_set(document: bytes) -> None:
    with pytest.raises(KeySetError):
        parse_key_set(document)


@given(st.binary(max_size=200) | st.dictionaries(st.text(max_size=5), st.text(max_size=5)).map(key_set))
def test_any_document_is_a_key_set_or_none(document: bytes) -> None:
    with suppress(KeySetError):
        assert parse_key_set(document) == {}


# --- when


class Bench:
    def __init__(self) -> None:
        self.clock = Clock(0)
        self.issuer = FakeIssuer()
        self.keys = KeySet(self.issuer, self.clock)

    async def known(self, key_id: str) -> bool | None:
        """None: it cannot be said."""
        try:
            return await self.keys.key(key_id) is not None
        except KeySetError:
            return None


def test_keys_are_fetched_once_and_again_when_they_are_old_which_nobody_waits_for() -> None:
    async def run() -> None:
        bench = Bench()
        assert await asyncio.gather(*(bench.known("rsa-1") for _ in range(20))) == [True] * 20
        assert bench.issuer.fetches == 1
        bench.clock.now_ms += REFRESH_MS - 1
        assert await bench.known("ec-1")
        assert bench.issuer.fetches == 1
        bench.issuer.document = key_set(EC)
        bench.clock.now_ms += 1
        assert await bench.known("rsa-1"), "as it was known"
        await eventually_async(lambda: bench.issuer.fetches == 2)
        await bench.keys.close()
        bench.clock.now_ms += 1
        assert await bench.known("rsa-1") is False, "withdrawn"
        assert await bench.known("ec-1")

    asyncio.run(run())


def test_a_new_key_is_found_and_unknown_ones_cost_one_fetch_in_a_while() -> None:
    async def run() -> None:
        bench = Bench()
        assert await bench.known("rsa-1")
        bench.clock.now_ms += REST_MS
        bench.issuer.document = key_set(RSA, public_jwk(rsa_key("new"), kid="rsa-2"))
        assert await bench.known("rsa-2"), "a new one is there at once"
        assert bench.issuer.fetches == 2
        for number in range(1_000):
            bench.clock.now_ms += 10
            assert await bench.known(f"guess-{number}") is False
        assert bench.issuer.fetches == 2 + 1_000 * 10 // REST_MS

    asyncio.run(run())


def test_while_the_issuer_is_away_its_keys_count_for_a_while() -> None:
    async def run() -> None:
        bench = Bench()
        assert await bench.known("rsa-1")
        bench.issuer.is_away = True
        for _ in range(1_000):
            bench.clock.now_ms += (LONGEST_STALE_MS - 1_000) // 1_000
            assert await bench.known("rsa-1")
        assert await bench.known("guess") is None, "it may be a new one"
        assert bench.issuer.fetches < 300, "with pauses"
        bench.clock.now_ms += 2_000
        assert await bench.known("rsa-1") is None, "nobody knows whether it was withdrawn"
        bench.issuer.is_away = False
        bench.clock.now_ms += 30_000
        assert await bench.known("rsa-1")
        assert await bench.known("guess") is False
        await bench.keys.close()

    asyncio.run(run())


def test_an_issuer_that_publishes_nonsense_is_away() -> None:
    async def run() -> None:
        bench = Bench()
        assert await bench.known("rsa-1")
        bench.issuer.document = b"<html>moved</html>"
        bench.clock.now_ms += REFRESH_MS
        assert await bench.known("rsa-1")
        await eventually_async(lambda: bench.issuer.fetches == 2)
        assert await bench.known("rsa-1")
        await bench.keys.close()

    asyncio.run(run())


# --- where


@pytest.mark.parametrize(
    "url",
    [
        "http://login.example/jwks.json",
        "http://127.0.0.1.login.example/jwks.json",
        "http://localhost.login.example/jwks.json",
        "ftp://127.0.0.1/jwks.json",
        "file:///etc/passwd",
        "https://user:hush@login.example/jwks.json",
        "https:///jwks.json",
        "login.example/jwks.json",
        "https://login.example:port/",
        "",
    ],
)
def test_an_address_that_anybody_on_the_way_could_answer_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="JWT_JWKS_URL") as caught:
        KeySetSource(url)
    assert "hush" not in str(caught.value)


def test_addresses_that_are_taken() -> None:
    for url in ("https://login.example/jwks.json", "http://127.0.0.1:8080/", "http://[::1]/jwks", "http://localhost/"):
        KeySetSource(url)


def fetched(url: str, timeout_s: float = 60.0, most_bytes: int = 100_000) -> bytes:
    return asyncio.run(KeySetSource(url, timeout_s, most_bytes).fetch())


def test_the_document_is_fetched() -> None:
    with http_server(lambda handler: with_body(handler, key_set(RSA))) as url:
        assert json.loads(fetched(url))["keys"][0]["kid"] == "rsa-1"


@pytest.mark.parametrize("kind", ["fake", "http"])
def test_a_source_gives_the_document_or_says_that_it_is_away(kind: str) -> None:
    """What the tests above take for a source behaves as the real one does."""
    document = key_set(RSA)
    issuer = FakeIssuer(document)
    with http_server(lambda handler: with_body(handler, document, 500 if issuer.is_away else 200)) as url:
        source: KeySetSource = issuer if kind == "fake" else KeySetSource(url, timeout_s=60.0)
        assert asyncio.run(source.fetch()) == document
        issuer.is_away = True
        with pytest.raises(KeySetError):
            asyncio.run(source.fetch())


@pytest.mark.parametrize("status", [302, 404, 500])
def test_any_other_answer_is_none_and_nobody_is_sent_elsewhere(status: int) -> None:
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        with_body(handler, key_set(RSA), status)

    with http_server(answer) as url, pytest.raises(KeySetError, match=str(status)):
        fetched(url)
    assert asked == ["/jwks.json"]


def test_an_endless_document_is_not_read_to_its_end() -> None:
    sent: list[int] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while len(sent) < 10_000:
                sent.append(handler.wfile.write(b"x" * 100_000))
        except OSError:
            pass

    with http_server(answer) as url, pytest.raises(KeySetError, match="bytes"):
        fetched(url)
    assert len(sent) < 10_000


def test_a_document_that_trickles_is_not_waited_for() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        give_up_at = time.monotonic() + 30
        try:
            while time.monotonic() < give_up_at:
                handler.wfile.write(b" ")
                time.sleep(0.01)
        except OSError:
            pass

    with http_server(answer) as url, pytest.raises(KeySetError, match="TimeoutError"):
        fetched(url, timeout_s=0.3)


def test_nobody_listens() -> None:
    with http_server(with_body) as url:
        pass
    with pytest.raises(KeySetError):
        fetched(url)
