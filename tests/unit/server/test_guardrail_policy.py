"""What a policy of guardrails may ask for, as read from a file and from a record; and its digest."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, PostProcessing
from fairlane.outcomes import GuardrailAction, GuardrailFailure
from fairlane.records import TenantSpec
from fairlane_server.control.last_good import LastGood
from fairlane_server.control.tenants_file import load_tenants
from fairlane_server.guardrail_policy import (
    MOST_CHARACTERS,
    MOST_DENIED_WORDS,
    MOST_PATTERN_CHARACTERS,
    MOST_PATTERNS,
    MOST_SCHEMA_CHARACTERS,
    PolicyError,
    active_policy,
    check_policy,
    default_failure,
    policy_digest,
)
from fairlane_server.yaml_config import ConfigError
from stream_processors.dispatcher.registry import check_tenant

SECRETS = GuardrailRule("secrets", "block", "closed")
PATTERNS = GuardrailRule("patterns", "log", "open")
PROCESSING = PostProcessing(trim=True, json_schema='{"type":"object"}')
POLICY = GuardrailPolicy((SECRETS, PATTERNS), (), ("project x[0-9]+",), ("unobtainium",), PROCESSING)


def load(tmp_path: Path, guardrails: str) -> GuardrailPolicy | None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants:\n  - tenant: acme\n    guardrails:\n{guardrails}")
    (spec,) = load_tenants(file)
    return spec.guardrails


def test_a_policy_is_read_with_every_field(tmp_path: Path) -> None:
    text = """\
      input:
        - {check: secrets, action: block}
        - {check: pii, action: redact, on_failure: open}
        - {check: prompt_injection, action: log}
        - {check: patterns, action: off}
      output: [{check: toxicity, action: block, on_failure: open}, {check: leaked_prompt, action: log}]
      patterns: ['project x[0-9]+']
      denied_words: [unobtainium]
      post_processing:
        deduplicate: true
        trim: true
        json_schema: {type: object, properties: {name: {type: string}}, additionalProperties: false}
        on_failure: open
