"""The documents say what is true: names, links, commands and examples in them are held against the code."""

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from prometheus_client.metrics import MetricWrapperBase

import fairlane
from deploy.local.__main__ import app as stack_app
from deploy.local.layout import POSTGRES_VARIABLES, PROJECT_ROOT
from deploy.settings_docs import COMPOSE_VARIABLES, STORAGE_VARIABLES
from fairlane import metrics
from fairlane.client import RequestFields
from fairlane.settings import Settings
from fairlane_server.cli.app import app as fairlane_app
from fairlane_server.processes.thread_times import ThreadTimes
from fairlane_server.topics.families import KafkaRole
from inference_consumers.engines.remote.pool import ENDPOINT_METRICS

README = PROJECT_ROOT / "README.md"
OPERATIONS = PROJECT_ROOT / "docs" / "operations.md"
DOCUMENTS = (README, PROJECT_ROOT / "schemas" / "README.md", *sorted((PROJECT_ROOT / "docs").rglob("*.md")))
DECISIONS = sorted((PROJECT_ROOT / "docs" / "adr").glob("*.md"))
# Variables that are read by make, the shell or the tests, and so are in no settings class.
OTHER_VARIABLES = frozenset(
    {"ARGS", "FAIRLANE_FAULT_SEED", "FAIRLANE_PIP_ARGS", "FAIRLANE_TEST_STACK", "JAVA_HOME", "MVN", "PYTHON"}
    | {"SKIP_KEYCLOAK", "SKIP_KSERVE", "SKIP_MLFLOW", "SKIP_NGINX", "SKIP_PROMTOOL", "SKIP_VLLM", "VLLM_PACKAGE"}
    # In the process of an engine, which reads no settings.
    | {"GPU_MEMORY_UTILIZATION", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL"}
    # Of an external Postgres, for the embedded stack and the tests.
    | {*POSTGRES_VARIABLES.values()}
    # Of the load generators, which are callers like any other.
    | {"FAIRLANE_API_KEY"}
)
ROOMS = (
    "fairlane",
    "fairlane_server",
    "stream_processors",
    "inference_consumers",
    "producers",
    "schemas",
    "deploy",
    "benchmarks",
    "tests",
)
MADE_WHEN_NEEDED = frozenset({"schemas/history/"})

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def code_spans(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_every_relative_link_resolves(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{document.name}: {target}"


@each_document
def test_every_path_that_is_named_exists(document: Path) -> None:
    for span in code_spans(document):
        if span.startswith(tuple(f"{room}/" for room in ROOMS)) and re.fullmatch(r"[\w./-]+", span):
            assert span in MADE_WHEN_NEEDED or (PROJECT_ROOT / span).exists(), f"{document.name}: {span}"


def test_every_module_that_prose_names_exists() -> None:
    """By its file name, in documents and in docstrings and comments of the packages."""
    sources = [source for room in ROOMS for source in (PROJECT_ROOT / room).rglob("*.py")]
    known = {source.name for source in sources}
    gone = [
        f"{file.relative_to(PROJECT_ROOT)}: {name}"
        for file in (*DOCUMENTS, *sources)
        for name in re.findall(r"`[a-z_/]*?(\w+\.py)`", file.read_text(encoding="utf-8"))
        if name not in known
    ]
    assert gone == []


def test_every_row_of_the_threat_model_names_a_test_and_every_hostile_test_is_named() -> None:
    """What holds somebody without a proof is a hope; it belongs to what is not held."""
    text = (PROJECT_ROOT / "docs" / "threat-model.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    proofs = [re.findall(r"`(tests/\S+?\.py)`", row.rsplit(" | ", 1)[-1]) for row in rows]
    heads = [index for index, row in enumerate(rows) if row.endswith("| proof |")]
    trusted = 1 + next(index for index, row in enumerate(rows) if row.startswith("| stranger who"))
    held = [index for index in range(trusted, len(rows)) if index not in heads]
    assert heads
    assert [rows[index] for index in held if not proofs[index]] == []
    named = {proof for of_row in proofs for proof in of_row}
    hostile = {str(file.relative_to(PROJECT_ROOT)) for file in (PROJECT_ROOT / "tests" / "hostile").glob("test_*.py")}
    assert hostile <= named


@each_document
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (PROJECT_ROOT / "Makefile").read_text(), re.MULTILINE))
    # At the beginning of a line or of a code span; elsewhere "make" is a word.
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z]+)", document.read_text(), re.MULTILINE))
    assert named <= targets


@each_document
def test_every_module_that_is_run_exists(document: Path) -> None:
    for module in re.findall(r"-m ([a-z_][\w.]*\w)", document.read_text()):
        assert importlib.util.find_spec(module), f"{document.name}: python -m {module}"


@each_document
def test_every_command_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    known = {f"{group} {command}" for group, command in fairlane_commands()}
    groups = {name.split()[0] for name in known}
    # "fairlane" is also a name in prose: only what follows as a word in code is a command.
    for group, command in re.findall(r"(?:^ {4}|`)fairlane ([a-z]+)\s+([a-z]+)", text, re.MULTILINE):
        assert group in groups, f"{document.name}: fairlane {group}"
        assert f"{group} {command}" in known, f"{document.name}: fairlane {group} {command}"
    stack_commands = set(subcommands(stack_app))
    assert set(re.findall(r"deploy\.local ([a-z]+)", text)) <= stack_commands


