"""No module but ``fairlane.names`` spells a topic, a group or a transactional id: each must begin with TOPIC_PREFIX."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from fairlane_server.topics.families import load_families

CODE = ("fairlane", "fairlane_server", "producers", "stream_processors", "inference_consumers", "deploy", "benchmarks")
NAMES = PROJECT_ROOT / "fairlane" / "names.py"
FIRST_PARTS = "|".join(sorted({family.name.partition(".")[0] for family in load_families()}))
TOPIC = re.compile(rf"\^?({FIRST_PARTS})\\?\.[a-z0-9.\\{{}}()|*$_-]*")
"""A topic's name or a pattern of some, or how one begins."""
CONFIGURATIONS = ("read_committed_consumer", "transactional_producer")
"""The functions that take a group or a transactional id, as their second argument."""


def spelled(tree: ast.AST, *, is_benchmark: bool = False) -> Iterator[str]:
    """The topic names, the ids made from GROUP_PREFIX and, but for benchmarks' own readers, the ids given as texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                found = TOPIC.fullmatch(text) is not None
            case ast.JoinedStr(values=parts):
                found = any(isinstance(part, ast.FormattedValue) and _is_group_prefix(part.value) for part in parts)
            case ast.BinOp(left=left, right=right):
                found = _is_group_prefix(left) or _is_group_prefix(right)
            case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant() | ast.JoinedStr(), *_]):
                found = name in CONFIGURATIONS and not is_benchmark
            case _:
                continue
        if found:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_group_prefix(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "group_prefix"


def files() -> list[Path]:
    found = [path for folder in CODE for path in sorted((PROJECT_ROOT / folder).rglob("*.py")) if path != NAMES]
    assert len(found) > 300
    return found


def test_no_other_module_spells_a_topic_or_a_group() -> None:
    found = {
        f"{path.relative_to(PROJECT_ROOT)}, {name}"
        for path in files()
        for name in spelled(ast.parse(path.read_text(encoding="utf-8")), is_benchmark="benchmarks" in path.parts)
    }
    assert not found, "make it with a function of fairlane.names"


@pytest.mark.parametrize(
    "code",
    [
        'topic = "requests." + tenant',
        'topic = f"replies.{tenant}"',
        r'subscribe(r"^(gateway|jobs)\.replies$", r"^ledger\.usage$")',
        'LEDGER = "ledger.usage"',
        'group = f"{self._settings.group_prefix}.recorder"',
        'group = settings.group_prefix + ".recorder"',
        'config = read_committed_consumer(settings, "fairlane-top") | {"client.id": "top"}',
        'config = transactional_producer(settings, f"replay-{user}", 10_000)',
    ],
)
def test_a_spelled_name_would_be_found(code: str) -> None:
    assert list(spelled(ast.parse(code)))
