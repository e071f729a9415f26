"""``fairlane models`` and ``fairlane routes`` on the control topic of a real broker."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.artifacts.digest import digest_of_folder
from fairlane_server.control.exclusive_change import ExclusiveChange
from fairlane_server.control.published_models import model_topic
from fairlane_server.models.changes import Author, with_alias
from tests.kit.artifact_kit import FILES, write_files
from tests.kit.command_kit import MODELS, Run, command_runner, edit, write_deployment
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.stub_registry import StubRegistry

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, f"models{uuid.uuid4().hex[:12]}") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, unique: str) -> Path:
    write_deployment(tmp_path, unique)
    return tmp_path


@pytest.fixture
def run(
    broker: str,
    tables: PostgresServer,
    folder: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    return command_runner(broker, tables.operator_dsn, folder, unique, monkeypatch, capsys)


def test_models_are_published_when_they_change(run: Run, folder: Path, unique: str) -> None:
    assert run("models", "list")[0] == 1, "no topic yet"
    code, applied, _ = run("models", "apply")
    assert (code, applied["published"]) == (0, ["tiny/1", "tiny"])
    assert {change["topic"] for change in applied["topics"]} == {
        f"{unique}.control.models",
        *(f"{unique}.priority.generate.{name}" for name in ("high", "normal", "low")),
    }
    edit(folder / "models.yaml", "max_output_tokens: 16", "max_output_tokens: 32")
    _, applied, complaints = run("models", "apply")
    assert (applied["topics"], applied["published"], complaints) == ([], ["tiny/1"], "")
    (listed,) = run("models", "list")[1]["models"]
    assert listed["max_output_tokens"] == 32
    edit(folder / "models.yaml", "pool: generate", "pool: generate\n    dedicated_pools: [own]")
    assert {change["topic"] for change in run("models", "apply")[1]["topics"]} == {
        f"{unique}.priority.own.{name}" for name in ("high", "normal", "low")
    }
    assert run("models", "list")[1]["models"][0]["dedicated_pools"] == ["own"]
    edit(folder / "models.yaml", "model: tiny", "model: small")
    _, applied, _ = run("models", "apply", "--delete")
    assert (applied["published"], applied["withdrawn"]) == (["small/1", "small"], ["tiny", "tiny/1"])


TWO_VERSIONS = MODELS + MODELS.removeprefix("models:\n").replace('"1"', '"2"').replace("path: tiny", "path: tiny-2")


def test_aliases_move_with_a_reason_and_a_file_leaves_them_alone_then(run: Run, folder: Path) -> None:
    run("models", "apply")
    (folder / "more.yaml").write_text(TWO_VERSIONS.replace('version: "2"', 'version: "2"\n    aliases: [champion]'))
    assert run("models", "register", str(folder / "more.yaml"))[1] == {"registered": ["tiny/1", "tiny/2"]}
    code, moved, _ = run("models", "alias", "tiny", "champion", "2", "--reason", "it is better")
    assert code == 0
    assert (moved["aliases"], moved["previous"], moved["revision"]) == ({"champion": "2"}, {"champion": "1"}, 2)
    assert (moved["reason"], moved["managed_by"]) == ("it is better", "api")
    code, again, _ = run("models", "alias", "tiny", "champion", "2")
    assert (code, again["revision"]) == (0, 2), "nothing changed"
    applied = run("models", "apply", "--delete")[1]
    assert (applied["published"], applied["withdrawn"], applied["foreign"]) == ([], [], ["tiny"])
    assert run("models", "apply", "--force")[1]["published"] == ["tiny"]
    (route,) = run("models", "list")[1]["routes"]
    assert (route["aliases"], route["managed_by"], route["revision"]) == ({"champion": "1"}, "file", 3)
    assert run("models", "diff", "tiny", "1", "2")[1]["path"] == {"1": "tiny", "2": "tiny-2"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("alias", "tiny", "candidate", "7"), "aliases.candidate: unknown version '7'; known: 1"),
        (("alias", "tiny", "Bad", "1"), "aliases: 'Bad' is no name"),
        (("alias", "other", "champion", "1"), "unknown version '1'; known: none"),
        (("stop", "tiny", "1"), "stopped: '1' is the champion"),
        (("stop", "tiny", "9"), "stopped: unknown version '9'"),
        (("stop", "other", "1"), "it has no route"),
        (("diff", "tiny", "1", "2"), "tiny has no version '2'; known: 1"),
    ],
)
def test_a_wrong_change_of_a_model_is_refused_with_the_reason(
    run: Run, arguments: tuple[str, ...], reason: str
) -> None:
    run("models", "apply")
    before = run("models", "list")[1]
    code, _, complaint = run("models", *arguments)
    assert code == 1
    assert reason in complaint
    assert run("models", "list")[1] == before


def test_a_version_never_changes_in_what_determines_its_answers(run: Run, folder: Path) -> None:
    run("models", "apply")
    edit(folder / "models.yaml", "path: tiny", "path: other")
    code, _, complaint = run("models", "apply")
    assert code == 1
    assert "version 1 of tiny is published with another path" in complaint


def test_a_version_is_registered_with_the_digest_of_its_files(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("MODELS_DIR", str(folder))
    origin = write_files(folder / "origin", FILES | {"requirements.txt": b"torch==2.13.0"})
    digest = digest_of_folder(origin)
    run("models", "apply")
    text = MODELS.replace('version: "1"', 'version: "2"\n    source: origin').replace("path: tiny", "path: weights")
    (folder / "more.yaml").write_text(text)
    register = ("models", "register", str(folder / "more.yaml"))
    expected = {"registered": ["tiny/2"], "artifact_digests": {"tiny/2": digest}}
    assert run(*register)[:2] == (0, expected)
    (made,) = (one for one in run("models", "list")[1]["models"] if one["version"] == "2")
    assert (made["source"], made["artifact_digest"]) == ("origin", digest)
    assert made["requirements"] == ["torch==2.13.0"]
    assert run(*register, "--digest", digest)[:2] == (0, expected), "may be repeated"

    (origin / "model.json").write_bytes(b"{}")
    code, _, complaint = run(*register)
    assert code == 1
    assert "version 2 of tiny is published with another artifact_digest" in complaint
    (folder / "more.yaml").write_text(text.replace('"2"', '"3"'))
    code, _, complaint = run(*register, "--digest", f"sha256:{'0' * 64}")
    assert code == 1
    assert f"and was registered with sha256:{'0' * 64}" in complaint

    # What the file of the consumers says of it later.
    both = text.replace("source: origin", f"source: origin\n    artifact_digest: {digest}")
    (folder / "models.yaml").write_text(
        MODELS.replace('"1"', '"1"\n    aliases: [champion]') + both.removeprefix("models:\n")
    )
    assert run("models", "apply")[1]["published"] == []


@pytest.mark.parametrize(
    ("more", "options", "reason"),
    [
        ("source: none", (), "version 2 of tiny: "),
        ("source: gs://bucket/x", (), "no such source; known: s3://, models:/ and folders"),
        ("source: models:/x/1", (), "models:/ needs MLFLOW_TRACKING_URI"),
        ("dtype: float32", ("--digest", f"sha256:{'0' * 64}"), "has no source"),
        ("source: none", ("--digest", "md5:1"), "must be sha256: and 64 hexadecimal digits"),
    ],
)
def test_a_version_whose_files_cannot_be_had_is_not_registered(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, more: str, options: tuple[str, ...], reason: str
) -> None:
    monkeypatch.setenv("MODELS_CACHE_DIR", str(folder / "cache"))
    (folder / "more.yaml").write_text(MODELS.replace('version: "1"', f'version: "2"\n    {more}'))
    code, _, complaint = run("models", "register", str(folder / "more.yaml"), *options)
    assert code == 1
    assert reason in complaint


SYNC = """\
models:
  - registered_model: m
    model: tiny
    version_prefix: r
    alias: candidate
    pool: generate
    engine: simulated
    tasks: [generate]
    path: .
    limits: {max_context_tokens: 128, max_output_tokens: 16}
