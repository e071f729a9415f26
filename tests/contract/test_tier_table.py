"""The README's table of promises: each names its tests, and the commands that run them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from tests.tiers import PROPERTY_MARK, Tier, tiers_of

README = PROJECT_ROOT / "README.md"
COMMANDS = {
    Tier.CORE: "make test",
    Tier.FULL: "make test-full",
    Tier.ALONE: "make test-full",
    Tier.FAULTS: "make faults",
}
_TEST_FILES = re.compile(r"`(tests/[\w/]+(?:\.py|/))`")


def tiers_of_file(file: Path) -> set[Tier]:
    """The tiers that run something of this file, by the marks in its text."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_file = {name for node in tree.body if _assigns_pytestmark(node) for name in _marks(node)}
    return {tier for marks in _tests(tree, of_file) for tier in tiers_of(marks - {PROPERTY_MARK})}


def _assigns_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(to, ast.Name) and to.id == "pytestmark" for to in node.targets
    )


def _marks(node: ast.AST) -> set[str]:
    """X of every ``pytest.mark.X`` below this node."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Attribute) and one.value.attr == "mark"
    }


def _tests(tree: ast.Module, of_file: set[str]) -> Iterator[set[str]]:
    """The marks of every test, and of every set of parameters that has marks of its own."""
    yielded = False
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yielded = True
            parameters = [_parameter_marks(one) for one in node.decorator_list if "parametrize" in _marks(one)]
            own = {name for one in node.decorator_list if "parametrize" not in _marks(one) for name in _marks(one)}
            for of_parameters in {marks for sets in parameters for marks in sets} or {frozenset[str]()}:
                yield of_file | own | of_parameters
    if not yielded:
        # A state machine or a suite from another module.
        yield of_file


def _parameter_marks(decorator: ast.expr) -> set[frozenset[str]]:
    """The marks of each set of parameters of a ``parametrize``; an empty set for those that have none."""
    assert isinstance(decorator, ast.Call)
    values = decorator.args[1] if len(decorator.args) > 1 else decorator
    sets = values.elts if isinstance(values, ast.List | ast.Tuple) else [values]
    return {frozenset(_marks(one)) for one in sets}


def rows() -> list[tuple[str, str, str]]:
    """Promise, tests and commands of each row."""
    table = README.read_text(encoding="utf-8").partition("| promise |")[2].partition("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [(promise.strip(), tests, commands) for promise, tests, commands in cells]


@pytest.mark.parametrize(("promise", "tests", "commands"), rows(), ids=[row[0][:50] for row in rows()])
def test_a_promise_names_the_commands_that_run_its_tests(promise: str, tests: str, commands: str) -> None:
    paths = [PROJECT_ROOT / name for name in _TEST_FILES.findall(tests)]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("test_*.py")))]
    assert files or "make bench" in tests, f"no test proves: {promise}"
    found = {COMMANDS[tier] for file in files for tier in tiers_of_file(file)}
    assert found == set(re.findall(r"`([^`]+)`", commands)), files


def test_marks_are_found_in_every_place(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "pytestmark = [pytest.mark.broker]\n"
        "@pytest.mark.alone\ndef test_alone(): ...\n"
        "@pytest.mark.parametrize('a', [1, pytest.param(2, marks=[pytest.mark.long])])\ndef test_both(a): ...\n"
    )
    assert tiers_of_file(file) == {Tier.ALONE, Tier.CORE, Tier.FAULTS}
    file.write_text("pytestmark = pytest.mark.full\ndef test_it(): ...\n")
    assert tiers_of_file(file) == {Tier.FULL}
