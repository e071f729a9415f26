"""Tokens: what is taken, and the known ways to get in without one (RFC 8725)."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from hypothesis import given
from hypothesis import strategies as st

from fairlane.clock import now_ms
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from fairlane_server.circuit_breaker import CircuitBreaker
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError, answer
from producers.gateway.identity.jwks import KeySet
from producers.gateway.identity.lookups import FRESH_MS
from producers.gateway.identity.tokens import MOST_CHARACTERS, SignedTokens, TokenVerifier
from producers.gateway.identity.users import Users
from tests.kit.identity_kit import (
    AUDIENCE,
    ISSUER,
    Clock,
    FakeIssuer,
    MemoryIdentityStore,
    claims,
    ec_key,
    key_set,
    public_jwk,
    rsa_key,
    token,
)

LEEWAY_S = 30


def in_s(seconds: float) -> int:
    return int(now_ms() / 1_000 + seconds)


class Bench:
    """A verifier of tokens, the issuer, and what is said of users."""

    def __init__(self, issuer: FakeIssuer | None = None) -> None:
        self.issuer = issuer or FakeIssuer()
        self.store = MemoryIdentityStore()
        self.clock = Clock()
        keys = KeySet(self.issuer, self.clock)
        users = Users(self.store, 300_000, self.clock, CircuitBreaker())
        self.verifier = TokenVerifier(SignedTokens(ISSUER, AUDIENCE, LEEWAY_S, keys), users)

    async def outcome(self, shown: str) -> Identity | AuthRefusal:
        try:
            return await self.verifier.verify(shown)
        except RefusedError as error:
            return error.why


def outcome_of(shown: str, issuer: FakeIssuer | None = None) -> Identity | AuthRefusal:
    """What becomes of one token."""

    async def run() -> Identity | AuthRefusal:
        return await Bench(issuer).outcome(shown)

    return asyncio.run(run())


def rs256(signed: bytes) -> bytes:
    """The issuer's own signature."""
    return rsa_key().sign(signed, padding.PKCS1v15(), hashes.SHA256())


def unsigned(_: bytes) -> bytes:
    return b""


def by_hand(header: dict[str, Any], payload: dict[str, Any], sign: Callable[[bytes], bytes] = rs256) -> str:
    """A token that no library would make, with the issuer's signature unless there is another."""
    signed = ".".join(_encoded(json.dumps(part).encode()) for part in (header, payload))
    return f"{signed}.{_encoded(sign(signed.encode()))}"


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


USER = Identity("acme", "u-17", Role.TENANT, user="u-17")


def test_a_token_of_the_issuer_is_taken() -> None:
    assert outcome_of(token()) == USER
    assert outcome_of(token(private=ec_key(), algorithm="ES256", kid="ec-1")) == USER
    assert outcome_of(token(claims(aud=["other", AUDIENCE], nbf=in_s(-5), iat=in_s(-5)))) == USER
    assert outcome_of(token(typ="at+jwt")) == USER


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ({"role": "viewer"}, Role.VIEWER),
        ({"role": None, "roles": ["viewer", "operator", "gardener"]}, Role.OPERATOR),
        ({"role": "tenant", "roles": ["admin"]}, Role.ADMIN),
        ({"role": None}, AuthRefusal.NO_ROLE),
        ({"role": "root"}, AuthRefusal.NO_ROLE),
        ({"role": ["admin"]}, AuthRefusal.NO_ROLE),
        ({"role": None, "roles": "admin"}, AuthRefusal.NO_ROLE),
        ({"role": None, "roles": [["admin"], {"admin": 1}, None]}, AuthRefusal.NO_ROLE),
    ],
)
def test_the_strongest_known_role_counts(said: dict[str, Any], role: Role | AuthRefusal) -> None:
    found = outcome_of(token(claims(**said)))
    assert (found.role if isinstance(found, Identity) else found) == role


@pytest.mark.parametrize(
    "tenant", [None, "", "Acme", "acme.replies", "acme globex", "*", "../acme", 7, ["acme"], "a" * 40]
)
def test_a_token_that_names_no_tenant_is_nobodys(tenant: object) -> None:
    assert outcome_of(token(claims(tenant=tenant))) is AuthRefusal.NO_TENANT


# --- attacks


