"""Keys and tokens, in the formats of their issuers. Those here were drawn at random."""

import inspect
import json
import logging
import random
import string
from base64 import urlsafe_b64encode

import pytest

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule
from fairlane.outcomes import GuardrailStage
from fairlane_server.re2_patterns import check_pattern
from inference_consumers.guardrails.check import CheckContext
from inference_consumers.guardrails.examination import Examination
from inference_consumers.guardrails.held_stream import HeldStream
from inference_consumers.guardrails.secrets import _RULES, SecretsCheck, entropy_bits
from tests.kit.cpu_time import cpu_time

_ALL = string.ascii_letters + string.digits


def drawn(length: int, alphabet: str = _ALL) -> str:
    return "".join(random.Random(length).choices(alphabet, k=length))


KEY_BODY = "\n".join(drawn(64) for _ in range(4))
PRIVATE_KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{KEY_BODY}\n-----END RSA PRIVATE KEY-----"
SECRETS = {
    "private_key": PRIVATE_KEY,
    "aws_access_key": "AKIA" + drawn(16, "ABCDEFGHIJ234567"),
    "github_token": "ghp_" + drawn(36),
    "gitlab_token": "glpat-" + drawn(20),
    "slack_token": f"xoxb-{drawn(12, string.digits)}-{drawn(24)}",
    "stripe_key": "sk_live_" + drawn(24),
    "google_api_key": "AIza" + drawn(35),
    "openai_key": "sk-proj-" + drawn(48),
    "anthropic_key": "sk-ant-api03-" + drawn(40),
    "hugging_face_token": "hf_" + drawn(34, string.ascii_letters),
    "npm_token": "npm_" + drawn(36),
    "pypi_token": "pypi-" + drawn(60),
    "sendgrid_key": f"SG.{drawn(22)}.{drawn(43)}",
    "fairlane_key": f"fl_{drawn(16, '0123456789abcdef')}_{drawn(32)}",
    "jwt": f"eyJ{drawn(20)}.eyJ{drawn(40)}.{drawn(43)}",
}


def found(text: str) -> list[tuple[str, str]]:
    [findings] = SecretsCheck().find([text], CheckContext())
    return [(one.type, text[one.start : one.end]) for one in findings]


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize(
    "text", ["{}", "here it is: {} - do not share", "key={}", 'config = {{"token": "{}"}}', "<{}>"]
)
def test_a_secret_is_found_wherever_it_is(kind: str, text: str) -> None:
    assert (kind, SECRETS[kind]) in found(text.format(SECRETS[kind]))


def test_a_secret_with_characters_that_show_nothing_is_found() -> None:
    secret = SECRETS["github_token"]
    hidden = f"{secret[:10]}\u200b{secret[10:]}"
    assert found(f"use {hidden} now") == [("github_token", hidden)]


ENCRYPTED = PRIVATE_KEY.replace("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,ABCDEF\n\n", 1)
ARMORED = (
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: GnuPG v2.0.22 (GNU/Linux)\n"
    f"Comment: https://gnupg.example/ & more!\n\n{KEY_BODY}\n=Ab1C\n-----END PGP PRIVATE KEY BLOCK-----"
)
WRITTEN_AS = {
    "encrypted": ENCRYPTED,
    "armored": ARMORED,
    "quoted": "\n".join(f"> {line}" for line in ARMORED.splitlines()),
    "quoted twice": "\n".join(f">> | {line}" for line in PRIVATE_KEY.splitlines()),
    "commented out": "\n".join(f"# {line}" for line in PRIVATE_KEY.splitlines()),
    "in a diff": "\n".join(f"+{line}" for line in ENCRYPTED.splitlines()),
    "in code": " +\n".join(f'"{line}\\n"' for line in PRIVATE_KEY.splitlines()),
    "escaped": ARMORED.replace("\n", "\\n"),
    "escaped twice": PRIVATE_KEY.replace("\n", "\\\\n"),
}


@pytest.mark.parametrize("way", WRITTEN_AS)
@pytest.mark.parametrize("part", ["whole", "without its end"])
def test_a_private_key_is_found_to_its_end_however_its_lines_are_written(way: str, part: str) -> None:
    key = WRITTEN_AS[way]
    if part == "without its end":
        key = key[: key.index("-----END")]
    text = f"Look:\n{key} and prose behind it."
    (hit,) = [hit for kind, hit in found(text) if kind == "private_key"]
    assert [line for line in KEY_BODY.splitlines() if line not in hit] == []
    assert "and prose" not in hit


JWT_HEADERS = {
    "signed": '{"alg":"HS256","typ":"JWT"}',
    "with a certificate": f'{{"x5c": ["{drawn(800)}"], "alg": "RS256"}}',
    "encrypted": '{"enc":"A256GCM","alg":"dir"}',
}