@each_document
def test_every_variable_that_is_named_is_a_setting(document: Path) -> None:
    settings = {"NAME"} | {name.upper() for name in Settings.model_fields}
    settings |= {f"{name}_FILE" for name in settings} | COMPOSE_VARIABLES.keys() | STORAGE_VARIABLES.keys()
    for span in code_spans(document):
        if (found := re.fullmatch(r"([A-Z]+(?:_[A-Z]+)+)(?:=\S*)?", span)) and found[1] not in OTHER_VARIABLES:
            assert found[1] in settings, f"{document.name}: {found[1]}"


def fairlane_commands() -> Iterator[tuple[str, str]]:
    for group in fairlane_app.registered_groups:
        assert group.typer_instance is not None
        for command in subcommands(group.typer_instance):
            yield str(group.name), command


def subcommands(app: typer.Typer) -> Iterator[str]:
    """The commands of a group, and the groups in it."""
    yield from (str(group.name) for group in app.registered_groups)
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__


# ------------------------------------------------------------------ metrics


def test_every_metric_is_documented_with_type_and_labels() -> None:
    documented = {
        name: (kind, tuple(filter(None, re.split(r",\s*", labels))))
        for name, kind, labels in re.findall(
            r"^\| `(fairlane_\w+)` \| (\w+) \| ([^|]*?) *\|", OPERATIONS.read_text(), re.MULTILINE
        )
    }
    assert documented == dict(declared_metrics())


def declared_metrics() -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            suffix = "_total" if family.type == "counter" else ""
            yield family.name + suffix, (family.type, tuple(metric._labelnames))
    for family in ThreadTimes().describe():
        yield f"{family.name}_total", (family.type, ("thread",))


@each_document
def test_every_metric_that_is_named_exists(document: Path) -> None:
    known = {name for name, _ in declared_metrics()} | set(ENDPOINT_METRICS)
    named = {name for span in code_spans(document) for name in re.findall(r"^(fairlane_\w+)", span)}
    # Roles in Postgres, a package, and a user of Redis.
    others = {"fairlane_owner", "fairlane_gateway", "fairlane_ingest", "fairlane_server", "fairlane_sessions"}
    of_tenants = {f"fairlane_tenant_{owner}" for owner in ("", "globex", "globex_2")}
    users = {f"fairlane_{role}" for role in KafkaRole} | of_tenants | {"fairlane_consumer_"}
    assert named - others - users <= known


# ------------------------------------------------------------------ kinds of pages

KINDS = {
    "Tutorial": "Tutorial",
    "How-to guides": "How-to guide",
    "Reference": "Reference",
    "Explanation": "Explanation",
}
INDEX = PROJECT_ROOT / "docs" / "README.md"


def test_the_index_lists_every_page_under_the_kind_that_it_names() -> None:
    listed: dict[str, str] = {}
    for part in INDEX.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, entries = part.partition("\n")
        listed |= dict.fromkeys(re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\)", entries, re.MULTILINE), KINDS[heading])
    pages = {page.name: page.read_text(encoding="utf-8") for page in INDEX.parent.glob("*.md") if page != INDEX}
    assert listed.keys() == pages.keys()
    for name, text in pages.items():
        kind = re.search(r"^\*([\w -]+)\.\*", text, re.MULTILINE)
        assert kind is not None, f"{name} does not say its kind"
        assert kind[1] == listed[name], name


# ------------------------------------------------------------------ examples


@each_document
def test_every_python_example_compiles(document: Path) -> None:
    for block in python_blocks(document):
        compile(block, document.name, "exec")


def test_the_worked_example_of_the_offset_metadata_is_true() -> None:
    (block,) = python_blocks(PROJECT_ROOT / "docs" / "architecture.md")
    exec(compile(block, "architecture.md", "exec"), {})  # noqa: S102 - our own document


def test_the_readme_uses_public_names_only() -> None:
    (block,) = python_blocks(README)
    tree = ast.parse(block)
    imported = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names]
    assert imported
    assert {name.name for name in imported} <= set(fairlane.__all__)
    allowed = {
        "Client": inspect.signature(fairlane.Client).parameters.keys(),
        "submit": RequestFields.__annotations__.keys(),
        "result": inspect.signature(fairlane.Handle.result).parameters.keys(),
    }
    calls = {name_of(node): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls.keys() == {*allowed, "print"}
    for name, known in allowed.items():
        assert {keyword.arg for keyword in calls[name].keywords} <= known
    for record, of in ((fairlane.InferenceReply, "reply"), (fairlane.Rejected, "refusal")):
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_name(node.value, of)}
        assert used
        assert used <= set(dir(record)), of


def name_of(call: ast.Call) -> str:
    """The name of the function or method that is called."""
    assert isinstance(call.func, ast.Attribute | ast.Name)
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


# ------------------------------------------------------------------ decisions


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("document", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_a_page_in_four_parts(document: Path) -> None:
    text = document.read_text()
    assert text.startswith(f"# {document.name[:4]} ")
    parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert parts == ["Context", "Decision", "Rejected", "What would change our mind"]
    assert len(text.splitlines()) <= 60