"""
    assert load(tmp_path, text) == GuardrailPolicy(
        (
            SECRETS,
            GuardrailRule("pii", "redact", "open"),
            GuardrailRule("prompt_injection", "log", "open"),
            GuardrailRule("patterns", "off", "open"),
        ),
        (GuardrailRule("toxicity", "block", "open"), GuardrailRule("leaked_prompt", "log", "open")),
        ("project x[0-9]+",),
        ("unobtainium",),
        PostProcessing(
            deduplicate=True,
            trim=True,
            json_schema='{"type":"object","properties":{"name":{"type":"string"}},"additionalProperties":false}',
            on_failure="open",
        ),
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("{trim: true}", PostProcessing(trim=True, on_failure="open")),
        ("{deduplicate: true, on_failure: closed}", PostProcessing(deduplicate=True)),
        ("{json_schema: {}}", PostProcessing(json_schema="{}")),
    ],
)
def test_only_a_format_is_closed_by_default(tmp_path: Path, given: str, wanted: PostProcessing) -> None:
    assert load(tmp_path, f"      post_processing: {given}\n") == GuardrailPolicy(post_processing=wanted)


@pytest.mark.parametrize(
    ("guardrails", "line", "message"),
    [
        (
            "      before: []\n",
            4,
            "guardrails.before: unknown key; known here: denied_words, input, output, patterns, ",
        ),
        ("      input: secrets\n", 4, "guardrails.input: must be a list"),
        ("      input: [{check: secrets}]\n", 4, "guardrails.input[0]: missing: action"),
        ("      input: [{check: secret, action: block}]\n", 4, "guardrails.input[0].check: unknown check 'secret'"),
        (
            "      input:\n        - check: toxicity\n          action: log\n",
            5,
            "unknown check 'toxicity'; known: pii,",
        ),
        ("      output: [{check: prompt_injection, action: log}]\n", 4, "output[0].check: unknown check"),
        (
            "      input: [{check: pii, action: delete}]\n",
            4,
            "input[0].action: unknown action 'delete'; known: off, log",
        ),
        ("      input: [{check: pii, action: true}]\n", 4, "input[0].action: must be a string"),
        ("      input: [{check: pii, action: no}]\n", 4, "input[0].action: must be a string"),
        (
            "      input: [{check: pii, action: log, on_failure: ajar}]\n",
            *(4, "guardrails.input[0].on_failure: unknown on_failure 'ajar'; known: open, closed"),
        ),
        (
            "      input:\n        - {check: pii, action: log}\n        - {check: pii, action: block}\n",
            *(6, "guardrails.input[1].check: 'pii' appears twice"),
        ),
        (
            "      input: [{check: prompt_injection, action: redact}]\n",
            *(4, "action: 'prompt_injection' finds nothing to redact; these checks do: patterns, pii, secrets"),
        ),
        ("      input: [{check: patterns, action: log}]\n", 3, "the check patterns needs patterns or denied_words"),
        ("      patterns: [a]\n", 4, "guardrails.patterns: no rule of input or output has the check patterns"),
        ("      denied_words: [a]\n", 4, "guardrails.denied_words: no rule of input or output"),
        (
            "      input: [{check: patterns, action: log}]\n      patterns:\n        - ok\n        - '(?=a)b'\n",
            *(7, "guardrails.patterns[1]: not a pattern of RE2: invalid perl operator: (?="),
        ),
        ("      input: [{check: patterns, action: log}]\n      patterns: ['x*']\n", 5, "matches the empty text"),
        ("      input: [{check: patterns, action: log}]\n      denied_words: ['  ']\n", 5, "not only spaces"),
        ("      post_processing: trim\n", 4, "guardrails.post_processing: must be a mapping"),
        ("      post_processing: {trim: 1}\n", 4, "post_processing.trim: must be true or false, not 1"),
        ("      post_processing: {trim: false}\n", 4, "guardrails.post_processing: asks for nothing; possible: dedup"),
        ("      post_processing: {}\n", 4, "guardrails.post_processing: asks for nothing"),
        ("      post_processing: {trims: true}\n", 4, "post_processing.trims: unknown key; known here: deduplicate, "),
        ("      post_processing: {trim: true, on_failure: ajar}\n", 4, "on_failure: unknown on_failure 'ajar'"),
        ("      post_processing: {json_schema: true}\n", 4, "post_processing.json_schema: must be a mapping"),
        (
            "      post_processing:\n        trim: true\n        json_schema: {type: text}\n",
            *(6, "guardrails.post_processing.json_schema: not a JSON Schema that can be used: "),
        ),
        (
            "      post_processing: {json_schema: {$ref: 'https://example.org/s.json'}}\n",
            *(4, "guardrails.post_processing.json_schema: not a JSON Schema that can be used: Resource"),
        ),
        ("      post_processing: {json_schema: {const: 2026-01-31}}\n", 4, "json_schema: has a value that JSON does"),
        ("      post_processing: {json_schema: {const: .nan}}\n", 4, "json_schema: has a value that JSON does not"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, guardrails: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, guardrails)
    assert str(caught.value).startswith(f"{tmp_path}/tenants.yaml:{line}: ")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"patterns": ("a",) * (MOST_PATTERNS + 1)}, "guardrails.patterns: "),
        ({"patterns": ("a" * (MOST_PATTERN_CHARACTERS + 1),)}, "guardrails.patterns[0]: "),
        ({"denied_words": ("a",) * (MOST_DENIED_WORDS + 1)}, "guardrails.denied_words: "),
        ({"denied_words": ("a" * 101,)}, "guardrails.denied_words[0]: "),
        ({"denied_words": ("a" * 100,) * (MOST_CHARACTERS // 100 + 1)}, "guardrails.patterns: with the denied words"),
        ({"patterns": ("(?:x{1000}){1000}",)}, "guardrails.patterns[0]: not a pattern of RE2"),
        ({"input": (*POLICY.input, GuardrailRule("leaked_prompt", "log", "open"))}, "guardrails.input[2].check: "),
        ({"input": (replace(SECRETS, action="Block"), PATTERNS)}, "guardrails.input[0].action: "),
        ({"input": (replace(SECRETS, on_failure=""), PATTERNS)}, "guardrails.input[0].on_failure: "),
        ({"post_processing": PostProcessing()}, "guardrails.post_processing: asks for nothing"),
        ({"post_processing": replace(PROCESSING, on_failure="")}, "guardrails.post_processing.on_failure: "),
        ({"post_processing": replace(PROCESSING, json_schema="[]")}, "guardrails.post_processing.json_schema: must be"),
        (
            {"post_processing": replace(PROCESSING, json_schema=f'{{"title":"{"t" * MOST_SCHEMA_CHARACTERS}"}}')},
            f"guardrails.post_processing.json_schema: at most {MOST_SCHEMA_CHARACTERS} characters, not ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_record_of_another_writer_is_held_to_the_same_rules(changed: dict[str, Any], place: str) -> None:
    check_policy(POLICY)
    with pytest.raises(PolicyError) as caught:
        check_policy(replace(POLICY, **changed))
    assert str(caught.value).startswith(place)
    registry, good = LastGood(check_tenant, "tenant_unusable"), TenantSpec("acme", guardrails=POLICY)
    assert registry.usable({"acme": good}) == {"acme": good}
    assert registry.usable({"acme": replace(good, guardrails=replace(POLICY, **changed))}) == {"acme": good}


def test_only_what_would_be_noted_fails_open_by_default() -> None:
    opened = {action for action in GuardrailAction if default_failure(action) is GuardrailFailure.OPEN}
    assert opened == {GuardrailAction.OFF, GuardrailAction.LOG}


def test_a_policy_with_everything_off_is_none() -> None:
    off = replace(PATTERNS, action="off")
    assert active_policy(None) is None
    assert active_policy(replace(POLICY, input=(off,), post_processing=None)) is None
    assert active_policy(replace(POLICY, input=(off,))) == replace(POLICY, input=())
    assert active_policy(replace(POLICY, input=(off, SECRETS))) == replace(POLICY, input=(SECRETS,))
    assert active_policy(POLICY) == POLICY


def test_every_field_of_a_policy_is_in_its_digest() -> None:
    changed: dict[str, Any] = {
        "input": POLICY.input[::-1],
        "output": (SECRETS,),
        "patterns": (),
        "denied_words": (*POLICY.denied_words, "adamant"),
        "post_processing": None,
    }
    assert changed.keys() == {field.name for field in fields(GuardrailPolicy)}
    policies = [POLICY, *(replace(POLICY, **{name: value}) for name, value in changed.items())]
    policies += [replace(POLICY, input=(replace(SECRETS, on_failure="open"), PATTERNS))]
    policies += [replace(POLICY, post_processing=replace(PROCESSING, json_schema='{"type":"array"}'))]
    assert len({policy_digest(policy) for policy in policies}) == len(policies)
    assert policy_digest(replace(POLICY)) == policy_digest(POLICY)
