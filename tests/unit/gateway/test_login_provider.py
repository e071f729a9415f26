"""Discovery documents: an issuer is used only if it is the one in the settings and offers what a login needs."""

import json
from typing import Any

import pytest

from producers.gateway.login.provider import Provider, ProviderError, parse_provider

ISSUER = "https://login.example/realm"
DOCUMENT: dict[str, Any] = {
    "issuer": ISSUER,
    "authorization_endpoint": f"{ISSUER}/authorize",
    "token_endpoint": f"{ISSUER}/token",
    "jwks_uri": f"{ISSUER}/jwks",
    "response_types_supported": ["code", "code id_token"],
    "id_token_signing_alg_values_supported": ["PS256", "ES256"],
}


def parsed(*, has_secret: bool = True, **changed: Any) -> Provider:
    document = {name: value for name, value in (DOCUMENT | changed).items() if value is not None}
    return parse_provider(json.dumps(document).encode(), ISSUER, has_secret=has_secret)


def test_what_is_left_out_has_the_meaning_that_the_standard_gives_it() -> None:
    assert parsed() == Provider(
        f"{ISSUER}/authorize", f"{ISSUER}/token", f"{ISSUER}/jwks", None, "client_secret_basic", names_itself=False
    )
    assert parsed(has_secret=False).auth_method == "none"


def test_a_secret_is_shown_in_the_first_way_that_both_know() -> None:
    offered = ["private_key_jwt", "client_secret_post"]
    assert parsed(token_endpoint_auth_methods_supported=offered).auth_method == "client_secret_post"
    assert parsed(token_endpoint_auth_methods_supported=offered, has_secret=False).auth_method == "none"
    offered.append("client_secret_basic")
    assert parsed(token_endpoint_auth_methods_supported=offered).auth_method == "client_secret_basic"


def test_what_an_issuer_offers_besides_is_known() -> None:
    found = parsed(end_session_endpoint=f"{ISSUER}/logout", authorization_response_iss_parameter_supported=True)
    assert (found.end_session_endpoint, found.names_itself) == (f"{ISSUER}/logout", True)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"issuer": f"{ISSUER}/"}, "another issuer"),
        ({"issuer": "https://login.example"}, "another issuer"),
        ({"issuer": [ISSUER]}, "another issuer"),
        ({"issuer": None}, "another issuer"),
        ({"response_types_supported": ["id_token"]}, "response_types_supported"),
        ({"response_types_supported": None}, "response_types_supported"),
        ({"response_types_supported": "code"}, "response_types_supported"),
        ({"code_challenge_methods_supported": ["plain"]}, "code_challenge_methods_supported has none of S256"),
        ({"id_token_signing_alg_values_supported": ["HS256", "none"]}, "id_token_signing_alg_values_supported"),
        ({"response_modes_supported": ["form_post"]}, "response_modes_supported"),
        ({"token_endpoint_auth_methods_supported": ["private_key_jwt"]}, "token_endpoint_auth_methods_supported"),
        ({"authorization_endpoint": None}, "authorization_endpoint is missing"),
        ({"token_endpoint": "http://login.example/token"}, "token_endpoint: must begin with https"),
        ({"jwks_uri": "https://user:w0rd@login.example/jwks"}, "jwks_uri: must name a host, and no user"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "authorization_endpoint: "),
        ({"authorization_endpoint": f"{ISSUER}#part"}, "authorization_endpoint has a fragment"),
        ({"end_session_endpoint": "http://evil.example"}, "end_session_endpoint: must begin with https"),
        ({"token_endpoint": 7}, "token_endpoint is missing"),
        ({"token_endpoint": f"{ISSUER}/{'x' * 3_000}"}, "token_endpoint is missing"),
    ],
)
def test_an_issuer_that_lacks_something_is_not_used(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProviderError, match=problem) as raised:
        parsed(**changed)
    assert "evil" not in str(raised.value)
    assert "w0rd" not in str(raised.value)


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_a_document_that_is_none_is_refused(document: bytes) -> None:
    with pytest.raises(ProviderError):
        parse_provider(document, ISSUER, has_secret=True)
