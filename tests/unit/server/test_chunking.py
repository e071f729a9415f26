"""Passages: never too long, nothing left out, in order, always the same, and each knows its headings."""

import re
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.retrieval.chunking import Chunker, Chunking, Section, sections, stretches, title_of
from fairlane_server.retrieval.parsers import ParsedDocument
from fairlane_server.retrieval.store import NewPassage
from fairlane_server.text import estimated_tokens

WORDS = st.sampled_from(
    [
        "a",
        "word",
        "sentences",
        "of",
        "documentation",
        "漢字",
        "é",
        "1234",
        "x" * 70,
        "`code()`",
        "Ends.",
        "Here!",
        "So?",
    ]
)
LINES = st.lists(WORDS, min_size=1, max_size=40).map(" ".join)
MARKS = st.sampled_from(["", "", "", "- ", "* ", "1. ", "> ", "    ", "| ", "```", "  - "])
BODIES = st.lists(st.tuples(MARKS, LINES, st.sampled_from(["\n", "\n\n", "  \n", "\n\n\n"])), max_size=12).map(
    lambda parts: "".join(mark + line + end for mark, line, end in parts)
)
HEADINGS = st.tuples(st.integers(1, 4), LINES.map(lambda line: line[:60]), st.booleans())
DOCUMENTS = st.tuples(BODIES, st.lists(st.tuples(HEADINGS, BODIES), max_size=5)).map(
    lambda parts: parts[0] + "".join(heading(*title) + body for title, body in parts[1])
)
CHUNKINGS = st.integers(16, 120).flatmap(lambda most: st.builds(Chunking, st.just(most), st.integers(0, most // 2)))


def heading(level: int, title: str, underlined: bool) -> str:
    if underlined and level <= 2:
        return f"\n\n{title}\n{'=-'[level - 1] * 3}\n\n"
    return f"\n\n{'#' * level} {title}\n\n"


def passages(text: str, chunking: Chunking, *, markdown: bool = True) -> tuple[NewPassage, ...]:
    return Chunker(chunking).passages(ParsedDocument(text, "", markdown))


def bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def check_covered(whole: str, parts: list[str]) -> None:
    """Every character is in some part, in order, spaces aside; a part may begin before the end of the one before it."""
    whole, covered, start = bare(whole), 0, 0
    for part in map(bare, parts):
        # The latest place that leaves no gap.
        start = whole.rfind(part, start, covered + len(part))
        assert start >= 0, part
        covered = max(covered, start + len(part))
    assert covered == len(whole)


@given(DOCUMENTS, CHUNKINGS, st.booleans())
def test_no_passage_is_longer_than_it_may_be(text: str, chunking: Chunking, markdown: bool) -> None:
    for passage in passages(text, chunking, markdown=markdown):
        assert 0 < estimated_tokens(passage.text) <= chunking.max_tokens
        assert len(passage.text) <= 8 * chunking.max_tokens
        assert passage.tokens == estimated_tokens(passage.heading) + estimated_tokens(passage.text)
        assert passage.text == passage.text.strip() != ""


@given(DOCUMENTS, CHUNKINGS)
def test_every_character_is_in_a_passage_in_order_below_its_headings(text: str, chunking: Chunking) -> None:
    found, parts = passages(text, chunking), sections(text, markdown=True)
    check_covered("".join(section.text for section in parts), [passage.text for passage in found])
    headings = groupby(passage.heading for passage in found)
    assert [heading for heading, _ in headings] == [path for path, _ in groupby(section.path for section in parts)]


@given(BODIES, CHUNKINGS)
def test_every_character_of_plain_text_is_in_a_passage_in_order(text: str, chunking: Chunking) -> None:
    check_covered(text, [passage.text for passage in passages(text, chunking, markdown=False)])


@given(DOCUMENTS)
def test_sections_and_headings_are_the_whole_document(text: str) -> None:
    found = sections(text, markdown=True)
    there = bare("".join(section.text + "".join(section.headings) for section in found))
    # Marks of headings are gone.
    for line in re.split(r"[\n#]+", text):
        if bare(line) and not re.fullmatch(r"[=-]+", bare(line)):
            assert bare(line) in there


@given(DOCUMENTS, CHUNKINGS, st.booleans())
def test_the_same_document_gives_the_same_passages(text: str, chunking: Chunking, markdown: bool) -> None:
    assert passages(text, chunking, markdown=markdown) == passages(text, chunking, markdown=markdown)


def test_the_nearest_headings_that_fit_are_the_path() -> None:
    long, longest = "l" * 140, "x" * 200
    assert Section(("A", "B", "C"), "").path == "A > B > C"
    assert Section(("A", long, long), "").path == f"A > {long} > {long}"
    assert Section(("A", "A", longest, "B"), "").path == f"A > A > {longest} > B"
    assert Section(("A", longest, longest), "").path == longest
    assert Section(("A", longest, "B", long), "").path == f"B > {long}"
    assert Section((), "").path == ""


@given(st.text("ab \n.漢", max_size=400), st.integers(1, 50))
def test_stretches_are_the_text_in_parts_that_are_short(text: str, most: int) -> None:
    parts = list(stretches(text, most))
    assert "".join(parts) == text
    assert all(len(part) <= most for part in parts)


def test_stretches_are_cut_between_paragraphs_before_lines_before_sentences_before_words() -> None:
    for text, first in (
        ("one two. three\nfour\n\nfive six", "one two. three\nfour\n\n"),
        ("one two three. four\nfive six", "one two three. four\n"),
        ("one two three. four five six", "one two three. "),
        ("one two three four five six!", "one two three four five "),
        ("x" * 40, "x" * 25),
    ):
        assert next(stretches(text, 25)) == first


def test_each_passage_knows_the_headings_above_it() -> None:
    text = """Before all.

# Handbook

## Warehouse *hours*
Open on Monday.

### Gate
Closed.

Safety
------
Wear a helmet.

```
# no heading, but code
```

- # no heading, but an item
"""
    assert [(section.headings, section.text.strip()) for section in sections(text, markdown=True)] == [
        ((), "Before all."),
        (("Handbook", "Warehouse *hours*"), "Open on Monday."),
        (("Handbook", "Warehouse *hours*", "Gate"), "Closed."),
        (
            ("Handbook", "Safety"),
            "Wear a helmet.\n\n```\n# no heading, but code\n```\n\n- # no heading, but an item",
        ),
    ]
    (first, *_, last) = passages(text, Chunking())
    assert (first.heading, last.heading) == ("", "Handbook > Safety")


def test_heading_with_nothing_below_it_is_a_passage() -> None:
    found = passages("# Rules\n\n## No smoking\n\n## No running\n\n# End\n", Chunking())
    assert [(passage.heading, passage.text) for passage in found] == [
        ("Rules", "No smoking"),
        ("Rules", "No running"),
        ("", "End"),
    ]


def test_paragraph_that_was_wrapped_is_divided_between_sentences_and_not_at_ends_of_lines() -> None:
    sentence = "The warehouse of Orion is\nopen on Mondays and on\nevery second Tuesday of a month."
    for markdown in (True, False):
        found = passages(" ".join([sentence] * 6), Chunking(40, 0), markdown=markdown)
        assert len(found) > 2
        for passage in found:
            assert passage.text.startswith("The warehouse")
            assert passage.text.endswith("month.")
            assert "\n" not in passage.text


def test_lines_that_mean_something_stay_lines() -> None:
    text = "A line  \nbroken by hand\\\nand again\n\n> quoted\n> twice\n\n"
    text += "| a | b |\n|---|---|\n| 1 | 2 |\n\n    code\n    more\n"
    (section,) = sections(text, markdown=True)
    assert section.text.split("\n\n") == [
        "A line\nbroken by hand\\\nand again",
        "> quoted\n> twice",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "    code\n    more\n",
    ]
    (verse,) = sections("roses are red\n  violets blue\nNew line.\nand more", markdown=False)
    assert verse.text == "roses are red\n  violets blue\nNew line.\nand more"


def test_overlap_is_whole_sentences_of_the_passage_before() -> None:
    text = " ".join(f"This is the sentence with number {number}." for number in range(40))
    apart = [passage.text for passage in passages(text, Chunking(60, 0))]
    assert " ".join(apart) == text
    lapped = [passage.text for passage in passages(text, Chunking(60, 30))]
    assert len(lapped) > len(apart)
    for before, after in pairwise(lapped):
        repeated = before[before.index(after[: after.index(".") + 1]) :]
        assert after.startswith(repeated)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((15, 0), "max_tokens: must be from 16 to 8192, not 15"),
        ((8_193, 0), "max_tokens: must be from 16 to 8192, not 8193"),
        ((100, 51), r"overlap_tokens: must be from 0 to half of max_tokens \(50\), not 51"),
        ((100, -1), "overlap_tokens: must be from 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chunking(*arguments)


def test_title_is_the_documents_own_or_its_first_heading() -> None:
    assert title_of(ParsedDocument("# Heading\ntext", "Own", markdown=True)) == "Own"
    assert title_of(ParsedDocument("text\n# Heading\ntext", "", markdown=True)) == ""
    assert title_of(ParsedDocument("# Heading\ntext", "", markdown=True)) == "Heading"
    assert title_of(ParsedDocument("# no heading", "", markdown=False)) == ""


def test_passages_have_a_most_of_characters_where_they_have_few_tokens() -> None:
    found = passages(("word" + " " * 60) * 500, Chunking(100, 0), markdown=False)
    assert max(len(passage.text) for passage in found) <= 800
    check_covered("word" * 500, [passage.text for passage in found])


def test_more_passages_than_wanted_are_one_more_and_the_rest_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    document = ParsedDocument("# A\n\nA sentence.\n\n" * 1_000, "", markdown=True)
    chunker, split = Chunker(Chunking()), list[str]()

    class Splitter:
        def chunks(self, text: str) -> list[str]:
            split.append(text)
            return [text]

    monkeypatch.setattr(chunker, "_splitter", Splitter())
    assert len(chunker.passages(document, 1_000)) == 1_000
    split.clear()
    assert len(chunker.passages(document, 10)) == 11
    assert len(split) == 11


def test_splitter_is_given_no_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more than twice the time for twice the text."""
    given_lengths: list[int] = []

    class Splitter:
        def chunks(self, text: str) -> list[str]:
            given_lengths.append(len(text))
            return [text]

    chunker = Chunker(Chunking())
    monkeypatch.setattr(chunker, "_splitter", Splitter())
    for text in ("漢字" * 100_000, "A sentence. " * 20_000, "# A\n\n" + "line\n" * 40_000):
        chunker.passages(ParsedDocument(text, "", markdown=True))
    assert max(given_lengths) <= 8_000
    assert sum(given_lengths) >= 600_000
