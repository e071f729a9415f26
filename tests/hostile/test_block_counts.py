"""Counts, lengths and headers that a tenant made up: refused before anything is built of them; nobody else waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from benchmarks.processes import peak_bytes
from fairlane import headers, names
from fairlane.codec import DecodeProblem
from fairlane.outcomes import Code, Outcome
from fairlane.record_bounds import MAX_REQUEST_BYTES
from fairlane.records import InferenceReply, RequestInput, SourceCoordinate
from tests.kit.hostile_kit import assert_undisturbed, calm_p99_s, long, neighbour, requests_topic, string, warm
from tests.kit.pipeline import Pipeline, header, unique_name

pytestmark = [pytest.mark.broker, pytest.mark.alone]

ID = "6f9619ff-8b86-d011-b42d-00c04fc96{:03}"
FRAME = b"\x00\x00\x00\x00\x1b"


def head(number: int) -> bytes:
    """A frame, and the fields before the input."""
    return FRAME + string(ID.format(number)) + string("words") + string("generate")


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder: Path = tmp_path_factory.mktemp("block-counts")
    env = {"MAX_INPUT_BYTES": str(2 * MAX_REQUEST_BYTES)}
    with Pipeline(broker, folder, unique_name(), tenants=("hostile", "other"), env=env) as pipeline:
        pipeline.start()
        warm(pipeline, "hostile", "other")
        yield pipeline


def rejected(pipeline: Pipeline, places: list[SourceCoordinate]) -> list[InferenceReply]:
    """The refusals of what stands at these places, in their order."""
    replies = pipeline.replies("hostile")

    def found() -> dict[SourceCoordinate, InferenceReply]:
        replies.read_to_end()
        given = (reply for of_id in replies.by_id.values() for reply in of_id)
        return {reply.source: reply for reply in given if reply.source in places}

    replies.reader.wait(lambda: len(found()) == len(places), what="refusals")
    ends = found()
    for reply in ends.values():
        assert (reply.outcome, reply.code) == (Outcome.REJECTED, Code.INVALID)
    return [ends[place] for place in places]


def test_a_million_empty_messages_cost_nobody_anything(pipeline: Pipeline) -> None:
    dispatcher = pipeline.processes["dispatcher-1"]
    pid, calm_s, before = dispatcher.pid, calm_p99_s(pipeline, "other"), peak_bytes(dispatcher.pid)
    body = long(1) + long(1_000_000) + b"\x00\x00" * 1_000_000
    with neighbour(pipeline, "other").sending() as beside:
        for batch in range(4):
            values = [(None, head(10 * batch + number) + body) for number in range(10)]
            places = pipeline.write(requests_topic(pipeline, "hostile"), values)
            for reply in rejected(pipeline, places):
                assert (reply.field, reply.message) == ("input.messages", "1000000 items are more than 4096")
    assert_undisturbed(beside, calm_s)
    # What was fetched of it, 80 MB in all, and nothing that was made of it: that would be ten times as much.
    assert peak_bytes(dispatcher.pid) - before < 200 * 2**20
    assert dispatcher.pid == pid


MESSAGES = long(1)
UNDECODABLE: tuple[tuple[str, bytes, DecodeProblem, str], ...] = (
    ("a branch that is none", long(7), DecodeProblem.INVALID_BODY, "input.messages: branch 7 of a union of 2"),
    ("a negative branch", long(-3), DecodeProblem.INVALID_BODY, "input.messages: branch -3 of a union of 2"),
    ("a negative length", MESSAGES + long(1) + long(-5), DecodeProblem.INVALID_BODY, "messages[0].role: a negative"),
    ("a length beyond the end", MESSAGES + long(1) + long(2**40), DecodeProblem.TRUNCATED_BODY, "messages[0].role"),
    ("a number without end", MESSAGES + b"\xff" * 40, DecodeProblem.INVALID_BODY, "messages: a number of more than"),
    ("a block beyond the end", MESSAGES + long(-2) + long(2**30), DecodeProblem.INVALID_BODY, "messages: a block of"),
)


def test_bytes_that_make_no_request_are_dead_letters_that_name_the_field(pipeline: Pipeline) -> None:
    letters = pipeline.reader(names.DEAD_LETTER_REQUESTS)
    values = [head(100 + number) + body for number, (_, body, _, _) in enumerate(UNDECODABLE)]
    places = pipeline.write(requests_topic(pipeline, "hostile"), [(None, value) for value in values])

    def said() -> dict[int, str]:
        return {
            int(header(letter, headers.DLT_ORIGINAL_OFFSET)): header(letter, headers.DLT_EXCEPTION_MESSAGE)
            for letter in pipeline.dead_letters(letters)
        }

    letters.wait(lambda: {place.offset for place in places} <= said().keys(), what="dead letters")
    for place, (what, _, problem, message) in zip(places, UNDECODABLE, strict=True):
        assert said()[place.offset].startswith(f"{problem}: InferenceRequest."), what
        assert message in said()[place.offset], what


@pytest.mark.parametrize(
    ("number", "body", "items"),
    [(201, long(2**62), 2**62), (202, long(-(2**63)) + b"\0", 2**63)],
    ids=["2**62 items", "the most negative count"],
)
def test_a_count_is_refused_although_nothing_follows_it(
    pipeline: Pipeline, number: int, body: bytes, items: int
) -> None:
    places = pipeline.write(requests_topic(pipeline, "hostile"), [(None, head(number) + MESSAGES + body)])
    (reply,) = rejected(pipeline, places)
    assert (reply.request_id, reply.field) == (ID.format(number), "input.messages")
    assert reply.message == f"{items} items are more than 4096"


def test_of_a_map_key_that_comes_twice_the_last_counts(pipeline: Pipeline) -> None:
    request = pipeline.request(metadata={"k": "1"})
    data = pipeline.codec.encode(request)
    at = data.rindex(b"\x02\x02k\x021\x00")
    twice = data[:at] + long(2) + string("k") + string("1") + string("k") + string("2") + data[at + 5 :]
    work = pipeline.reader(names.priority_topic(pipeline.pool, "normal"), from_beginning=False)
    pipeline.write(requests_topic(pipeline, "hostile"), [(None, twice)])
    assert pipeline.replies("hostile").wait([request.request_id])[request.request_id].outcome == Outcome.OK
    work.read_to_end()
    (item,) = [pipeline.codec.decode(one.value()) for one in work.records if one.key() == request.request_id.encode()]
    assert item.request.metadata == {"k": "2"}  # type: ignore[attr-defined]  # a WorkItem


def test_the_bytes_of_headers_are_bounded(pipeline: Pipeline) -> None:
    value = pipeline.codec.encode(pipeline.request())
    places = pipeline.write(requests_topic(pipeline, "hostile"), [(None, value)], [("h", bytes(100_000))])
    (reply,) = rejected(pipeline, places)
    assert reply.field == "headers"


def test_the_largest_request_that_the_broker_takes_becomes_work(pipeline: Pipeline) -> None:
    """And one that is a byte larger is refused where it is published."""
    topic, smallest, largest = requests_topic(pipeline, "hostile"), MAX_REQUEST_BYTES - 1_024, MAX_REQUEST_BYTES
    around = len(pipeline.codec.encode(pipeline.request(prompt="x" * smallest))) - smallest
    reply_ids = {}
    while largest - smallest > 1:
        size = (smallest + largest) // 2
        request = pipeline.request(prompt="x" * (size - around))
        value = pipeline.codec.encode(request)
        assert len(value) == size
        try:
            pipeline.write(topic, [(None, value)])
        except AssertionError as error:
            assert "too large" in str(error).lower()  # noqa: PT017 - it is the helper's own
            largest = size
        else:
            smallest, reply_ids[size] = size, request.request_id
    assert largest < MAX_REQUEST_BYTES
    reply = pipeline.replies("hostile").wait([reply_ids[smallest]])[reply_ids[smallest]]
    assert reply.code != Code.INVALID


def test_work_that_its_topic_does_not_take_is_refused_and_holds_up_nobody(pipeline: Pipeline) -> None:
    """The topic takes less than topics.yaml says."""
    topic = names.priority_topic(pipeline.pool, "low")
    entry = ConfigEntry("max.message.bytes", "50000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for changed in pipeline.admin.incremental_alter_configs([resource]).values():
        changed.result(10.0)
    # With time for it, however slow the machine is.
    large = pipeline.request(prompt="x" * 100_000, priority="low", timeout_ms=3_600_000)
    small = [pipeline.request(priority="low") for _ in range(5)]
    pipeline.publish("hostile", small[0], large, *small[1:])
    replies = pipeline.replies("hostile").wait([large.request_id, *(request.request_id for request in small)], 60.0)
    refused = replies.pop(large.request_id)
    assert (refused.outcome, refused.code, refused.field) == (Outcome.REJECTED, Code.INVALID, "input")
    assert f"larger than {topic} takes" in (refused.message or "")
    assert {reply.outcome for reply in replies.values()} == {Outcome.OK}


def test_a_prompt_of_the_settings_size_is_answered(pipeline: Pipeline) -> None:
    """What is scanned is answered like what is not."""
    # With time for it, however slow the machine is.
    requests = [
        pipeline.request(input=RequestInput(prompt="word " * length), timeout_ms=3_600_000)
        for length in (1, 800, 900, 2_000)
    ]
    pipeline.publish("hostile", *requests)
    replies = pipeline.replies("hostile").wait([request.request_id for request in requests])
    ends = {(reply.outcome, reply.code) for reply in replies.values()}
    assert {outcome for outcome, _ in ends} <= {Outcome.OK, Outcome.FAILED}, ends
