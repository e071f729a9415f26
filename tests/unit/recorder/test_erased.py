"""What was erased is not projected again, and what came after is."""

from fairlane.evaluation_records import EvaluationMark
from fairlane.names import EVALUATION_REPLIES, EVALUATION_TENANT
from fairlane.records import ConversationTurn, InferenceReply, Message, Output, SourceCoordinate, Timings
from fairlane.schema_files import default_codec
from fairlane_server.erasure.erasures import ERASURE_LOCK
from stream_processors.recorder.erased import (
    CONVERSATION,
    REQUEST,
    Subject,
    drop_erased,
    erased_with_conversation,
    subjects,
)
from stream_processors.recorder.projection import LogRecord, Projection, project
from stream_processors.recorder.tables import EVALUATION_RESULTS, RESULTS, TURNS


def reply(
    request_id: str,
    conversation: str | None,
    submitted_at_ms: int | None,
    *,
    replayed: bool = False,
    tenant: str = "acme",
    replay_of: str | None = None,
) -> InferenceReply:
    turn = None if conversation is None else ConversationTurn(conversation, (Message("user", "a secret"),))
    return InferenceReply(
        request_id,
        tenant,
        "ok",
        output=Output(text="an answer"),
        source=SourceCoordinate("q", 0, 0),
        timings=Timings(submitted_at_ms),
        turn=turn,
        replayed=replayed,
        replay_of=replay_of,
    )


def projected(*replies: InferenceReply) -> Projection:
    codec = default_codec()
    records = [
        LogRecord(f"replies.{one.tenant}", 0, offset, 5_000, None, codec.encode(one))
        for offset, one in enumerate(replies)
    ]
    return project(records, codec)


def left(projection: Projection, table: str) -> list[str]:
    columns = list((RESULTS if table == "results" else TURNS).columns)
    at = columns.index("request_id")
    return sorted(str(row[at]) for layer in projection.layers.get(table, ()) for row in layer)


def test_an_erased_conversation_is_left_out_until_the_time_of_its_erasure() -> None:
    projection = projected(
        reply("r-1", "orders", 100),
        reply("r-2", "orders", 999, replayed=True),
        reply("r-3", "orders", 1_000),
        reply("r-4", "talk", 100),
        reply("r-5", None, 100),
        reply("r-6", "orders", 100, tenant="globex"),
    )
    assert drop_erased(projection, {Subject("acme", CONVERSATION, "orders"): 1_000}) == 3
    assert left(projection, "results") == ["r-3", "r-4", "r-5", "r-6"]
    assert left(projection, "conversation_turns") == ["r-3", "r-4", "r-6"]


def test_an_erased_request_is_left_out_with_its_turn() -> None:
    projection = projected(reply("r-1", "orders", 100), reply("r-2", "orders", 100))
    assert drop_erased(projection, {Subject("acme", REQUEST, "r-1"): 1_000}) == 2
    assert left(projection, "results") == left(projection, "conversation_turns") == ["r-2"]


def test_an_erased_request_is_left_out_by_whichever_clock_it_was_submitted_later() -> None:
    projection = projected(reply("r-1", "orders", 1_001), reply("r-2", "orders", 1_001))
    assert drop_erased(projection, {Subject("acme", REQUEST, "r-1"): 1_000}) == 2
    assert left(projection, "results") == left(projection, "conversation_turns") == ["r-2"]


def test_the_replay_of_a_dead_letter_is_left_out_with_what_it_replays() -> None:
    """It has an id of its own, and was submitted after the erasure."""
    replay = reply("r-9", "orders", 5_000, replay_of="r-1")
    others = reply("r-2", "orders", 5_000), reply("r-8", "orders", 5_000, tenant="globex", replay_of="r-1")
    of_request, of_conversation = Subject("acme", REQUEST, "r-1"), Subject("acme", CONVERSATION, "orders")
    assert of_request in subjects(projected(replay))
    for erased in ({of_request: 1_000}, {of_conversation: 1_000}):
        projection = projected(replay, *others)
        assert drop_erased(projection, erased) == 2
        assert left(projection, "results") == left(projection, "conversation_turns") == ["r-2", "r-8"]


def test_what_was_under_way_when_its_conversation_was_erased_is_known_by_its_id() -> None:
    projection = projected(
        reply("r-1", "orders", 100),
        reply("r-2", "orders", 1_000),
        reply("r-3", "orders", 100),
        reply("r-4", None, 100),
        reply("r-5", "talk", 100),
        reply("r-6", "orders", 100, tenant="globex"),
    )
    erased = {
        Subject("acme", CONVERSATION, "orders"): 1_000,
        # These are known already.
        Subject("acme", REQUEST, "r-3"): 1_000,
        Subject("acme", REQUEST, "r-4"): 1_000,
    }
    assert erased_with_conversation(projection, erased) == [("acme", "r-1", "orders")]
    assert erased_with_conversation(projection, {}) == []


def test_copies_are_left_out_with_their_originals() -> None:
    def copy(request_id: str, tenant: str = "acme", replay_of: str | None = None) -> InferenceReply:
        mark = EvaluationMark("shadow", "run-1", "candidate", tenant, request_id)
        return InferenceReply(f"copy-{request_id}", EVALUATION_TENANT, "ok", evaluation=mark, replay_of=replay_of)

    copies = (copy("r-1"), copy("r-2"), copy("r-9", replay_of="r-1"), copy("r-1", "globex"))
    codec = default_codec()
    records = [
        LogRecord(EVALUATION_REPLIES, 0, offset, 5_000, None, codec.encode(one)) for offset, one in enumerate(copies)
    ]
    projection = project(records, codec)
    erased = Subject("acme", REQUEST, "r-1")
    assert erased in subjects(projection)
    assert drop_erased(projection, {erased: 1}) == 2
    columns = list(EVALUATION_RESULTS.columns)
    places = columns.index("tenant"), columns.index("request_id")
    kept = [tuple(row[at] for at in places) for layer in projection.layers["evaluation_results"] for row in layer]
    assert sorted(kept) == [("acme", "r-2"), ("globex", "r-1")]


def test_without_a_time_of_submission_that_of_the_reply_counts() -> None:
    erased = {Subject("acme", CONVERSATION, "orders"): 5_000}
    assert drop_erased(projected(reply("r-1", "orders", None)), erased) == 0
    assert drop_erased(projected(reply("r-1", "orders", None)), dict.fromkeys(erased, 5_001)) == 2


def test_a_batch_asks_about_each_conversation_and_request_once() -> None:
    projection = projected(reply("r-1", "orders", 1), reply("r-1", "orders", 1), reply("r-2", None, 1))
    assert subjects(projection) == [
        Subject("acme", CONVERSATION, "orders"),
        Subject("acme", REQUEST, "r-1"),
        Subject("acme", REQUEST, "r-2"),
    ]
    assert drop_erased(projection, {}) == 0


def test_the_lock_is_that_of_the_functions_in_the_database() -> None:
    from deploy.migrations.versions import r0024_bounds_of_erasures as revision

    assert revision.ERASURE_LOCK == ERASURE_LOCK
    assert str(ERASURE_LOCK) in revision.REQUEST
