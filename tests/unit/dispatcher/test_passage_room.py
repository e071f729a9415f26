"""Passages within a model's context, and what is looked for."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import InferenceRequest, Message, ModelVersion, Parameters, RequestInput
from stream_processors.dispatcher.enrichment.context import MAX_QUERY_CHARS, query_text, room_tokens, that_fit
from tests.kit.fake_passages import hit

MODEL = ModelVersion("words", "1", "generate", "torch", ("generate",), "words", 2_048, 512, 8, 4_096)
REQUEST = InferenceRequest("1", "words", "generate", RequestInput(prompt="hello"), Parameters(max_tokens=48))


def test_the_answer_and_the_prompt_come_first() -> None:
    assert room_tokens(REQUEST, MODEL, 800) == 2_048 - 48 - 1_000 - 48
    assert room_tokens(replace(REQUEST, parameters=Parameters()), MODEL, 800) == 2_048 - 512 - 1_000 - 48
    assert room_tokens(REQUEST, MODEL, 2_000) == 2_048 - 48 - 2_500 - 48
    assert room_tokens(REQUEST, replace(MODEL, max_context_tokens=0), 800) is None
    assert room_tokens(REQUEST, MODEL, 80, 300) == 300 - 100 - 48
    assert room_tokens(REQUEST, replace(MODEL, max_context_tokens=0), 80, 300) == 300 - 100 - 48


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(-50, 2_000))
def test_what_fits_is_kept_in_order_and_within_the_room(lengths: list[int], room: int) -> None:
    hits = [hit(str(number), tokens) for number, tokens in enumerate(lengths)]
    kept = that_fit(hits, room)
    assert [one for one in hits if one in kept] == list(kept)
    assert sum(one.tokens for one in kept) <= max(0, room)
    left = room - sum(int(one.tokens * 1.25) + 12 for one in kept)
    assert all(int(one.tokens * 1.25) + 12 > left for one in hits if one not in kept)
    assert that_fit(hits, None) == tuple(hits)


def test_the_last_thing_the_user_said_is_looked_for() -> None:
    said = (
        Message("system", "be brief"),
        Message("user", "first"),
        Message("assistant", "yes"),
        Message("user", "second"),
        Message("user", "  "),
        Message("assistant", "and"),
    )
    assert query_text(replace(REQUEST, input=RequestInput(messages=said))) == "second"
    assert query_text(REQUEST) == "hello"
    assert not query_text(replace(REQUEST, input=RequestInput(messages=said[:1])))
    assert query_text(replace(REQUEST, input=RequestInput(prompt=" nul\0 "))) == "nul"


@given(st.text(max_size=3 * MAX_QUERY_CHARS))
def test_a_query_is_bounded_and_keeps_both_ends(text: str) -> None:
    query = query_text(replace(REQUEST, input=RequestInput(prompt=text)))
    assert len(query) <= MAX_QUERY_CHARS
    assert "\0" not in query
    cleaned = text.replace("\0", " ").strip()
    assert query[:900] == cleaned[:900]
    assert query[-900:] == cleaned[-900:]
