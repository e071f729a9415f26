"""``.env.example`` and ``docs/settings.md`` are what the settings and docker-compose.yml make them."""

import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, SecretStr

from deploy.local.layout import PROJECT_ROOT
from deploy.settings_docs import (
    COMPOSE_FILE,
    COMPOSE_VARIABLES,
    ENV_EXAMPLE,
    SETTINGS_PAGE,
    STORAGE_VARIABLES,
    Variable,
    env_example,
    main,
    read_compose,
    setting_variables,
    settings_page,
    stale,
)
from fairlane.settings import KafkaSettings, Settings

COMPOSE = read_compose(COMPOSE_FILE.read_text(encoding="utf-8"))
SETTINGS = {variable.name for variable in setting_variables()}


def names_in(text: str) -> list[str]:
    return re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", text, re.MULTILINE)


def test_the_files_are_up_to_date() -> None:
    assert stale() == (), "run `python -m deploy.settings_docs`"


def test_every_setting_and_every_variable_of_compose_is_in_the_example_once() -> None:
    named = names_in((PROJECT_ROOT / ENV_EXAMPLE).read_text(encoding="utf-8"))
    assert len(set(named)) == len(named)
    assert set(named) == SETTINGS | {variable.name for variable in COMPOSE.variables} | STORAGE_VARIABLES.keys()


def test_every_setting_and_every_variable_of_compose_is_in_the_document_once() -> None:
    page = (PROJECT_ROOT / SETTINGS_PAGE).read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(named) == sorted([*SETTINGS, *STORAGE_VARIABLES, *(variable.name for variable in COMPOSE.variables)])


def test_only_what_is_needed_is_asked_for_and_the_example_gives_no_password() -> None:
    text = (PROJECT_ROOT / ENV_EXAMPLE).read_text(encoding="utf-8")
    asked = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))
    assert asked == {variable.name: "" for variable in COMPOSE.variables if variable.needed}
    assert {name for name in asked if not name.endswith("_PASSWORD")} == {"TORCH_INDEX_URL"}


def test_every_explained_variable_is_used_and_every_used_one_explained() -> None:
    assert {variable.name for variable in COMPOSE.variables} == COMPOSE_VARIABLES.keys()
    assert not COMPOSE_VARIABLES.keys() & SETTINGS
    with pytest.raises(KeyError, match="NOT_EXPLAINED"):
        read_compose("services: {a: {image: '${NOT_EXPLAINED:-b}'}}")


def test_a_setting_may_have_another_default_in_containers() -> None:
    compose = read_compose("services: {a: {image: b, environment: {FILES_URL: '${FILES_URL:-/elsewhere}'}}}")
    assert compose.defaults == {"FILES_URL": "/elsewhere"}
    assert not compose.variables
    assert "FILES_URL" not in compose.fixed
    assert re.search(r"^\| `FILES_URL` .*\| from .env, else `/elsewhere` \|$", settings_page(compose), re.MULTILINE)
    assert "; in containers /elsewhere\n# FILES_URL=.fairlane/files\n" in env_example(compose)


def test_an_uncommented_example_is_a_valid_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (PROJECT_ROOT / ENV_EXAMPLE).read_text(encoding="utf-8")
    given = re.findall(r"^# ([A-Z][A-Z0-9_]+)=(.+)$", text, re.MULTILINE)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    plain = Settings()
    for name, value in given:
        monkeypatch.setenv(name, value)
    assert Settings() == plain


def test_kinds_bounds_and_defaults_are_put_into_words() -> None:
    class Example(KafkaSettings):
        choice: Literal["a", "b"] = "a"
        """One of two."""
        maybe: Literal["a", "b"] | None = None
        """One of two, or none."""
        few: int = Field(3, ge=1, le=9)
        """A few."""
        rate: float = Field(1e6, gt=0)
        """A rate."""
        secret: SecretStr | None = None
        """A secret."""
        folder: Path = Path("a/b")
        """A folder."""

    made = {variable.name: variable for variable in setting_variables(Example)}
    assert made["CHOICE"] == Variable("CHOICE", "a", "a, b", "One of two")
    assert made["MAYBE"] == Variable("MAYBE", "", "a, b", "One of two, or none")
    assert made["FEW"] == Variable("FEW", "3", "whole number from 1 to 9", "A few")
    assert made["RATE"] == Variable("RATE", "1000000", "number above 0", "A rate")
    assert made["SECRET"] == Variable("SECRET", "", "text, secret", "A secret")
    assert made["FOLDER"] == Variable("FOLDER", "a/b", "path", "A folder")


def test_a_setting_without_a_description_is_refused() -> None:
    class Example(KafkaSettings):
        mute: int = 1

    with pytest.raises(ValueError, match="mute: no description"):
        setting_variables(Example)


def test_check_writes_nothing_and_says_what_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"], tmp_path) == 1
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.count("is stale: run `python -m deploy.settings_docs`") == 2
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    (tmp_path / SETTINGS_PAGE).write_text("something else", encoding="utf-8")
    assert stale(tmp_path) == (SETTINGS_PAGE,)
    assert main([], tmp_path) == 0
    assert stale(tmp_path) == ()