def public_pem() -> bytes:
    public = rsa_key().public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def test_no_algorithm_is_no_signature() -> None:
    for name in ("none", "None", "NONE", "nOnE", ""):
        assert outcome_of(by_hand({"alg": name, "kid": "rsa-1"}, claims(), unsigned)) is AuthRefusal.WRONG_TOKEN, name
    assert outcome_of(by_hand({"kid": "rsa-1"}, claims())) is AuthRefusal.WRONG_TOKEN
    head, body, _ = token().split(".")
    for stripped in (f"{head}.{body}.", f"{head}.{body}.AAAA", f"{head}.{body}", f"{head}.{body}.."):
        assert outcome_of(stripped) in {AuthRefusal.WRONG_TOKEN, AuthRefusal.MALFORMED}, stripped


def test_the_public_key_is_no_shared_secret() -> None:
    for secret in (public_pem(), public_pem().strip(), json.dumps(public_jwk(rsa_key(), kid="rsa-1")).encode(), b""):
        for name, digest in (("HS256", hashlib.sha256), ("HS384", hashlib.sha384), ("HS512", hashlib.sha512)):

            def sign(signed: bytes, secret: bytes = secret, digest: Any = digest) -> bytes:
                return hmac.new(secret, signed, digest).digest()

            shown = by_hand({"alg": name, "typ": "JWT", "kid": "rsa-1"}, claims(role="admin"), sign)
            assert outcome_of(shown) is AuthRefusal.WRONG_TOKEN


def test_a_shared_secret_among_the_issuers_keys_is_not_used() -> None:
    secret = _encoded(b"s" * 32)
    issuer = FakeIssuer(key_set({"kty": "oct", "k": secret, "kid": "rsa-1"}, public_jwk(ec_key(), kid="ec-1")))

    def sign(signed: bytes) -> bytes:
        return hmac.new(b"s" * 32, signed, hashlib.sha256).digest()

    assert outcome_of(by_hand({"alg": "HS256", "kid": "rsa-1"}, claims(), sign), issuer) is AuthRefusal.WRONG_TOKEN
    assert outcome_of(token(), issuer) is AuthRefusal.UNKNOWN_SIGNER


def test_a_key_is_for_its_own_algorithm() -> None:
    for name in ("RS384", "RS512", "PS256"):
        assert outcome_of(token(algorithm=name)) is AuthRefusal.WRONG_TOKEN
    assert outcome_of(token(kid="ec-1")) is AuthRefusal.WRONG_TOKEN
    assert outcome_of(token(private=ec_key(), algorithm="ES256", kid="rsa-1")) is AuthRefusal.WRONG_TOKEN


def test_somebody_elses_signature_is_none() -> None:
    assert outcome_of(token(private=rsa_key("other"))) is AuthRefusal.WRONG_TOKEN
    assert outcome_of(token(private=ec_key("other"), algorithm="ES256", kid="ec-1")) is AuthRefusal.WRONG_TOKEN
    head, _, signature = token().split(".")
    admin = _encoded(json.dumps(claims(role="admin", tenant="globex")).encode())
    assert outcome_of(f"{head}.{admin}.{signature}") is AuthRefusal.WRONG_TOKEN
    # An ES256 signature of zeros was once good for everything.
    zeros = by_hand({"alg": "ES256", "kid": "ec-1"}, claims(), lambda _: bytes(64))
    assert outcome_of(zeros) is AuthRefusal.WRONG_TOKEN


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"exp": None}, AuthRefusal.WRONG_TOKEN),
        ({"exp": in_s(-LEEWAY_S - 5)}, AuthRefusal.TOKEN_EXPIRED),
        ({"exp": "soon"}, AuthRefusal.WRONG_TOKEN),
        ({"exp": 1e400}, AuthRefusal.WRONG_TOKEN),
        ({"exp": [in_s(600)]}, AuthRefusal.WRONG_TOKEN),
        ({"nbf": in_s(86_400)}, AuthRefusal.WRONG_TOKEN),
        ({"iat": in_s(86_400)}, AuthRefusal.WRONG_TOKEN),
        ({"aud": None}, AuthRefusal.WRONG_TOKEN),
        ({"aud": "other"}, AuthRefusal.WRONG_TOKEN),
        ({"aud": []}, AuthRefusal.WRONG_TOKEN),
        ({"aud": {AUDIENCE: 1}}, AuthRefusal.WRONG_TOKEN),
        ({"aud": AUDIENCE + "/"}, AuthRefusal.WRONG_TOKEN),
        ({"iss": None}, AuthRefusal.WRONG_TOKEN),
        ({"iss": ISSUER + "/"}, AuthRefusal.WRONG_TOKEN),
        ({"iss": [ISSUER]}, AuthRefusal.WRONG_TOKEN),
        ({"iss": ""}, AuthRefusal.WRONG_TOKEN),
        ({"sub": None}, AuthRefusal.WRONG_TOKEN),
        ({"sub": ""}, AuthRefusal.WRONG_TOKEN),
        ({"sub": 17}, AuthRefusal.WRONG_TOKEN),
        ({"sub": "u" * 256}, AuthRefusal.WRONG_TOKEN),
        ({"sub": "u\x1b[2J"}, AuthRefusal.WRONG_TOKEN),
    ],
)
def test_what_a_token_must_say(said: dict[str, Any], why: AuthRefusal) -> None:
    # By hand: the library refuses to sign some of these.
    assert outcome_of(by_hand({"alg": "RS256", "kid": "rsa-1"}, claims(**said))) is why


