"""What an answer is asked for by, and which answers are kept."""

from dataclasses import fields, replace
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, GuardrailVerdict
from fairlane.outcomes import Degradation, FinishReason, Outcome, RetrievalMode, RetrievalReason, Task
from fairlane.records import (
    InferenceRequest,
    LabelScore,
    Message,
    Output,
    Parameters,
    PassageReference,
    RequestInput,
    Retrieval,
    RetrievalUse,
    TokenLogprob,
    TokenUsage,
    TopLogprob,
)
from fairlane_server.caching.responses import (
    MOST_QUESTION_CHARACTERS,
    answer_of,
    decode_answer,
    distinctive_words,
    encode_answer,
    response_key,
    semantic_group,
    semantic_query,
    word_digests,
)
from tests.kit.cache_kit import MODEL_VERSION, reply, request, work
from tests.kit.cache_strategies import hostile, tenants

ASKED_IN = request(retrieval=Retrieval("manuals", 4))
IN_VERSION_7 = RetrievalUse("manuals", RetrievalMode.HYBRID, None, 7)

# What may differ between two requests with one answer.
NOT_IN_THE_KEY = {
    "request_id",
    "priority",
    "timeout_ms",
    "tenant",
    "reply_to",
    "metadata",
    "requested_by",
    "group",
    "replay_of",
    "cache",
}
# What makes an answer one of its kind.
NEVER_ASKED_AGAIN = {"conversation_id", "conversation_after"}
IN_THE_KEY: dict[str, Any] = {
    "model": "other",
    "task": Task.EMBED,
    "input": RequestInput(prompt="Which wire goes left?"),
    "parameters": Parameters(max_tokens=3),
    "retrieval": Retrieval("manuals", 5),
}
PARAMETERS_IN_THE_KEY: dict[str, Any] = {
    "max_tokens": 3,
    "top_p": 0.5,
    "stop": ("\n",),
    "seed": 1,
    "logprobs": 0,
}
INPUTS: dict[str, Any] = {
    "messages": (Message("user", "text"),),
    "prompt": "text",
    "texts": ("text",),
    "query": "text",
    "documents": ("text",),
    "image": b"text",
}


def test_every_field_of_a_request_is_decided_about() -> None:
    assert {field.name for field in fields(InferenceRequest)} == NOT_IN_THE_KEY | NEVER_ASKED_AGAIN | set(IN_THE_KEY)
    # Streamed or not, the text is the same. The temperature is 0 in all that have a key.
    assert {field.name for field in fields(Parameters)} == set(PARAMETERS_IN_THE_KEY) | {"stream", "temperature"}
    assert {field.name for field in fields(RequestInput)} == set(INPUTS)
    assert {field.name for field in fields(Retrieval)} == {"collection", "top_k", "mode"}


def test_every_field_that_counts_makes_another_key() -> None:
    made = [response_key("acme", ASKED_IN, MODEL_VERSION, 7)]
    made += [response_key("acme", replace(ASKED_IN, **{name: to}), MODEL_VERSION, 7) for name, to in IN_THE_KEY.items()]
    for name, to in PARAMETERS_IN_THE_KEY.items():
        changed = replace(ASKED_IN, parameters=replace(ASKED_IN.parameters, **{name: to}))
        if changed.parameters != IN_THE_KEY["parameters"]:
            made.append(response_key("acme", changed, MODEL_VERSION, 7))
    for name, to in INPUTS.items():
        made.append(response_key("acme", replace(ASKED_IN, input=RequestInput(**{name: to})), MODEL_VERSION, 7))
    for wanted in (Retrieval("manual", 4), Retrieval("manuals", 4, RetrievalMode.VECTOR)):
        made.append(response_key("acme", replace(ASKED_IN, retrieval=wanted), MODEL_VERSION, 7))
    made.append(response_key("acme", replace(ASKED_IN, retrieval=None), MODEL_VERSION, None))
    made.append(response_key("acme", ASKED_IN, "4", 7))
    made.append(response_key("acme", ASKED_IN, MODEL_VERSION, 8))
    made.append(response_key("globex", ASKED_IN, MODEL_VERSION, 7))
    other_system = (Message("system", "Be long."), Message("user", "Which wire goes left?"))
    made.append(response_key("acme", replace(ASKED_IN, input=RequestInput(other_system)), MODEL_VERSION, 7))
    assert None not in made
    assert len(set(made)) == len(made)


