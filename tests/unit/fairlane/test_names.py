"""Names under TOPIC_PREFIX: every topic, group and transactional id begins with it, and no two prefixes share one."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.layout import PROJECT_ROOT
from fairlane import names
from fairlane_server.topics.families import load_families

PREFIXES = ("", "staging.", "team-a.staging.", "staging-", "x")
NO_NAMES = {
    *("valid_topic_prefix", "tenant_of_chunks", "tenant_of_request_topic", "pool_of_priority"),
    "EVALUATION_TENANT",
}
FIRST_PARTS = sorted({family.name.partition(".")[0] for family in load_families()})


def names_with(prefix: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a process with this TOPIC_PREFIX has it."""
    monkeypatch.setenv("TOPIC_PREFIX", prefix)
    spec = importlib.util.spec_from_file_location("names_with_prefix", names.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def all_names(module: ModuleType) -> dict[str, str]:
    """Every topic, group and transactional id that the module makes, by what makes it."""
    functions: dict[str, str] = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith(("_", "is_", "may_")) and name not in NO_NAMES:
            made = function(*("x" for _ in inspect.signature(function).parameters))
            functions |= {name: made} if isinstance(made, str) else {f"{name} {n}": one for n, one in enumerate(made)}
    constants = {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}
    return functions | {
        name: value for name, value in constants.items() if not name.startswith("_") and name not in NO_NAMES
    }


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_name_begins_with_the_prefix_and_is_otherwise_the_same(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, prefixed = all_names(names_with("", monkeypatch)), all_names(names_with(prefix, monkeypatch))
    assert len(plain) > 30
    assert prefixed == {name: prefix + value for name, value in plain.items()}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_parsers_read_what_the_same_process_writes(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = names_with(prefix, monkeypatch)
    assert made.tenant_of_request_topic(made.requests_topic("acme")) == "acme"
    assert made.tenant_of_request_topic(made.backfill_topic("acme")) == "acme"
    assert made.tenant_of_chunks(made.chunks_topic("acme")) == "acme"
    assert made.pool_of_priority(made.priority_topic("generate", "high")) == ("generate", "high")
    assert made.is_priority(made.priority_topic("generate", "high"))
    assert made.is_returned(made.returned_topic("generate"))
    assert made.is_backfill(made.backfill_topic("acme"))
    assert made.is_replies_of(made.replies_topic("acme", "billing"), "acme")
    assert not made.is_replies_of(made.replies_topic("acme", "billing"), "acm")
    read = [made.requests_topic("acme"), made.backfill_topic("acme"), made.returned_topic("generate")]
    assert all(map(made.is_read_by_dispatchers, read))
    replies = [made.replies_topic("acme"), made.replies_topic("acme", "billing"), *made.SHARED_REPLIES]
    assert all(map(made.is_replies, replies))
    ledgers = [made.LEDGER_USAGE, made.LEDGER_AUDIT, made.LEDGER_FEEDBACK]
    recorded = [*replies, *ledgers, made.CONTROL_TENANTS, made.CONTROL_MODELS]
    assert all(any(re.search(pattern, topic) for pattern in made.RECORDED_TOPICS) for topic in recorded)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("other", PREFIXES)
def test_parsers_refuse_the_topics_of_another_prefix(prefix: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if prefix == other:
        return
    made, others = names_with(prefix, monkeypatch), names_with(other, monkeypatch)
    for topic in (*all_names(others).values(), others.replies_topic("acme", "billing")):
        assert not any(
            is_one(topic)
            for is_one in (made.is_read_by_dispatchers, made.is_priority, made.is_returned, made.is_backfill)
        )
        assert not made.is_replies(topic)
        assert not made.may_carry_replies_of(topic, "x")
        assert not any(re.search(pattern, topic) for pattern in made.RECORDED_TOPICS)
        for parse in (made.tenant_of_request_topic, made.pool_of_priority):
            with pytest.raises(ValueError, match="is no"):
                parse(topic)


def test_the_first_parts_that_a_prefix_must_not_hold_are_those_of_all_topics() -> None:
    assert sorted(names._FIRST_PARTS) == FIRST_PARTS


@given(
    one=st.text("ab.-", max_size=4) | st.sampled_from(PREFIXES),
    more=st.text("ab.-", max_size=3),
    word=st.sampled_from(FIRST_PARTS),
    end=st.sampled_from(("", ".", "-", ".x.")),
)
def test_no_topic_of_one_prefix_begins_like_those_of_another(one: str, more: str, word: str, end: str) -> None:
    other = one + more + word + end
    try:
        names.valid_topic_prefix(other)
    except ValueError:
        return
    beginnings = {f"{one}{first}." for first in FIRST_PARTS}
    assert not any(f"{other}{first}.x".startswith(tuple(beginnings)) for first in FIRST_PARTS)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("Staging.", "lower-case"),
        ("staging_", "lower-case"),
        ("staging/", "lower-case"),
        ("x" * 41, "at most 40 characters"),
        ("replies.", "must not contain 'replies.'"),
        ("a-dead-letter.b.", "must not contain 'dead-letter.'"),
    ],
)
def test_an_invalid_prefix_is_refused_with_its_reason(prefix: str, reason: str) -> None:
    with pytest.raises(ValueError, match="^TOPIC_PREFIX is .*" + re.escape(reason)):
        names.valid_topic_prefix(prefix)


def test_a_process_with_an_invalid_prefix_does_not_start() -> None:
    command = (sys.executable, "-c", "import fairlane.names")
    environment = {**os.environ, "TOPIC_PREFIX": "Staging"}
    ended = subprocess.run(
        command, env=environment, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ValueError: TOPIC_PREFIX is 'Staging': it may have at most 40")