def test_the_issuers_clock_may_be_off_a_little() -> None:
    assert outcome_of(token(claims(exp=in_s(-LEEWAY_S / 2)))) == USER
    assert outcome_of(token(claims(nbf=in_s(LEEWAY_S / 2), iat=in_s(LEEWAY_S / 2)))) == USER


@pytest.mark.parametrize(
    "kid",
    [
        "../../../../dev/null",
        "/etc/passwd",
        "https://attacker.example/jwks.json",
        "rsa-1' OR '1'='1",
        "rsa-1'; DROP TABLE api_keys; --",
        "rsa-1\x00",
        "RSA-1",
        " rsa-1",
        "",
        "k" * 257,
    ],
)
def test_the_id_of_a_key_is_compared_and_nothing_else(kid: str) -> None:
    """It is no path, no address and no statement: the issuer alone is asked, where it always is."""

    async def run() -> None:
        bench = Bench()
        assert await bench.outcome(token(kid=kid)) in {AuthRefusal.UNKNOWN_SIGNER, AuthRefusal.WRONG_TOKEN}
        assert bench.issuer.fetches <= 1
        assert bench.store.asked == 0

    asyncio.run(run())


@pytest.mark.parametrize("kid", [None, 7, ["rsa-1"], {"rsa-1": 1}, True])
def test_a_token_must_name_its_key(kid: object) -> None:
    header = {"alg": "RS256"} if kid is None else {"alg": "RS256", "kid": kid}
    assert outcome_of(by_hand(header, claims())) in {AuthRefusal.WRONG_TOKEN, AuthRefusal.MALFORMED}


def test_a_token_does_not_bring_its_own_key() -> None:
    own = rsa_key("attacker")
    jwk = public_jwk(own, kid="rsa-1")
    brought: list[dict[str, Any]] = [
        {"jku": "https://attacker.example/jwks.json"},
        {"x5u": "https://attacker.example/cert.pem"},
        {"jwk": jwk},
        {"x5c": ["MIIB"]},
    ]

    async def run() -> None:
        bench = Bench()
        for more in brought:
            assert await bench.outcome(token(private=own, **more)) is AuthRefusal.WRONG_TOKEN
            assert await bench.outcome(token(private=own, kid="attacker", **more)) is AuthRefusal.UNKNOWN_SIGNER
            # From the issuer they are harmless: nobody reads them.
            assert await bench.outcome(token(**more)) == USER
        assert bench.issuer.fetches == 1

    asyncio.run(run())


def test_other_kinds_of_tokens_are_none() -> None:
    assert outcome_of(token(typ="logout+jwt")) is AuthRefusal.WRONG_TOKEN
    head = {"alg": "RS256", "kid": "rsa-1"}
    assert outcome_of(by_hand(head, claims())) == USER
    others: list[dict[str, Any]] = [{"typ": 7}, {"crit": ["exp"]}, {"crit": []}, {"b64": False, "crit": ["b64"]}]
    for more in (*others, {"b64": False}):
        assert outcome_of(by_hand(head | more, claims())) in {AuthRefusal.WRONG_TOKEN, AuthRefusal.MALFORMED}, more
    encrypted = ".".join(["e30"] * 5)
    assert outcome_of(encrypted) is AuthRefusal.MALFORMED