def test_what_does_not_count_makes_none() -> None:
    same = replace(
        ASKED_IN,
        request_id="id-2",
        priority="high",
        timeout_ms=7,
        reply_to="replies.acme.web",
        metadata={"a": "b"},
        group="g",
        parameters=Parameters(stream=True, temperature=-0.0),
    )
    assert response_key("acme", same, MODEL_VERSION, 7) == response_key("acme", ASKED_IN, MODEL_VERSION, 7)


def test_metadata_counts_where_the_input_is_checked() -> None:
    """An answer is given again without a check: only to a request whose every text was checked."""
    checked = GuardrailPolicy(input=(GuardrailRule("secrets", "block", "closed"),))
    answers = GuardrailPolicy(output=checked.input)
    metadata: list[dict[str, str]] = [{}, {"a": "b"}, {"a": "c"}, {"ab": ""}, {"a": "b", "c": "d"}]
    asked = [replace(ASKED_IN, metadata=one) for one in (*metadata, {"c": "d", "a": "b"})]
    keys = [response_key("acme", one, MODEL_VERSION, 7, checked) for one in asked]
    assert None not in keys
    assert len(set(keys)) == len(metadata), "their order does not count"
    assert len({response_key("acme", one, MODEL_VERSION, 7, answers) for one in asked}) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"parameters": Parameters(temperature=0.1)},
        {"parameters": Parameters(temperature=nan)},
        {"conversation_id": "c-1"},
        {"retrieval": Retrieval("manuals", 4, RetrievalMode.CACHED)},
    ],
)
def test_what_is_not_the_same_the_next_time_has_no_key(changed: dict[str, Any]) -> None:
    asked = replace(ASKED_IN, **changed)
    assert response_key("acme", asked, MODEL_VERSION, 7) is None
    assert semantic_group("acme", asked, MODEL_VERSION, 7, "static") is None


def test_without_the_version_of_the_collection_there_is_no_key() -> None:
    assert response_key("acme", ASKED_IN, MODEL_VERSION, None) is None
    assert semantic_group("acme", ASKED_IN, MODEL_VERSION, None, "static") is None


@given(tenants, tenants, hostile, hostile)
def test_two_tenants_share_no_answer(one: str, other: str, text: str, system: str) -> None:
    assume(one != other)
    asked = request(input=RequestInput((Message("system", system), Message("user", text))))
    assert response_key(one, asked, "1", None) != response_key(other, asked, "1", None)
    if text:
        groups = [semantic_group(tenant, asked, "1", None, "static") for tenant in (one, other)]
        assert None not in groups
        assert groups[0] != groups[1]


