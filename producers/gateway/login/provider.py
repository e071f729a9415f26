"""What an issuer publishes about itself (OpenID Connect Discovery 1.0, section 3), checked. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from producers.gateway.identity.http_documents import checked_url
from producers.gateway.identity.signing_keys import ALGORITHMS

_MOST_URL_CHARACTERS = 2_048


class ProviderError(Exception):
    """The issuer is unavailable, or cannot be used. The message quotes nothing of its answers."""


@dataclass(frozen=True, slots=True)
class Provider:
    """A usable issuer.

    Attributes:
        authorization_endpoint, token_endpoint, jwks_uri: where browsers log in, codes are redeemed, and keys are.
        end_session_endpoint: where browsers log out, if anywhere.
        auth_method: how the token endpoint wants the client's secret; ``none`` without one.
        names_itself: it adds ``iss`` to its redirects (RFC 9207).
    """

    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    end_session_endpoint: str | None
    auth_method: str
    names_itself: bool


def parse_provider(document: bytes, issuer: str, *, has_secret: bool) -> Provider:
    """The issuer that this document describes. Raises ProviderError: another issuer, or one that lacks something."""
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        raise ProviderError("its discovery document is no JSON") from None
    if not isinstance(found, dict):
        raise ProviderError("its discovery document is no object")
    # Exactly, so that one issuer cannot speak for another (RFC 8414, section 3.3).
    if found.get("issuer") != issuer:
        raise ProviderError("its discovery document is of another issuer than OIDC_ISSUER")
    _needs(found, "response_types_supported", ("code",), None)
    _needs(found, "code_challenge_methods_supported", ("S256",), ["S256"])
    _needs(found, "id_token_signing_alg_values_supported", ALGORITHMS, None)
    _needs(found, "response_modes_supported", ("query",), ["query"])
    methods = ("client_secret_basic", "client_secret_post") if has_secret else ("none",)
    # Issuers of public clients often do not list `none`.
    default = ["client_secret_basic"] if has_secret else ["none"]
    offered = found.get("token_endpoint_auth_methods_supported", default) if has_secret else default
    return Provider(
        _endpoint(found, "authorization_endpoint"),
        _endpoint(found, "token_endpoint"),
        _endpoint(found, "jwks_uri"),
        _endpoint(found, "end_session_endpoint") if found.get("end_session_endpoint") is not None else None,
        _first("token_endpoint_auth_methods_supported", offered, methods),
        found.get("authorization_response_iss_parameter_supported") is True,
    )


def _needs(found: Mapping[str, Any], name: str, wanted: tuple[str, ...], default: list[str] | None) -> None:
    _first(name, found.get(name, default), wanted)


def _first(name: str, offered: object, wanted: tuple[str, ...]) -> str:
    """The first wanted value that is offered."""
    for value in wanted:
        if isinstance(offered, list) and value in offered:
            return value
    raise ProviderError(f"its {name} has none of {', '.join(wanted)}")


def _endpoint(found: Mapping[str, Any], name: str) -> str:
    url = found.get(name)
    if not isinstance(url, str) or len(url) > _MOST_URL_CHARACTERS:
        raise ProviderError(f"its {name} is missing")
    try:
        checked_url(url, f"its {name}")
    except ValueError as error:
        raise ProviderError(str(error)) from None
    if "#" in url:
        raise ProviderError(f"its {name} has a fragment")
    return url