def test_a_huge_token_is_not_read() -> None:
    async def run() -> None:
        bench = Bench()
        assert await bench.outcome(token(claims(padding="x" * MOST_CHARACTERS))) is AuthRefusal.MALFORMED
        assert await bench.outcome("." * 10_000_000) is AuthRefusal.MALFORMED
        assert (bench.issuer.fetches, bench.store.asked) == (0, 0)

    asyncio.run(run())


def test_a_deep_token_is_refused() -> None:
    deep = _encoded(("[" * 3_000).encode())
    for shown in (f"{deep}.{deep}.AAAA", f"{token().split('.')[0]}.{deep}.AAAA"):
        assert outcome_of(shown) in {AuthRefusal.MALFORMED, AuthRefusal.WRONG_TOKEN}


GARBAGE = st.one_of(
    st.text(max_size=100),
    st.tuples(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40)).map(
        lambda parts: ".".join(map(_encoded, parts))
    ),
    st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=4).map(
        lambda value: by_hand({"alg": "RS256", "kid": "rsa-1", "typ": value}, {"exp": value}, unsigned)
    ),
    st.dictionaries(
        st.sampled_from(["alg", "kid", "typ", "crit", "b64"]), st.none() | st.integers() | st.text(max_size=9)
    ).map(lambda header: by_hand(header, {}, unsigned)),
)


@given(GARBAGE)
def test_garbage_is_refused_and_nothing_else_happens(shown: str) -> None:
    assert isinstance(outcome_of(shown), AuthRefusal)


# --- users


def test_a_claim_alone_makes_nobody_an_operator() -> None:
    async def run() -> None:
        bench = Bench()
        shown = token(claims(tenant=DEPLOYMENT, role="admin"))
        assert await bench.outcome(shown) is AuthRefusal.NO_ROLE
        # Of the same name in a tenant.
        bench.store.set_user("acme", "u-17", Role.TENANT)
        bench.clock.now_ms += FRESH_MS
        assert await bench.outcome(shown) is AuthRefusal.NO_ROLE
        bench.store.set_user(DEPLOYMENT, "u-17", Role.OPERATOR)
        bench.clock.now_ms += FRESH_MS
        assert await bench.outcome(shown) == Identity(DEPLOYMENT, "u-17", Role.OPERATOR, user="u-17")

    asyncio.run(run())


def test_what_an_operator_says_of_a_user_counts_more_than_the_token() -> None:
    async def run() -> None:
        bench = Bench()
        admin = token(claims(role="admin"))
        bench.store.set_user("globex", "u-17", Role.VIEWER, disabled=True)
        assert await bench.outcome(admin) == Identity("acme", "u-17", Role.ADMIN, user="u-17")
        bench.store.set_user("acme", "u-17", Role.VIEWER)
        bench.clock.now_ms += FRESH_MS
        assert await bench.outcome(admin) == Identity("acme", "u-17", Role.VIEWER, user="u-17")
        assert await bench.outcome(token(claims(role=None))) == Identity("acme", "u-17", Role.VIEWER, user="u-17")
        bench.store.set_user("acme", "u-17", Role.VIEWER, disabled=True)
        bench.clock.now_ms += FRESH_MS
        assert await bench.outcome(admin) is AuthRefusal.USER_DISABLED

    asyncio.run(run())


def test_while_the_store_is_away_users_that_are_known_pass_for_a_while() -> None:
    async def run() -> None:
        bench = Bench()
        assert await bench.outcome(token()) == USER
        bench.store.is_away = True
        bench.clock.now_ms += 299_000
        assert await bench.outcome(token()) == USER
        assert await bench.outcome(token(claims(sub="u-18"))) is AuthRefusal.UNAVAILABLE
        bench.clock.now_ms += 1_000
        assert await bench.outcome(token()) is AuthRefusal.UNAVAILABLE

    asyncio.run(run())


def test_an_issuer_that_is_away_is_no_wrong_token() -> None:
    async def run() -> None:
        issuer = FakeIssuer()
        issuer.is_away = True
        bench = Bench(issuer)
        assert await bench.outcome(token()) is AuthRefusal.UNAVAILABLE
        assert answer(AuthRefusal.UNAVAILABLE).status == 503
        issuer.is_away = False
        bench.clock.now_ms += 30_000
        assert await bench.outcome(token()) == USER

    asyncio.run(run())
