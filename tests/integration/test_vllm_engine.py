"""The vLLM engine, in its own environment: every test of ``vllm_suite.py`` is one here.

``SKIP_VLLM=1`` skips them. They run there once, all together, since loading takes the most of their time.
"""

import ast
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from deploy.models.prepare import prepare, recipes

PROJECT = Path(__file__).parents[2]
SUITE = Path(__file__).with_name("vllm_suite.py")
PYTHON = PROJECT / ".venv-vllm/bin/python"
TIME_LIMIT_S = 280

pytestmark = [
    pytest.mark.full,
    pytest.mark.model,
    pytest.mark.skipif(os.environ.get("SKIP_VLLM") == "1", reason="SKIP_VLLM=1: vLLM is not tested"),
]


def names_of_tests() -> list[str]:
    tree = ast.parse(SUITE.read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What went wrong in each test of the suite that ran."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON.relative_to(PROJECT)} is missing: run `make vllm`, or set SKIP_VLLM=1")
    prepare(PROJECT / ".fairlane/models", recipes(), print)
    report = tmp_path_factory.mktemp("vllm") / "report.xml"
    # The other tests' fixtures need what is not there, and warnings are of libraries that are there for vLLM alone.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    options += ["-o", "addopts=--import-mode=importlib", f"--junit-xml={report}"]
    done = subprocess.run(
        [str(PYTHON), "-m", "pytest", *options, str(SUITE)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert report.exists(), done.stdout
    found: dict[str, list[str]] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - written by the line above
        wrong = [f"{part.get('message')}\n{part.text}" for part in case if part.tag in {"failure", "error", "skipped"}]
        found.setdefault(case.get("name", "").split("[")[0], []).extend(wrong)
    return found


@pytest.mark.parametrize("name", names_of_tests())
def test_in_the_environment_of_vllm(problems: dict[str, list[str]], name: str) -> None:
    assert name in problems, "it did not run"
    assert problems[name] == []
