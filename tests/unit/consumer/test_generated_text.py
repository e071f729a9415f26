"""Text from tokens as they come: whole characters, stop strings cut, and in sum what decoding at once gives."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import FinishReason
from fairlane.records import Output, TokenUsage
from inference_consumers.engines.generated_text import (
    REPLACEMENT,
    Detokenizer,
    GeneratedText,
    StopStrings,
    outcome_of_text,
)
from inference_consumers.engines.protocol import Failure, Success

# A vocabulary as byte-level tokenizers have: every byte, some words, halves of characters, and a control token.
WORDS = (" the", "ab", "abc", "bc", " ", "é", "日本", "\N{GRINNING FACE}", REPLACEMENT)
HALVES = (b"\xf0\x9f", b"\x98\x80", b"\x80a", b"a\xf0", b"\xe6\x97", b"\xa5\xe6\x9c", b"\xff\xff")
TOKENS = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + list(HALVES) + [b""]
ids_of = {token: token_id for token_id, token in enumerate(TOKENS)}

texts = st.text(alphabet="abc é日\N{GRINNING FACE}\N{FAMILY}\N{REPLACEMENT CHARACTER}", max_size=30)
any_tokens = st.lists(st.integers(0, len(TOKENS) - 1), max_size=60)
byte_tokens = texts.map(lambda text: list(text.encode()))
word_tokens = st.lists(st.sampled_from([ids_of[word.encode()] for word in WORDS]), max_size=30)
stops = st.lists(st.text(alphabet="abc日\N{GRINNING FACE}", min_size=1, max_size=5), max_size=3)
# Few letters, so that strings overlap themselves and one another.
dull_texts = st.text(alphabet="ab", min_size=5, max_size=20)
dull_stops = st.lists(st.text(alphabet="ab", min_size=2, max_size=5), min_size=1, max_size=3)
watched = st.tuples(texts, stops) | st.tuples(dull_texts, dull_stops)


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in token_ids).decode("utf-8", "replace")


def without_half_a_character(text: str) -> str:
    """As far as can be told from text: at most three replacement characters at its end are dropped."""
    kept = text.rstrip(REPLACEMENT)
    return kept + REPLACEMENT * max(0, len(text) - len(kept) - 3)


def first_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """By trying every end: where the longest stop string begins that is the first to be complete."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stop_strings if stop and text[:end].endswith(stop)]
        if begins:
            return min(begins)
    return None


@given(any_tokens | byte_tokens | word_tokens)
def test_pieces_are_in_sum_what_decoding_at_once_gives(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    told = "".join(detokenizer.add(token_id) for token_id in token_ids)
    assert told == without_half_a_character(decode(token_ids))


@given(texts)
def test_a_character_is_told_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(byte) for byte in (text.replace(REPLACEMENT, "") + ".").encode()]
    assert "".join(pieces) == text.replace(REPLACEMENT, "") + "."
    assert all(len(piece) <= 1 and piece != REPLACEMENT for piece in pieces)