"""


def test_new_versions_of_a_registry_are_registered_once(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a real MLflow server: tests/integration/test_mlflow_registry.py."""
    monkeypatch.setenv("MODELS_CACHE_DIR", str(folder / "cache"))
    (folder / "sync.yaml").write_text(SYNC)
    sync = ("models", "sync", str(folder / "sync.yaml"), "--once")
    assert "models:/ needs MLFLOW_TRACKING_URI" in run(*sync)[2]
    run("models", "apply")
    with closing(StubRegistry()) as registry:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.url)
        registry.answers["search"] = {"model_versions": [{"name": "m", "version": "3"}]}
        registry.answers["a"] = (200, b"x", {})
        code, report, _ = run(*sync)
        assert (code, report["registered"]) == (0, ["tiny/r3"])
        assert report["aliases"] == {"tiny@champion": "1", "tiny@candidate": "r3"}
        before = run("models", "list")[1]
        code, report, _ = run(*sync)
        assert (code, report["registered"], report["verified"]) == (0, [], ["tiny/r3"])
        registry.answers["a"] = (200, b"y", {})
        code, report, _ = run(*sync)
        assert (code, report["changed"]) == (1, ["tiny/r3"])
        assert run("models", "list")[1] == before
        registry.answers["search"] = (503, b"", {})
        code, report, _ = run(*sync)
        assert (code, report["is_away"], list(report["failed"])) == (1, True, ["tiny"])