def encoded(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


JWTS = {
    name: f"{encoded(header)}.{encoded(json.dumps({'sub': drawn(300)}))}.{drawn(86)}"
    for name, header in JWT_HEADERS.items()
}


@pytest.mark.parametrize("way", JWTS)
def test_a_token_is_found_from_its_beginning_on(way: str) -> None:
    token = JWTS[way]
    for length in range(40, len(token)):
        assert ("jwt", token[:length].rstrip(".")) in found(f"use {token[:length]}"), length


def test_what_only_begins_as_a_token_is_none() -> None:
    assert found(encoded('{"page":17,"after":"2024-05-01T10:00:00Z","size":50}')) == []


LONG_BODY = "\n".join(drawn(64 - number) for number in range(25))
LONG = {
    **{way: key.replace(KEY_BODY, LONG_BODY) for way, key in (("plain", PRIVATE_KEY), ("encrypted", ENCRYPTED))},
    "armored": ARMORED.replace(KEY_BODY, LONG_BODY),
    "quoted": "\n".join(f"> {line}" for line in ARMORED.replace(KEY_BODY, LONG_BODY).splitlines()),
}


def streamed(text: str, step: int) -> str:
    """What is released of an answer that is written in steps, with the rule to redact secrets."""
    policy = GuardrailPolicy(output=(GuardrailRule("secrets", "redact", "closed"),))
    stream = HeldStream(policy, "", 200)

    def examined(examination: Examination) -> Examination:
        while (call := examination.call()) is not None:
            examination.answered(SecretsCheck().find(call.texts, call.context))
        return examination

    released = ""
    for at in range(0, len(text), step):
        stream.add(text[at : at + step])
        while (window := stream.begin()) is not None:
            examined(window)
            released += stream.finish()
            stream.resume()
    return released + stream.rest(examined(Examination.of(GuardrailStage.OUTPUT, policy, (text,))))


@pytest.mark.parametrize("way", LONG)
@pytest.mark.parametrize("step", [7, 64, 500])
def test_no_line_of_a_private_key_is_streamed(way: str, step: int) -> None:
    text = f"Here is the key that you asked for.\n{LONG[way]}\n{'Keep it safe. ' * 40}"
    out = streamed(text, step)
    assert [line for line in LONG_BODY.splitlines() if line in out or line[:16] in out] == []
    assert out.endswith("Keep it safe. ")
    assert "[private_key]" in out


@pytest.mark.parametrize("way", JWTS)
def test_no_part_of_a_token_is_streamed(way: str) -> None:
    token = JWTS[way]
    out = streamed(f"Use this one: {token} and no other. {'It is good. ' * 40}", 16)
    assert out.startswith("Use this one: [jwt] and no other. ")


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ('api_key = "Zk39fjVn20slQw81"', ("assigned_secret", "Zk39fjVn20slQw81")),
        ("the client secret is xK39fjVn20slQw81.", ("assigned_secret", "xK39fjVn20slQw81.")),
        ("password: hunter2x", ("assigned_password", "hunter2x")),
        ("postgres://app:s3cr3tpw@db:5432/x", ("url_password", "s3cr3tpw")),
        ("Authorization: Bearer Zk39fjVn20slQw81ab3d", ("bearer_token", "Zk39fjVn20slQw81ab3d")),
    ],
)
def test_an_assigned_value_is_found_without_its_name(text: str, hit: tuple[str, str]) -> None:
    assert hit in found(text)


@pytest.mark.parametrize(
    "text",
    [
        "The API key is important for authentication.",
        "api_key = YOUR_API_KEY_HERE_12345",
        "password: ${DATABASE_PASSWORD_2}",
        "scikit-learn and sk-learn-compatible-estimators",
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "id 123e4567-e89b-12d3-a456-426614174000",
        "https://user@example.org/path:with/colon",
        "-----BEGIN PUBLIC KEY-----",
    ],
)
def test_what_is_no_secret_is_not_found(text: str) -> None:
    assert found(text) == []


def test_source_code_holds_no_secrets() -> None:
    assert found(inspect.getsource(inspect) + inspect.getsource(logging)) == []


def test_a_lone_first_line_of_a_private_key_does_not_take_the_prose_behind_it() -> None:
    text = "-----BEGIN PRIVATE KEY----- is how it begins, and more of it than that is not known."
    assert found(text) == [("private_key", "-----BEGIN PRIVATE KEY-----")]


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule.type)
def test_every_rule_would_be_accepted_from_a_tenant(rule: object) -> None:
    check_pattern(rule.pattern)  # type: ignore[attr-defined] # a private class


@pytest.mark.parametrize("unit", ["-----BEGIN PRIVATE KEY-----", "api_key=", "aws secret ", "://:", "sk-", "bearer "])
def test_no_text_takes_long(unit: str) -> None:
    with cpu_time() as time:
        found(unit * (100_000 // len(unit)))
    assert time.spent_s < 5


def test_entropy() -> None:
    assert entropy_bits("") == entropy_bits("aaaa") == 0
    assert entropy_bits("abab") == 1
    assert entropy_bits("abcdefgh") == 3
