"""Dead letters without a broker: their headers, what is read back of them, and what they are sent again as."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import headers, names
from fairlane.codec import DecodeError, DecodeProblem
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers
from fairlane.outcomes import Decision
from fairlane.records import (
    AuditEvent,
    CancelRequest,
    InferenceReply,
    InferenceRequest,
    Message,
    Output,
    Parameters,
    Passage,
    RequestInput,
    SourceCoordinate,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane_server.dead_letters.describe import contents, facts, flat
from fairlane_server.dead_letters.letters import Letter, ReplayMark, StoredRecord, headers_of, mark_headers, read_record
from fairlane_server.dead_letters.replay import (
    NotReplayableError,
    ReplayRate,
    audit_records,
    make_replay,
    mark_record,
    request_record,
)

SECRET = "a prompt nobody may see"
CODEC = default_codec()
ID, NEW_ID, FIRST_ID = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "123")
PLACE = SourceCoordinate("dead-letter.work", 0, 12)
SOURCE = SourceCoordinate("requests.acme", 0, 5)
WORK = SourceCoordinate("priority.gpu.high", 2, 17)
REQUEST = InferenceRequest(
    ID,
    "words",
    "generate",
    RequestInput(prompt=SECRET, messages=(Message("user", SECRET),)),
    Parameters(max_tokens=7, stop=(SECRET,)),
    timeout_ms=5_000,
    reply_to="replies.acme.search",
    conversation_id=SECRET,
    metadata={SECRET: SECRET},
)
ITEM = WorkItem(
    request=REQUEST,
    tenant="acme",
    pool="gpu",
    model_version="3",
    priority_class="high",
    cost_tokens=21,
    submitted_at_ms=1_000,
    admitted_at_ms=1_010,
    dispatched_at_ms=1_020,
    deadline_at_ms=2_000,
    reply_topic="replies.acme.search",
    dispatcher_id="dispatcher-1",
    source=SOURCE,
    passages=(Passage("p-1", SECRET, 0.5),),
)
SIGNATURE = LetterWriter("consumer-1", "fairlane.pool.gpu")


class EngineDiedError(DeadLetterError):
    """One of ours."""


def written(error: Exception, **names_given: str) -> dict[str, bytes]:
    return dict(dead_letter_headers(WORK, 1_025, error, SIGNATURE, **names_given))


def letter(content: object, origin: SourceCoordinate = WORK, *, key: bytes = ID.encode()) -> Letter:
    value = content if isinstance(content, bytes) else CODEC.encode(content)
    found = headers_of(dead_letter_headers(origin, 1_025, EngineDiedError("it died"), SIGNATURE))
    read = read_record(StoredRecord(PLACE, 3_000, key, value, found), CODEC)
    assert isinstance(read, Letter)
    return read


# ------------------------------------------------------------------ headers


def test_the_headers_say_where_it_stood_why_it_is_here_and_who_says_so() -> None:
    assert written(EngineDiedError("the engine died"), tenant="acme", model="words") == {
        "kafka_dlt-original-topic": b"priority.gpu.high",
        "kafka_dlt-original-partition": b"2",
        "kafka_dlt-original-offset": b"17",
        "kafka_dlt-original-timestamp": b"1025",
        "kafka_dlt-original-consumer-group": b"fairlane.pool.gpu",
        "kafka_dlt-exception-fqcn": f"{__name__}.EngineDiedError".encode(),
        "kafka_dlt-exception-message": b"the engine died",
        "fairlane-instance-id": b"consumer-1",
        "fairlane-tenant": b"acme",
        "fairlane-model": b"words",
    }


def test_what_is_not_known_is_left_out() -> None:
    found = dict(dead_letter_headers(WORK, None, EngineDiedError("x"), LetterWriter("consumer-1")))
    assert headers.DLT_ORIGINAL_TIMESTAMP not in found
    assert headers.DLT_ORIGINAL_CONSUMER_GROUP not in found
    assert headers.TENANT not in found


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"cannot digest {SECRET!r}"),
        KeyError(SECRET),
        UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
    ],
)
def test_an_exception_that_is_not_ours_is_named_and_not_quoted(error: Exception) -> None:
    found = written(error, tenant=SECRET, model=SECRET)
    assert found[headers.DLT_EXCEPTION_MESSAGE] == type(error).__name__.encode()
    assert SECRET not in repr(found)


def test_what_does_not_decode_says_why_and_a_message_is_short() -> None:
    error = DecodeError(DecodeProblem.BAD_MAGIC, "first byte is 0x93")
    assert written(error)[headers.DLT_EXCEPTION_MESSAGE] == b"bad_magic: first byte is 0x93"
    assert len(written(EngineDiedError("x" * 10_000))[headers.DLT_EXCEPTION_MESSAGE]) == 500


# ------------------------------------------------------------------ reading


def test_a_letter_of_work_tells_what_is_in_it() -> None:
    found = letter(ITEM)
    assert (found.kind, found.problem, found.request, found.request_id) == ("WorkItem", None, REQUEST, ID)
    assert (found.tenant, found.model, found.place, found.died_at_ms) == ("acme", "words", PLACE, 3_000)
    assert (found.original, found.original_at_ms) == (WORK, 1_025)
    assert (found.exception, found.message) == (f"{__name__}.EngineDiedError", "it died")


def test_work_for_a_version_that_its_request_named_is_replayed_for_that_version() -> None:
    named = letter(replace(ITEM, model_version="2", arm="version")).request
    assert named == replace(REQUEST, model="words/2")
    assert letter(replace(ITEM, model_version="2", arm="champion")).request == REQUEST


def test_the_tenant_of_a_request_is_that_of_its_topic() -> None:
    found = letter(replace(REQUEST, tenant="globex"), SourceCoordinate("backfill.acme", 0, 1))
    assert (found.kind, found.tenant) == ("InferenceRequest", "acme")
    assert letter(replace(REQUEST, tenant="globex")).tenant is None


def test_bytes_that_hold_nothing_are_known_by_their_key() -> None:
    found = letter(b"\x93", SOURCE)
    assert (found.kind, found.request, found.request_id, found.tenant) == (None, None, ID, "acme")
    assert (found.problem or "").startswith("bad_magic")


@given(
    st.dictionaries(
        st.sampled_from([name for key, name in vars(headers).items() if key.isupper()]),
        st.binary(max_size=100) | st.integers().map(b"%d".__mod__),
    ),
    st.binary(max_size=50),
    st.none() | st.binary(max_size=10),
)
def test_no_bytes_are_too_strange_to_be_read(given_headers: dict[str, bytes], value: bytes, key: bytes | None) -> None:
    found = read_record(StoredRecord(PLACE, 0, key, value, given_headers), CODEC)
    if isinstance(found, Letter):
        assert facts(found).keys() == facts(letter(ITEM)).keys()
        contents(found, with_input=True)
    else:
        assert found.letter.offset < PLACE.offset


def test_a_mark_is_read_back() -> None:
    marked = SourceCoordinate(PLACE.topic, 0, 3)
    record = StoredRecord(PLACE, 0, None, b"", headers_of(mark_headers(marked, NEW_ID)))
    assert read_record(record, CODEC) == ReplayMark(marked, NEW_ID)


@pytest.mark.parametrize("offset", [b"12", b"13", b"99999999999999999", b"-1", b"x", b"", b"9" * 5_000])
def test_a_mark_of_what_cannot_stand_before_it_marks_nothing(offset: bytes) -> None:
    found = read_record(StoredRecord(PLACE, 0, None, b"", {headers.REPLAYED_OFFSET: offset}), CODEC)
    assert isinstance(found, ReplayMark)
    assert found.letter.offset == -1


# ------------------------------------------------------------------ describing


@pytest.mark.parametrize(
    "content",
    [
        ITEM,
        REQUEST,
        InferenceReply(ID, "acme", "ok", output=Output(text=SECRET)),
        replace(REQUEST, model=SECRET, task=SECRET, group=SECRET, request_id=SECRET, replay_of=SECRET, tenant=SECRET),
        b"\x93" + SECRET.encode(),
    ],
)
def test_no_text_is_shown_unless_it_is_asked_for(content: object) -> None:
    found = letter(content, SOURCE, key=SECRET.encode())
    assert SECRET not in repr(facts(found))
    assert SECRET not in repr(flat(contents(found, with_input=False)))
    asked = repr(flat(contents(found, with_input=True)))
    assert (SECRET in asked) is not isinstance(content, bytes), "bytes are shown in base64"


def test_names_and_numbers_are_shown_and_text_is_measured() -> None:
    shown = dict(flat(contents(letter(ITEM), with_input=False)))
    assert shown["request.request_id"] == ID
    assert shown["request.parameters.max_tokens"] == "7"
    assert shown["request.input.prompt"] == f"({len(SECRET)} characters)"
    assert shown["request.input.messages[0].content"] == f"({len(SECRET)} characters)"
    assert shown["source.topic"] == "requests.acme"
    assert (shown["passages[0].passage_id"], shown["passages[0].score"]) == ("p-1", "0.5")
    assert "request.input.query" not in shown


def test_a_message_of_a_service_is_shown() -> None:
    refusal = InferenceReply(ID, "acme", "rejected", message="the queue is full")
    assert dict(flat(contents(letter(refusal), with_input=False)))["message"] == "the queue is full"


# ------------------------------------------------------------------ replaying


def test_a_replay_is_the_same_request_under_a_new_id() -> None:
    replay = make_replay(letter(ITEM), NEW_ID)
    assert replay.request == replace(REQUEST, request_id=NEW_ID, replay_of=ID)
    assert (replay.topic, replay.tenant, replay.replayed_id, replay.source) == ("requests.acme", "acme", ID, SOURCE)
    sent = request_record(replay, CODEC)
    assert (sent.topic, sent.key) == ("requests.acme", NEW_ID.encode())
    assert CODEC.decode_as(InferenceRequest, sent.value) == replay.request


def test_a_replay_of_a_replay_names_the_first() -> None:
    replay = make_replay(letter(replace(ITEM, request=replace(REQUEST, replay_of=FIRST_ID))), NEW_ID)
    assert (replay.request.replay_of, replay.replayed_id) == (FIRST_ID, ID)
    other = make_replay(letter(replace(ITEM, request=replace(REQUEST, replay_of=SECRET))), NEW_ID)
    assert other.request.replay_of == ID


def test_a_request_goes_back_to_where_it_came_from() -> None:
    replay = make_replay(letter(REQUEST, SourceCoordinate("backfill.acme", 0, 9)), NEW_ID)
    assert (replay.topic, replay.source.offset) == ("backfill.acme", 9)


@pytest.mark.parametrize(
    ("content", "origin", "why"),
    [
        (b"\x93", SOURCE, "it cannot be read: bad_magic"),
        (InferenceReply(ID, "acme", "ok"), SOURCE, "it holds no request (InferenceReply)"),
        (CancelRequest(ID), SOURCE, "it holds no request (CancelRequest)"),
        (REQUEST, WORK, "nobody knows whose it is"),
        (replace(REQUEST, tenant="globex"), SOURCE, "another tenant"),
        (replace(ITEM, tenant="globex"), WORK, "another tenant"),
        (replace(ITEM, request=replace(REQUEST, tenant="globex")), WORK, "another tenant"),
        (replace(ITEM, source=SourceCoordinate("ledger.audit", 0, 1)), WORK, "nobody knows whose it is"),
        (replace(ITEM, request=replace(REQUEST, request_id=SECRET)), WORK, "no UUID"),
    ],
)
def test_what_cannot_be_sent_again(content: object, origin: SourceCoordinate, why: str) -> None:
    with pytest.raises(NotReplayableError, match=why.replace("(", r"\(").replace(")", r"\)")) as caught:
        make_replay(letter(content, origin), NEW_ID)
    assert SECRET not in str(caught.value)


def test_a_letter_without_headers_is_not_sent_again() -> None:
    found = read_record(StoredRecord(PLACE, 0, None, CODEC.encode(REQUEST), {}), CODEC)
    assert isinstance(found, Letter)
    with pytest.raises(NotReplayableError, match="do not say where it stood"):
        make_replay(found, NEW_ID)


def test_the_mark_stands_in_the_letters_own_partition() -> None:
    place = replace(PLACE, partition=3)
    found = letter(ITEM)
    mark = mark_record(make_replay(replace(found, record=replace(found.record, place=place)), NEW_ID))
    assert (mark.topic, mark.partition, mark.key, mark.value) == (PLACE.topic, 3, ID.encode(), b"")
    behind = StoredRecord(replace(place, offset=40), 0, mark.key, mark.value, headers_of(mark.headers))
    assert read_record(behind, CODEC) == ReplayMark(place, NEW_ID)


def test_both_ids_can_be_explained() -> None:
    place = SourceCoordinate("requests.acme", 0, 99)
    replay = make_replay(letter(replace(ITEM, request=replace(REQUEST, replay_of=FIRST_ID))), NEW_ID)
    records = audit_records(replay, place, CODEC, "dlq:somebody", 4_000)
    new, old = (CODEC.decode_as(AuditEvent, record.value) for record in records)
    assert {(record.topic, record.key) for record in records} == {(names.LEDGER_AUDIT, b"acme")}
    assert new == AuditEvent(
        *(NEW_ID, "acme", Decision.REPLAYED, "dlq:somebody", 4_000, place),
        inputs={
            "letter": "dead-letter.work-0@12",
            "replay_of": FIRST_ID,
            "replayed_id": ID,
            "exception": f"{__name__}.EngineDiedError",
        },
    )
    assert (old.request_id, old.source, old.decision) == (ID, SOURCE, Decision.REPLAYED)
    assert (old.inputs["replayed_as"], old.inputs["letter"]) == (NEW_ID, "dead-letter.work-0@12")
    assert SECRET not in repr((new, old))


def test_a_pace_spreads_and_saves_nothing_up() -> None:
    pace = ReplayRate(4.0)
    assert pace.wait_s(100.0) == 0
    pace.went(100.0)
    assert pace.wait_s(100.0) == 0.25
    assert pace.wait_s(100.2) == pytest.approx(0.05)
    assert pace.wait_s(200.0) == 0
    pace.went(200.0)
    assert pace.wait_s(200.0) == 0.25