@given(st.lists(st.tuples(hostile, hostile), max_size=4), st.lists(st.tuples(hostile, hostile), max_size=4))
def test_turns_do_not_run_into_one_another(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    assume(one != other)

    def key(turns: list[tuple[str, str]]) -> object:
        return response_key("acme", request(input=RequestInput(tuple(Message(*turn) for turn in turns))), "1", None)

    assert key(one) != key(other)


# --- semantic groups


def group_of(asked: InferenceRequest, version: str = MODEL_VERSION, collection: int = 7, by: str = "static") -> object:
    return semantic_group("acme", asked, version, collection, by)


def test_a_group_differs_in_the_last_question_alone() -> None:
    asked = replace(request("Which wire goes left?"), retrieval=Retrieval("manuals", 4))
    alike = replace(request("What wire is on the left?"), retrieval=Retrieval("manuals", 4), request_id="id-2")
    assert group_of(asked) == group_of(alike)
    question = Message("user", "Which wire goes left?")
    others = [
        group_of(replace(asked, model="other")),
        group_of(asked, version="4"),
        group_of(asked, collection=8),
        group_of(asked, by="pool"),
        group_of(replace(asked, input=RequestInput((Message("system", "Be long."), question)))),
        group_of(replace(asked, input=RequestInput((question,)))),
        group_of(replace(asked, input=RequestInput((Message("user", "Hello"), question)))),
        group_of(replace(asked, input=RequestInput(prompt=question.content))),
        group_of(replace(asked, parameters=Parameters(max_tokens=3))),
        group_of(replace(asked, retrieval=Retrieval("manuals", 5))),
        group_of(replace(asked, retrieval=Retrieval("other", 4))),
        semantic_group("globex", asked, MODEL_VERSION, 7, "static"),
    ]
    assert None not in others
    assert len({group_of(asked), *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("given_input", "task", "query"),
    [
        (RequestInput((Message("user", "a"), Message("user", "b"))), Task.GENERATE, "b"),
        (RequestInput(prompt="p"), Task.GENERATE, "p"),
        (RequestInput((Message("user", "a"), Message("assistant", "b"))), Task.GENERATE, None),
        (RequestInput((Message("user", ""),)), Task.GENERATE, None),
        (RequestInput(()), Task.GENERATE, None),
        (RequestInput((Message("user", "a"),), prompt="p"), Task.GENERATE, None),
        (RequestInput(prompt=""), Task.GENERATE, None),
        (RequestInput(texts=("a",)), Task.EMBED, None),
        (RequestInput(prompt="p"), Task.RANK, None),
    ],
)
def test_only_a_question_has_a_meaning(given_input: RequestInput, task: Task, query: str | None) -> None:
    asked = request(input=given_input, task=task)
    assert semantic_query(asked) == query
    assert (semantic_group("acme", asked, "1", None, "static") is None) == (query is None)


# --- what is kept

WORK = work(ASKED_IN, retrieval_use=IN_VERSION_7)


def test_an_answer_is_kept_under_the_key_that_it_is_asked_for_by() -> None:
    passages = (PassageReference("manuals/a#0", 0.5),)
    made = reply(WORK, passages=passages, usage=TokenUsage(10, 3), engine="torch", finish_reason=FinishReason.STOP)
    stored = answer_of(WORK, made)
    assert stored is not None
    key, answer = stored
    assert key == response_key("acme", ASKED_IN, MODEL_VERSION, 7)
    assert (answer.output, answer.passages, answer.usage) == (made.output, passages, TokenUsage(10, 3))
    assert (answer.request_id, answer.engine, answer.finish_reason) == ("id-1", "torch", FinishReason.STOP)
    assert decode_answer(encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "changed",
    [
        {"outcome": Outcome.FAILED},
        {"outcome": Outcome.EXPIRED},
        {"output": None},
        {"replayed": True},
        {"degradations": (Degradation.FEWER_PASSAGES,)},
        {"model": "smaller"},
        {"model_version": "4"},
        {"model_version": None},
        {"tenant": "globex"},
        {"request_id": "id-2"},
        {"output": Output(scores=(1.0, nan))},
        {"output": Output(embeddings=((1.0,), (inf,)))},
        {"output": Output(labels=(LabelScore("a", nan),))},
        {"output": Output(text="a", logprobs=(TokenLogprob("a", nan),))},
        {"output": Output(text="a", logprobs=(TokenLogprob("a", -1.0, (TopLogprob("b", -inf),)),))},
        {"passages": (PassageReference("p", nan),)},
    ],
    ids=str,
)
def test_an_answer_that_an_undisturbed_run_would_not_give_again_is_not_kept(changed: dict[str, Any]) -> None:
    assert answer_of(WORK, reply(WORK)) is not None
    assert answer_of(WORK, reply(WORK, **changed)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"degradations": (Degradation.CAPPED_MAX_TOKENS,)},
        {"retrieval_use": None},
        {"retrieval_use": replace(IN_VERSION_7, reason=RetrievalReason.LATE)},
        {"retrieval_use": replace(IN_VERSION_7, mode=RetrievalMode.VECTOR)},
        {"retrieval_use": replace(IN_VERSION_7, collection="other")},
        {"retrieval_use": replace(IN_VERSION_7, collection_version=None)},
    ],
    ids=str,
)
def test_work_that_got_less_than_it_asked_for_is_not_kept(changed: dict[str, Any]) -> None:
    degraded = replace(WORK, **changed)
    assert answer_of(degraded, reply(degraded)) is None


def test_an_answer_drawn_by_chance_is_not_kept() -> None:
    drawn = work(request(parameters=Parameters(temperature=0.7)))
    assert answer_of(drawn, reply(drawn)) is None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_answer(payload: bytes) -> None:
    assert decode_answer(payload) is None