@pytest.mark.parametrize("token", [b"\xff", b"\x80", b"\xf0", b"", REPLACEMENT.encode(), b" the"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(token: bytes) -> None:
    longest = 0

    def measured(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(measured)
    told = sum(len(detokenizer.add(ids_of[token])) for _ in range(500))
    assert longest <= 25
    assert told >= len(decode([ids_of[token]] * 500)) - 3


def test_a_decoder_that_treats_the_first_token_differently_loses_nothing() -> None:
    words = ("\N{LOWER ONE EIGHTH BLOCK}The", "\N{LOWER ONE EIGHTH BLOCK}sea", "s", "\N{LOWER ONE EIGHTH BLOCK}rise")

    def as_sentencepiece(token_ids: Sequence[int]) -> str:
        return "".join(words[i] for i in token_ids).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").removeprefix(" ")

    detokenizer = Detokenizer(as_sentencepiece)
    assert [detokenizer.add(token_id) for token_id in (0, 1, 2, 3)] == ["The", " sea", "s", " rise"]


@given(watched, st.data())
def test_the_first_stop_string_that_is_complete_is_found_however_the_text_is_cut(
    given_texts: tuple[str, list[str]], data: st.DataObject
) -> None:
    text, stop_strings = given_texts
    watch = StopStrings(stop_strings)
    found = None
    place = 0
    while place < len(text) and found is None:
        length = data.draw(st.integers(1, 5))
        found = watch.feed(text[place : place + length])
        place += length
    assert found == first_stop(text, stop_strings)


@pytest.mark.parametrize("stop_strings", [["cab", "ab", "b"], ["b", "ab", "cab"], ["", "b", "cab"]])
def test_of_stop_strings_that_are_complete_at_once_the_longest_counts(stop_strings: list[str]) -> None:
    assert StopStrings(stop_strings).feed("a cab") == 2


@given(watched)
def test_exactly_the_longest_end_that_may_become_a_stop_string_is_held(given_texts: tuple[str, list[str]]) -> None:
    text, stop_strings = given_texts
    cut = first_stop(text, stop_strings)
    seen = text if cut is None else text[:cut]
    if first_stop(seen, stop_strings) is not None:
        return
    watch = StopStrings(stop_strings)
    watch.feed(seen)
    may_go_on = [n for n in range(1, len(seen) + 1) if any(stop.startswith(seen[-n:]) for stop in stop_strings)]
    assert watch.held == max(may_go_on, default=0)


@given(any_tokens | byte_tokens | word_tokens, stops)
def test_what_is_told_is_the_answer_up_to_its_first_stop_string(token_ids: list[int], stop_strings: list[str]) -> None:
    text = GeneratedText(decode, stop_strings)
    told = []
    for token_id in token_ids:
        told.append(text.add(token_id))
        # What was told can never be taken back: no part of it lies inside a stop string.
        assert text.whole() == "".join(told)
        if text.is_stopped:
            break
    else:
        told.append(text.end())
    everything = without_half_a_character(decode(token_ids))
    cut = first_stop(everything, stop_strings)
    assert text.is_stopped == (cut is not None)
    assert "".join(told) == text.whole() == everything[:cut]
    assert text.length == len(text.whole())


def test_a_stop_string_across_tokens_is_held_and_let_go_when_it_does_not_come() -> None:
    text = GeneratedText(decode, ["abcd"])
    assert [text.add(ids_of[token]) for token in (b"ab", b"c", b" the", b"abc")] == ["", "", "abc the", ""]
    assert (text.length, text.end(), text.whole()) == (10, "abc", "abc theabc")
    assert not text.is_stopped


@pytest.mark.parametrize(
    ("text", "tokens", "reason", "may_be_empty", "fault"),
    [
        ("", 1, FinishReason.STOP, False, "ended its answer before the first token"),
        ("", 1, FinishReason.LENGTH, False, "1 tokens that are no text"),
        ("", 3, FinishReason.STOP, False, "3 tokens that are no text"),
        ("", 3, FinishReason.STOP, True, None),
        (REPLACEMENT * 4, 4, FinishReason.LENGTH, True, "4 tokens that are no text"),
        ("ab" + REPLACEMENT + "cd", 5, FinishReason.STOP, False, "5 tokens that are no text"),
        (" ", 1, FinishReason.LENGTH, False, None),
    ],
)
def test_what_is_empty_or_no_text_is_no_answer(
    text: str, tokens: int, reason: FinishReason, may_be_empty: bool, fault: str | None
) -> None:
    found = outcome_of_text(text, TokenUsage(2, tokens), reason, None, may_be_empty, lambda: False)
    if fault is None:
        assert found == Success(Output(text=text), TokenUsage(2, tokens), reason)
    else:
        assert isinstance(found, Failure)
        assert fault in found.message


def test_a_replacement_character_of_the_prompt_may_be_repeated() -> None:
    usage = TokenUsage(2, 2)
    found = [outcome_of_text(text, usage, FinishReason.STOP, None, False, lambda: True) for text in (REPLACEMENT, "")]
    assert list(map(type, found)) == [Success, Failure]
