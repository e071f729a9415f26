"""Held-out texts for the checks of the guardrails: not trained on, but for one paragraph of the language reference that
is also in the documentation of pdb, and no threshold is chosen on them.
"""

import csv
import inspect
import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from deploy.models.prompt_injection_data import LabelledText, neuralchemy, prose, s_labs, yanismiraoui
from inference_consumers.guardrails.check import Finding

_DATA = Path(__file__).parent / "data"
_DOCUMENTS = Path("docs")
_SEED = 46
_LETTERS = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text, and what is to be found in it."""

    text: str
    findings: tuple[Finding, ...] = ()


def personal_data() -> list[MarkedText]:
    with (_DATA / "personal_data.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        MarkedText(row["text"], tuple(Finding(kind, start, end, 1.0) for start, end, kind in row["spans"]))
        for row in rows
    ]


def hateful() -> list[LabelledText]:
    with (_DATA / "hatecheck.csv").open(encoding="utf-8", newline="") as rows:
        return [LabelledText(row["text"], row["is_hateful"] == "1") for row in csv.DictReader(rows)]


def project_documents() -> list[LabelledText]:
    """Paragraphs of the project's own documents: ordinary texts in another style than CPython's."""
    paragraphs = [
        " ".join(paragraph.split())
        for file in sorted(_DOCUMENTS.glob("*.md"))
        for paragraph in file.read_text(encoding="utf-8").split("\n\n")
    ]
    return [LabelledText(one, is_attack=False) for one in paragraphs if len(one) >= 80 and one[0].isalpha()]


def injections() -> dict[str, list[LabelledText]]:
    """By name. The corpora of the last two were not trained on at all."""
    ordinary = [LabelledText(one.text, is_attack=False) for one in personal_data()]
    return {
        "S-Labs": s_labs("test"),
        "neuralchemy": neuralchemy("test"),
        "corpora not trained on": [*yanismiraoui(), *ordinary, *project_documents()],
    }


def hidden_injections(documents: int = 150, paragraphs: int = 6) -> list[LabelledText]:
    """Long documents, every other one with an attack of S-Labs' test part between two of its paragraphs."""
    choice = random.Random(_SEED)
    attacks = [one.text for one in s_labs("test") if one.is_attack]
    ordinary = [one.text for one in prose("test")]
    found = []
    for number in range(documents):
        parts = choice.sample(ordinary, paragraphs)
        if number % 2:
            parts.insert(paragraphs // 2, choice.choice(attacks))
        found.append(LabelledText("\n\n".join(parts), bool(number % 2)))
    return found


def secrets() -> list[MarkedText]:
    """Secrets drawn at random, in the formats of their issuers, in sentences and code; and texts without any, of which
    some look like secrets: hashes, identifiers, source code."""
    choice = random.Random(_SEED)

    def drawn(length: int, alphabet: str = _LETTERS) -> str:
        return "".join(choice.choices(alphabet, k=length))

    frames = ("my key is {} thanks", "export TOKEN={}", '{{"token": "{}"}}', "curl -H 'X-Key: {}' https://example.org")
    found = []
    for _ in range(25):
        body = "\n".join(drawn(64) for _ in range(6))
        issued = (
            "AKIA" + drawn(16, string.ascii_uppercase + "234567"),
            "ghp_" + drawn(36),
            f"xoxb-{drawn(12, string.digits)}-{drawn(12, string.digits)}-{drawn(24)}",
            "sk_live_" + drawn(24),
            "AIza" + drawn(35),
            "sk-proj-" + drawn(48),
            f"-----BEGIN EC PRIVATE KEY-----\n{body}\n-----END EC PRIVATE KEY-----",
            f"eyJ{drawn(30)}.eyJ{drawn(60)}.{drawn(43)}",
        )
        found += [_marked(choice.choice(frames), secret) for secret in issued]
        found.append(_marked("secret_key = '{}'", drawn(32)))
        found.append(_marked("The password is {} for now.", drawn(10) + choice.choice(string.digits)))
        found.append(_marked("postgresql://app:{}@db.example.org:5432/app", drawn(14)))
    for _ in range(50):
        hashed, number = drawn(40, _HEX), drawn(32, _HEX)
        found.append(MarkedText(f"commit {hashed} fixes request {number[:8]}-{number[8:12]}-4{number[13:16]}"))
    modules = [import_module(name) for name in ("argparse", "http.client", "ssl", "smtplib", "imaplib", "hashlib")]
    sources = "".join(map(inspect.getsource, modules))
    found += (MarkedText(sources[start : start + 2_000]) for start in range(0, len(sources), 2_000))
    return found


def _marked(frame: str, secret: str) -> MarkedText:
    text = frame.format(secret)
    start = text.index(secret)
    return MarkedText(text, (Finding("secret", start, start + len(secret), 1.0),))


@dataclass(frozen=True, slots=True)
class PromptAndAnswer:
    prompt: str
    answer: str
    leaks: bool


def leaked_prompts(count: int = 200) -> list[PromptAndAnswer]:
    """System prompts of three paragraphs each; answers that quote all, a paragraph or a sentence of theirs, in other
    cases and line breaks, and answers from other paragraphs of the same texts."""
    choice = random.Random(_SEED)
    texts = [one.text for one in prose("test")]
    found = []
    for number in range(count):
        parts = choice.sample(texts, 5)
        prompt, other = " ".join(parts[:3]), " ".join(parts[3:])
        words = choice.choice(parts[:3]).split()
        quotes = (prompt, " ".join(words), " ".join(words[:16]).upper(), "\n".join(words[-16:]))
        if number % 2:
            found.append(PromptAndAnswer(prompt, f"{parts[3]} {choice.choice(quotes)} {parts[4]}", leaks=True))
        else:
            found.append(PromptAndAnswer(prompt, other, leaks=False))
    return found


def repetitions(count: int = 400) -> list[LabelledText]:
    """Answers, half of which end in a loop of 1 to 40 words."""
    choice = random.Random(_SEED)
    texts = [one.text for one in prose("test")]
    found = []
    for number in range(count):
        answer = " ".join(choice.sample(texts, 2))
        if number % 2:
            loop = " ".join(answer.split()[-choice.randint(1, 40) :])
            answer = (
                " ".join((answer, *[loop] * choice.randint(3, 20)))
                if len(loop.split()) > 8
                else (" ".join((answer, *[loop] * 30)))
            )
        found.append(LabelledText(answer, bool(number % 2)))
    return found


def short_and_long_texts(count: int) -> tuple[Sequence[str], Sequence[str]]:
    """Sentences, and documents of some 8,000 characters (about 2,000 tokens)."""
    paragraphs = [one.text for one in prose("test")]
    sentences = [one.text for one in personal_data()]
    choice = random.Random(_SEED)
    return (
        [choice.choice(sentences) for _ in range(count)],
        ["\n\n".join(choice.sample(paragraphs, 40))[:8_000] for _ in range(count)],
    )
