"""Answers after their checks: nothing twice, nothing around, and JSON that satisfies its schema."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.guardrail_records import PostProcessing
from inference_consumers.guardrails.check import CheckContext, Processed
from inference_consumers.guardrails.post_processing import (
    MOST_REPAIRED_CHARACTERS,
    FormatError,
    PostProcessor,
    conforming_json,
    deduplicated,
    post_processed,
    trimmed,
)
from tests.kit.cpu_time import cpu_time

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}, "age": {"type": "integer"}},
        "required": ["age"],
    }
)
ANYTHING = "{}"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def test_all_steps_are_done_in_order_and_named() -> None:
    sentence = "Here is the age that you wanted. "
    wanted = PostProcessing(deduplicate=True, trim=True, json_schema=SCHEMA)
    done = post_processed(f'  {sentence * 2}{{"age": 3,}}  ', wanted)
    assert done == Processed('{"age": 3}', ("deduplicated", "trimmed", "json_repaired"), is_put_together=True)
    assert post_processed('  {"age": 3}  ', wanted) == Processed('{"age": 3}', ("trimmed",))
    assert post_processed("  as it was ", PostProcessing()) == Processed("  as it was ")


def test_json_in_its_format_keeps_its_equal_lines() -> None:
    line = '  "the same long item of a list"'
    text = f"[\n{line},\n{line},\n{line}\n]"
    wanted = PostProcessing(deduplicate=True, json_schema='{"type": "array", "minItems": 3}')
    assert deduplicated(text) != text
    assert post_processed(text, wanted) == Processed(text)


def test_each_text_of_a_call_gets_its_answer() -> None:
    context = CheckContext(post_processing=PostProcessing(trim=True, json_schema=SCHEMA))
    answers = PostProcessor().process([' {"age": 3}', '{"age": "secret"}'], context)
    refusal = "the schema's properties/age/type is not satisfied"
    assert answers == [Processed('{"age": 3}', ("trimmed",)), Processed(refusal=refusal)]


def test_sentences_and_loops_are_there_once() -> None:
    sentence = "I am happy to help you with that. "
    assert deduplicated(f"{sentence * 2}Anything else?") == f"{sentence}Anything else?"
    assert deduplicated(f"{sentence * 9}Anything else?") == f"{sentence}Anything else?"
    assert deduplicated("No. No. Never.") == "No. No. Never."
    line = "- the same long item of a list\n"
    assert deduplicated(line * 2 + "- another\n") == line + "- another\n"


@given(st.text(max_size=200))
def test_nothing_is_added(text: str) -> None:
    assert len(deduplicated(text)) <= len(text)
    assert trimmed(trimmed(text)) == trimmed(text)
    assert "".join(trimmed(text).split()) == "".join(text.split())


def test_space_around_and_at_ends_of_lines_is_cut() -> None:
    assert trimmed("\n  a  \n\n\n\n\n\n  b\t\n") == "a\n\n\n  b"


@given(json_values)
def test_valid_json_is_as_it_was(value: object) -> None:
    text = json.dumps(value)
    assert conforming_json(text, ANYTHING) == text


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ('```json\n{"age": 3,}\n```', {"age": 3}),
        ("Sure, here it is:\n```\n{'age': 3}\n```\nAnything else?", {"age": 3}),
        ("{age: 3, 'name': 'aa'", {"age": 3, "name": "aa"}),
        ('{"age": 3} // three', {"age": 3}),
        ('{"name": "aa", "age": 3', {"name": "aa", "age": 3}),
    ],
)
def test_broken_json_is_repaired(text: str, repaired: object) -> None:
    assert json.loads(conforming_json(text, SCHEMA)) == repaired


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"age": "forty-two"}', "the schema's properties/age/type is not satisfied"),
        ('{"name": "secret", "age": 1}', "the schema's properties/name/pattern is not satisfied"),
        ('{"name": "aa"}', "the schema's required is not satisfied"),
        ("I cannot say.", "not JSON"),
        ("", "not JSON"),
        # Not JSON, or repaired to a list: that depends on the depth of the stack.
        ("[" * 5_000, ""),
        ('{"a" ' * MOST_REPAIRED_CHARACTERS, "too long to be repaired"),
    ],
)
def test_what_does_not_fit_is_refused_without_quoting_it(text: str, reason: str) -> None:
    with pytest.raises(FormatError) as refused:
        conforming_json(text, SCHEMA)
    assert reason in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "forty" not in str(refused.value)


def test_nan_is_not_json() -> None:
    with pytest.raises(FormatError):
        conforming_json("NaN", '{"type": "number"}')


def test_spaces_within_a_line_take_linear_time() -> None:
    text = "a" + " \t" * 30_000 + "b"
    with cpu_time() as time:
        assert trimmed(f"{text} \t\nc \n") == f"{text}\nc"
    assert time.spent_s < 0.5


@pytest.mark.parametrize("name", ["a" * 5_000, "a" * 5_000 + "b"])
def test_patterns_of_schemas_take_linear_time(name: str) -> None:
    with cpu_time() as time:
        if name.endswith("b"):
            with pytest.raises(FormatError):
                conforming_json(json.dumps({"name": name, "age": 1}), SCHEMA)
        else:
            conforming_json(json.dumps({"name": name, "age": 1}), SCHEMA)
    assert time.spent_s < 2