RULES = """\
routes:
  - model: tiny
    rules:
      - rule: canary
        arms:
          - {arm: new, target: "2", percent: 5}
          - {arm: old, target: "@champion", percent: 95}
"""


def test_rules_are_planned_and_applied(run: Run, folder: Path) -> None:
    (folder / "models.yaml").write_text(TWO_VERSIONS.replace('version: "1"', 'version: "1"\n    aliases: [champion]'))
    run("models", "apply")
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    code, planned, _ = run("routes", "plan", str(rules))
    assert (code, [route["revision"] for route in planned["routes"]]) == (2, [2])
    assert run("models", "list")[1]["routes"][0]["rules"] == []
    code, applied, _ = run("routes", "apply", str(rules), "--reason", "canary")
    (route,) = applied["routes"]
    assert (code, route["reason"], [arm["percent"] for arm in route["rules"][0]["arms"]]) == (0, "canary", [5, 95])
    assert run("routes", "plan", str(rules))[0] == 0
    assert run("routes", "apply", str(rules))[1] == {"routes": []}
    edit(rules, "percent: 5}", "percent: 6}")
    code, _, complaint = run("routes", "apply", str(rules))
    assert code == 1
    assert "tiny: rules.canary: arms: the percentages add up to 101, not to 100" in complaint
    rules.write_text("routes:\n  - {model: tiny, rules: []}\n")
    assert run("routes", "apply", str(rules))[1]["routes"][0]["rules"] == []


def test_changes_that_run_at_once_follow_one_another(run: Run, broker: str, unique: str) -> None:
    """Each adds an alias to what it reads: none is lost."""
    settings = KafkaSettings(kafka_bootstrap_servers=broker)
    run("models", "apply")
    topic = model_topic(settings, default_codec())

    def add(number: int) -> None:
        author = Author("somebody", number)
        ExclusiveChange(settings, f"{unique}-model-changes").make(
            topic, lambda published: ([with_alias(published, "tiny", f"a{number}", "1", author)], ())
        )

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, range(6))) == [None] * 6
    (route,) = run("models", "list")[1]["routes"]
    assert route["aliases"] == {"champion": "1", **{f"a{number}": "1" for number in range(6)}}
    assert route["revision"] == 7


def test_no_version_is_withdrawn_that_an_alias_or_a_rule_names(run: Run, folder: Path) -> None:
    (folder / "models.yaml").write_text(TWO_VERSIONS.replace('version: "1"', 'version: "1"\n    aliases: [champion]'))
    run("models", "apply")
    run("models", "alias", "tiny", "tried", "2")
    (folder / "models.yaml").write_text(MODELS)
    code, _, complaint = run("models", "apply", "--delete")
    assert code == 1
    assert "tiny: aliases.tried: unknown version '2'; known: 1" in complaint
    assert run("models", "unalias", "tiny", "tried")[1]["aliases"] == {"champion": "1"}
    assert run("models", "apply", "--delete")[1]["withdrawn"] == ["tiny/2"]


def test_history_of_a_model_that_nobody_changed_is_empty(run: Run) -> None:
    assert run("models", "history", "tiny") == (0, {"changes": []}, "")
