"""Check ``secrets``: keys and tokens in the formats of their issuers, private keys, and passwords that are assigned.

A format with a fixed prefix is enough by itself. What only looks random (the value of ``api_key = …``) must also have
the entropy of something random (Shannon 1948), and neither be a placeholder nor a hash or identifier by its shape.
"""

import math
import re
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fairlane_server.re2_patterns import compiled, matches
from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.spans import joined

LEAST_ENTROPY_BITS = 3.0
"""Of each character of an assigned value. English words have 2 to 3, 20 random letters and digits about 4."""
_PLACEHOLDERS = (
    "example",
    "placeholder",
    "your",
    "changeme",
    "change_me",
    "xxxx",
    "****",
    "<",
    "${",
    "{{",
    "%(",
    "...",
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The first group of the pattern is the secret, or all of it without a group."""

    type: str
    pattern: str
    score: float = 1.0
    accepts: Callable[[str], bool] = lambda _: True


def entropy_bits(text: str) -> float:
    """Shannon's entropy of a character of the text, by its own frequencies; 0 for none."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)


def _looks_random(value: str) -> bool:
    if not _is_no_placeholder(value):
        return False
    kinds = (any(map(test, value)) for test in (str.islower, str.isupper, str.isdigit))
    return sum(kinds) >= 2 and entropy_bits(value) >= LEAST_ENTROPY_BITS


def _is_no_placeholder(value: str) -> bool:
    lower = value.lower()
    return not any(word in lower for word in _PLACEHOLDERS)


def _has_two_kinds(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def _begins_as_jose_header(token: str) -> bool:
    """Whether a token in base64url is a JSON object whose first name is one of RFC 7515, section 4.1, RFC 7516 or RFC
    7519; a header that is still being written has its first name early."""
    begin = token.split(".", 1)[0][:_HEADER_BEGIN]
    return _JOSE_HEADER.match(urlsafe_b64decode(begin[: len(begin) // 4 * 4])) is not None


_HEADER_BEGIN = 64
_JOSE_HEADER = re.compile(
    rb'\{\s*"(?:alg|enc|zip|typ|cty|kid|jku|jwk|x5u|x5c|x5t|x5t#S256|crit|epk|apu|apv|iv|tag|p2s)"'
)

_LINE_SIGNS = r"(?:[\s>|#*;\"'+,-]|\\+[nrt])*"
"""Between the lines of a key that is quoted, commented out, written in code, or escaped."""
_ARMOR_HEADERS = rf"(?:{_LINE_SIGNS}(?:\n|\\+n){_LINE_SIGNS}[A-Z][A-Za-z-]{{1,30}}:[^\n\\]{{0,200}})*"
"""As "Proc-Type: 4,ENCRYPTED" (RFC 1421, section 4.6) and "Version: …" (RFC 9580, section 6.2.2)."""
_KEY_END = r"-----END (?:[A-Z]{2,10} ){0,2}PRIVATE KEY(?: BLOCK)?-----"

_RULES = (
    _Rule(
        "private_key",
        # To its end, or else over what can be the key; a text of prose behind a lone first line stays.
        rf"-----BEGIN (?:[A-Z]{{2,10}} ){{0,2}}PRIVATE KEY(?: BLOCK)?-----{_ARMOR_HEADERS}"
        rf"(?:[A-Za-z0-9+/=:,\s\\>|#*;\"'-]*?{_KEY_END}|(?:{_LINE_SIGNS}[A-Za-z0-9+/=]{{16,}})*)",
    ),
    _Rule("aws_access_key", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b"),
    _Rule("aws_secret_key", r"(?i)\baws.{0,20}?secret.{0,20}?[\s'\"=:]([A-Za-z0-9/+]{40})(?:[^A-Za-z0-9/+=]|$)"),
    _Rule("github_token", r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255})\b"),
    _Rule("gitlab_token", r"\bgl(?:pat|ptt|dt|rt|cbt|agent|soat)-[A-Za-z0-9_-]{20,64}"),
    _Rule(
        "slack_token", r"\bxox[abeoprs]-(?:[A-Za-z0-9]{1,60}-){1,5}[A-Za-z0-9]{10,64}\b|\bxapp-\d-[A-Za-z0-9-]{20,150}"
    ),
    _Rule("slack_webhook", r"https://hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9/_-]{20,100}"),
    _Rule("stripe_key", r"\b(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,250}\b"),
    _Rule("google_api_key", r"\bAIza[A-Za-z0-9_-]{35}"),
    _Rule("google_oauth_secret", r"\bGOCSPX-[A-Za-z0-9_-]{28}"),
    _Rule("openai_key", r"\bsk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{20,200}", accepts=_has_two_kinds),
    _Rule("anthropic_key", r"\bsk-ant-[A-Za-z0-9_-]{20,200}"),
    _Rule("hugging_face_token", r"\b(?:hf|api_org)_[A-Za-z]{34}\b"),
    _Rule("npm_token", r"\bnpm_[A-Za-z0-9]{36}\b"),
    _Rule("pypi_token", r"\bpypi-[A-Za-z0-9_-]{50,500}"),
    _Rule("sendgrid_key", r"\bSG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}"),
    _Rule("twilio_key", r"\bSK[0-9a-f]{32}\b"),
    _Rule("azure_storage_key", r"(?i)AccountKey=([A-Za-z0-9+/]{86}==)"),
    _Rule("digitalocean_token", r"\bdo[oprt]_v1_[0-9a-f]{64}\b"),
    _Rule("telegram_token", r"\b\d{8,10}:AA[A-Za-z0-9_-]{33}\b"),
    _Rule("fairlane_key", r"\bfl_[0-9a-f]{16}_[A-Za-z0-9_-]{20,100}"),
    _Rule("jwt", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    # From its header on, as long as it is being written; an encrypted one has five parts.
    _Rule("jwt", r"\beyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]+){0,4}", accepts=_begins_as_jose_header),
    _Rule(
        "url_password",
        r"\b[A-Za-z][A-Za-z0-9+.-]{1,30}://[^\s/:@'\"]{0,100}:([^\s/:@'\"]{3,200})@[A-Za-z0-9\[]",
        accepts=_is_no_placeholder,
    ),
    _Rule("bearer_token", r"(?i)\bbearer\s+([A-Za-z0-9_.~+/-]{20,1000}=*)", accepts=_looks_random),
    _Rule(
        "assigned_secret",
        r"(?i)(?:api|access|auth|private|secret|signing|encryption|client|account)[_\s-]?(?:key|token|secret)"
        r"[\w-]{0,20}['\"]?\s*(?:=>|:=|[=:]|\bis\b)\s*['\"]?([^\s'\",;)<>]{12,200})",
        score=0.8,
        accepts=_looks_random,
    ),
    _Rule(
        "assigned_password",
        r"(?i)(?:passw(?:or)?d|passphrase|\bpwd|secret)['\"]?\s*(?:=>|:=|[=:]|\bis\b:?)\s*['\"]?([^\s'\",;)<>]{6,100})",
        score=0.6,
        accepts=lambda value: _is_no_placeholder(value) and _has_two_kinds(value),
    ),
)


class SecretsCheck:
    """Takes time linear in the text. A finding is the secret alone, without the name that it is assigned to."""

    name = "secrets"

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:  # noqa: ARG002 - of the protocol
        found: list[list[Finding]] = []
        for text in texts:
            plain = normalized(text)
            found.append(joined(plain.original(hit) for hit in _most_specific(list(_matches(plain.text)))))
        return found


def _matches(text: str) -> Iterator[Finding]:
    for rule in _RULES:
        for start, end in matches(rule.pattern, text, min(1, compiled(rule.pattern).groups)):
            if rule.accepts(text[start:end]):
                yield Finding(rule.type, start, end, rule.score)


def _most_specific(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Without those that another, surer one covers: a token of an issuer that is also assigned."""
    sure = [one for one in findings if one.score == 1.0]
    for one in findings:
        if one.score == 1.0 or not any(other.start < one.end and one.start < other.end for other in sure):
            yield one
