"""Client of an OpenID Connect issuer: authorization code with PKCE. The requests are Authlib's, the checks of tokens
those of the tokens that callers present."""

import asyncio
import base64
import hmac
import json
from collections.abc import Mapping, Sequence
from random import random
from typing import Any

import httpx
import jwt
from authlib.oauth2.auth import ClientAuth
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge

from fairlane.backoff import Backoff
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from producers.gateway.identity.http_documents import Answer, DocumentError, checked_url, exchange, issuer_client
from producers.gateway.identity.jwks import KeySet, KeySetSource
from producers.gateway.identity.tokens import SignedTokens, user_of
from producers.gateway.identity.users import ClaimedUser
from producers.gateway.login.provider import Provider, ProviderError, parse_provider

log = get_logger(__name__)

WELL_KNOWN = "/.well-known/openid-configuration"
FRESH_MS = 3_600_000
"""Age at which the discovery document is fetched again; a failure then changes nothing."""
_AGAIN = Backoff(first_s=1.0, longest_s=30.0)
_FORM = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}


class WrongTokenError(Exception):
    """The issuer's answer is not the one to this login. The message is one word, for the log."""


class OidcClient:
    """A client at one issuer. Raises ValueError for an issuer that is no acceptable URL.

    Args:
        issuer: exactly as its tokens name it.
        client_id, client_secret: as registered; None for a client without a secret.
        scopes: separated by spaces; ``openid`` is one of them.
        redirect_url: where the issuer sends browsers back to.
        leeway_s: tolerated clock skew of the issuer.
        clock: monotonic milliseconds.
    """

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: str | None,
        scopes: str,
        redirect_url: str,
        leeway_s: float,
        clock: ClockMs,
    ) -> None:
        self._discovery = checked_url(f"{issuer.removesuffix('/')}{WELL_KNOWN}", "OIDC_ISSUER")
        self.issuer = issuer
        self.client_id = client_id
        self._client_secret = client_secret
        self._scopes = scopes
        self._redirect_url = redirect_url
        self._leeway_s = leeway_s
        self._clock = clock
        self._http = issuer_client()
        self._provider: Provider | None = None
        self._tokens: SignedTokens | None = None
        self._next_fetch_at_ms = clock()
        self._failures = 0
        self._turn = asyncio.Lock()

    async def provider(self) -> Provider:
        """What the issuer publishes, at most an hour old if it answers. Raises ProviderError."""
        async with self._turn:
            if self._clock() >= self._next_fetch_at_ms:
                await self._refresh()
        if self._provider is None:
            raise ProviderError("the issuer is unavailable")
        return self._provider

    async def authorization_url(self, state: str, nonce: str, verifier: str) -> str:
        """Where to send a browser that wants to log in. Raises ProviderError."""
        provider = await self.provider()
        return str(
            prepare_grant_uri(
                provider.authorization_endpoint,
                self.client_id,
                "code",
                redirect_uri=self._redirect_url,
                scope=self._scopes,
                state=state,
                nonce=nonce,
                code_challenge=create_s256_code_challenge(verifier),
                code_challenge_method="S256",
            )
        )

    async def user(self, code: str, nonce: str, verifier: str) -> ClaimedUser:
        """The user whom the issuer names for this code.

        Raises:
            ProviderError: the issuer is unavailable.
            WrongTokenError: it refused the code, or its token is not of this login.
            RefusedError: the token is not genuine or not valid, or names no tenant.
        """
        provider = await self.provider()
        body = prepare_token_request("authorization_code", "", self._redirect_url, code=code, code_verifier=verifier)
        client = ClientAuth(self.client_id, self._client_secret, provider.auth_method)
        url, headers, body = client.prepare("POST", provider.token_endpoint, dict(_FORM), body)
        try:
            answer = await exchange(self._http, "POST", httpx.URL(url), headers, body.encode())
        except DocumentError as error:
            raise ProviderError(f"its token endpoint gives no answer: {error}") from None
        id_token, access_token = _tokens_of(answer)
        tokens = self._tokens
        assert tokens is not None  # noqa: S101 - set with the provider
        claims = await tokens.claims(id_token)
        self._check(claims, id_token, access_token, nonce)
        return user_of(claims)

    async def close(self) -> None:
        """Cancel a fetch in flight, and disconnect."""
        await self._http.aclose()
        if self._tokens is not None:
            await self._tokens.close()

    def _check(self, claims: Mapping[str, Any], id_token: str, access_token: str | None, nonce: str) -> None:
        """What OpenID Connect asks for beyond the rules of all tokens (Core 1.0, sections 3.1.3.7 and 3.1.3.8)."""
        shown = claims.get("nonce")
        if not isinstance(shown, str) or not hmac.compare_digest(shown.encode(), nonce.encode()):
            raise WrongTokenError("nonce")
        audience, party = claims["aud"], claims.get("azp")
        if party is None and isinstance(audience, list) and len(audience) > 1:
            raise WrongTokenError("azp")
        if party is not None and party != self.client_id:
            raise WrongTokenError("azp")
        if "iat" not in claims:
            raise WrongTokenError("iat")
        if "at_hash" in claims and (access_token is None or claims["at_hash"] != _half_hash(id_token, access_token)):
            raise WrongTokenError("at_hash")

    async def _fetched(self) -> Provider:
        answer = await exchange(self._http, "GET", self._discovery, {"Accept": "application/json"})
        if answer.status != httpx.codes.OK:
            raise ProviderError(f"the answer is {answer.status}")
        return parse_provider(answer.body, self.issuer, has_secret=self._client_secret is not None)

    async def _refresh(self) -> None:
        try:
            provider = await self._fetched()
        except (DocumentError, ProviderError) as error:
            self._failures += 1
            delay_s = _AGAIN.delay_s(self._failures, random())  # noqa: S311 - jitter, no secret
            self._next_fetch_at_ms = self._clock() + round(1_000 * delay_s)
            log.warning("oidc_issuer_unavailable", error=str(error), failures=self._failures)
            return
        if self._provider is None or provider.jwks_uri != self._provider.jwks_uri:
            if self._tokens is not None:
                await self._tokens.close()
            keys = KeySet(KeySetSource(provider.jwks_uri, setting="jwks_uri"), self._clock)
            self._tokens = SignedTokens(self.issuer, self.client_id, self._leeway_s, keys)
        self._provider, self._failures = provider, 0
        self._next_fetch_at_ms = self._clock() + FRESH_MS


def _tokens_of(answer: Answer) -> tuple[str, str | None]:
    """The ID token and the access token of an answer. Raises ProviderError, WrongTokenError."""
    if answer.status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise ProviderError(f"its token endpoint answers {answer.status}")
    if answer.status != httpx.codes.OK:
        raise WrongTokenError("code_refused")
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise WrongTokenError("no_json") from None
    id_token = found.get("id_token") if isinstance(found, dict) else None
    if not isinstance(id_token, str):
        raise WrongTokenError("no_id_token")
    access_token = found.get("access_token")
    return id_token, access_token if isinstance(access_token, str) else None


def _half_hash(id_token: str, access_token: str) -> str:
    """``at_hash`` of an access token: of the hash that the ID token is signed with."""
    algorithm = jwt.get_algorithm_by_name(jwt.get_unverified_header(id_token)["alg"])
    digest = algorithm.compute_hash_digest(access_token.encode())
    return base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=").decode()


def issuer_mismatch(issuer: str, provider: Provider, shown: Sequence[str]) -> bool:
    """Whether a redirect comes from another issuer than the one that was asked (RFC 9207, section 2.4)."""
    return list(shown) != [issuer] if shown or provider.names_itself else False