def test_numbers_that_are_none_are_no_answer() -> None:
    stored = answer_of(WORK, reply(WORK, output=Output(scores=(1.0,))))
    assert stored is not None
    plain = msgspec.to_builtins(stored[1])
    assert decode_answer(msgspec.msgpack.encode(plain)) == stored[1]
    for poison in (nan, inf, -inf, "1", None):
        plain["output"]["scores"] = [1.0, poison]
        assert decode_answer(msgspec.msgpack.encode(plain)) is None
    nested = b"\x91" * 100_000 + b"\xc0"
    assert decode_answer(b"\x81\xa1x" + nested) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What is the capital of France?", ("france",)),
        ("what's the capital of france", ()),
        ("Is smoking not allowed? It isn't.", ("not", "isn't")),
        ("It isn\u2019t here", ("isn't",)),
        ("Revenue in 2023, or 3.5 %?", ("2023", "3.5")),
        ("I'm here. Where am I?", ()),
        ("  Where is Bern?\nIs v2 out? (Is NASA?)", ("bern", "v2", "nasa")),
        ("From Bern to Basel", ("bern", "basel")),
        ("From Basel to Bern", ("basel", "bern")),
        ("", ()),
    ],
)
def test_numbers_names_and_negations_are_told_apart(text: str, words: tuple[str, ...]) -> None:
    assert distinctive_words(text) == words


@pytest.mark.parametrize("other", ["Revenue in 2024?", "No revenue in 2023?", "Revenue in 2023 of ACME?"])
def test_what_hangs_on_another_word_is_of_another_group(other: str) -> None:
    groups = [
        semantic_group(
            "acme",
            InferenceRequest("id", "words", "generate", RequestInput(prompt=text)),
            "1",
            None,
            "static",
        )
        for text in ("Revenue in 2023?", "The revenue in 2023?", other)
    ]
    assert groups[0] == groups[1] != groups[2]


def test_a_long_question_means_nothing_for_sure() -> None:
    """And costs nothing to find that out."""
    for prompt, is_question in (("a" * MOST_QUESTION_CHARACTERS, True), ("a" * (MOST_QUESTION_CHARACTERS + 1), False)):
        assert (semantic_query(InferenceRequest("id", "words", "generate", RequestInput(prompt=prompt))) is None) is (
            not is_question
        )


@pytest.mark.parametrize(
    ("one", "other", "same_words", "same_order"),
    [
        ("From A to B?", "from a to b", True, True),
        ("from a to b", "from b to a", True, False),
        ("from a to b", "from a to c", False, False),
    ],
)
def test_wording_tells_words_and_order(one: str, other: str, same_words: bool, same_order: bool) -> None:
    (words, order), (other_words, other_order) = word_digests(one), word_digests(other)
    assert (words == other_words, order == other_order) == (same_words, same_order)


@pytest.mark.parametrize("number", [-1, 2**53 + 1, 2**63])
def test_an_answer_with_numbers_that_cannot_be_is_none(number: int) -> None:
    done = work(request())
    found = answer_of(done, reply(done))
    assert found is not None
    _, answer = found
    assert decode_answer(encode_answer(answer)) == answer
    assert decode_answer(encode_answer(replace(answer, usage=TokenUsage(number, 1)))) is None
    assert decode_answer(encode_answer(replace(answer, finished_at_ms=number))) is None


BLOCKS = GuardrailPolicy(input=(GuardrailRule("secrets", "block", "closed"),))
LOOKS_AT_ANSWERS = GuardrailPolicy(output=(GuardrailRule("pii", "redact", "closed"),))


def test_an_answer_given_under_one_policy_is_not_given_under_another() -> None:
    policies = (None, BLOCKS, LOOKS_AT_ANSWERS)
    keys = [response_key("acme", request(), MODEL_VERSION, None, policy) for policy in policies]
    assert len(set(keys)) == len(policies)
    kept = answer_of(work(request(), guardrails=BLOCKS), reply(work(request())))
    assert kept is not None
    assert kept[0] == keys[1]


def test_what_is_asked_is_checked_before_another_question_answers_it() -> None:
    groups = [
        semantic_group("acme", request(), MODEL_VERSION, None, "static", policy)
        for policy in (None, BLOCKS, LOOKS_AT_ANSWERS)
    ]
    assert groups[1] is None
    assert None not in (groups[0], groups[2])
    assert groups[0] != groups[2]


def test_an_answer_keeps_its_verdicts_and_one_that_was_not_checked_is_not_kept() -> None:
    passed = GuardrailVerdict("output", "pii", "redacted", ("PERSON",))
    kept = answer_of(work(request()), replace(reply(work(request())), guardrails=(passed,)))
    assert kept is not None
    assert kept[1].guardrails == (passed,)
    assert decode_answer(encode_answer(kept[1])) == kept[1]
    unchecked = GuardrailVerdict("input", "pii", "failed_open")
    assert answer_of(work(request()), replace(reply(work(request())), guardrails=(passed, unchecked))) is None
