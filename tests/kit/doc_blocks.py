"""Code blocks of the documents: fenced ones by language, and indented ones with commands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMMANDS = ("make", "fairlane", "python", "docker", "export", "cp", "curl", "PYTHONPATH=.", ".venv/bin/python")


@dataclass(frozen=True, slots=True)
class DocumentedCommand:
    """One command of a document, continuation lines joined, without its comment."""

    document: str
    line: int
    text: str


def commands(document: Path) -> Iterator[DocumentedCommand]:
    """Every command in an indented block of the document, in order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        start, line = number, lines[number]
        number += 1
        if not line.startswith("    ") or line.split()[0] not in _COMMANDS:
            continue
        text = line.strip()
        while text.endswith("\\"):
            text = text[:-1] + lines[number].strip()
            number += 1
        yield DocumentedCommand(document.name, start + 1, re.sub(r"\s+#( .*)?$", "", text))


def fenced(document: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of this language."""
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
