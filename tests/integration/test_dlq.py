"""`fairlane dlq` on a real broker, with dead-letter topics of each test's own and no dispatcher."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane import headers, names
from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, InferenceReply, InferenceRequest
from fairlane_server.dead_letters.bulk import DeadLetters
from tests.kit.dead_letters_bench import DeadLettersBench, dead_letters
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import header

pytestmark = pytest.mark.broker

SECRET = "a prompt nobody may see"
WORK, REQUESTS = DeadLetters.WORK, DeadLetters.REQUESTS


@pytest.fixture
def bench(
    broker: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[DeadLettersBench]:
    with dead_letters(broker, unique, tmp_path, monkeypatch, capsys) as bench:
        yield bench


def sent(bench: DeadLettersBench, reader: LogReader) -> list[InferenceRequest]:
    reader.read_to_end()
    return [bench.pipeline.codec.decode_as(InferenceRequest, record.value()) for record in reader.records]


def test_what_is_there_is_listed_and_filtered(bench: DeadLettersBench) -> None:
    assert bench.run("list") == (0, "no dead letters\n", "")
    first, second, third = (bench.pipeline.request(prompt=SECRET) for _ in range(3))
    bench.bury(first)
    bench.bury(second, "b")
    bench.bury(third, error=RuntimeError(f"cannot digest {SECRET}"))
    bench.bury_bytes(b"\x93no record", "some key", topic=REQUESTS, origin=f"requests.{bench.pipeline.tenant('b')}")

    listed = bench.json("list")
    assert listed["found"] == 4
    nobodys, *work = listed["letters"]
    assert (nobodys["topic"], nobodys["offset"], nobodys["record"]) == (bench.topics[REQUESTS], 0, None)
    assert (nobodys["tenant"], nobodys["request_id"]) == (bench.pipeline.tenant("b"), "(8 characters)")
    assert nobodys["problem"].startswith("bad_magic")
    assert [letter["request_id"] for letter in work] == [first.request_id, second.request_id, third.request_id]
    assert [letter["offset"] for letter in work] == [0, 1, 2]
    assert [letter["message"] for letter in work] == ["the engine died", "the engine died", "RuntimeError"]
    assert work[0]["model"] == first.model
    assert work[0]["original"]["topic"] == names.priority_topic(bench.pipeline.pool, "normal")

    def ids(*arguments: str) -> list[str]:
        return [letter["request_id"] for letter in bench.json("list", *arguments)["letters"]]

    assert ids("--tenant", bench.pipeline.tenant("b")) == ["(8 characters)", second.request_id]
    assert ids("--exception", "runtimee") == [third.request_id]
    assert ids("--request-id", first.request_id) == [first.request_id]
    assert ids("--request-id", "some key") == ["(8 characters)"]
    assert ids("--topic", "work", "--offsets", "1-") == [second.request_id, third.request_id]
    assert ids("--topic", "work", "--offsets", "-1") == [first.request_id, second.request_id]
    assert ids("--model", "another") == []
    assert ids("--since", "1h", "--topic", "work", "--limit", "1") == [first.request_id]
    assert ids("--until", "1h") == []
    assert ids("--since", "2999-01-01") == []

    code, text, complaint = bench.run("list", "--limit", "2")
    assert (code, complaint) == (0, "")
    assert text.splitlines()[0].split() == [
        *("letter", "died", "(UTC)", "tenant", "model", "request", "exception", "message", "replayed")
    ]
    assert "and 2 more" in text
    assert SECRET not in text + json.dumps(listed)


def test_one_letter_is_shown_and_its_text_only_when_asked_for(bench: DeadLettersBench) -> None:
    request = bench.pipeline.request(prompt=f"{SECRET}\nand more")
    bench.bury(replace(request, metadata={"note": SECRET}, conversation_id=SECRET))
    code, text, _ = bench.run("show", "0")
    assert code == 0
    assert SECRET not in text
    for line in (
        "holds WorkItem",
        f"{headers.DLT_EXCEPTION_MESSAGE}: the engine died",
        f"{headers.DLT_ORIGINAL_CONSUMER_GROUP}: a.group",
        f"{headers.INSTANCE_ID}: consumer-1",
        f"request.request_id: {request.request_id}",
        "request.input.prompt: (32 characters)",
        "request.metadata: (1 entries)",
    ):
        assert line in text
    assert f"request.input.prompt: {SECRET}\n    and more\n" in bench.run("show", "0", "--with-input")[1]
    shown = bench.json("show", "0", "--topic", "work", "--with-input")
    assert shown["content"]["request"]["metadata"] == {"note": SECRET}
    assert shown["headers"][headers.TENANT] == bench.pipeline.tenant("a")

    bench.bury_bytes(b"\x93" + SECRET.encode(), "key", topic=REQUESTS)
    code, text, complaint = bench.run("show", "0")
    assert (code, text) == (1, "")
    assert "say which with --topic" in complaint
    code, text, _ = bench.run("show", "0", "--topic", "requests")
    assert code == 0
    assert "cannot be read: bad_magic" in text
    assert SECRET not in text
    assert bench.json("show", "0", "--topic", "requests", "--with-input")["content"]["base64"]
    assert bench.run("show", "5", "--topic", "work")[2] == "error: no dead letter stands at work-0@5\n"
    assert bench.run("show", "0", "--partition", "3", "--topic", "work")[2].endswith("it has no partition 3\n")


def test_a_replay_is_a_new_request_of_the_same_tenant_and_goes_once(bench: DeadLettersBench) -> None:
    pipeline, tenant = bench.pipeline, bench.pipeline.tenant("a")
    reply_to = names.replies_topic(tenant)
    request = pipeline.request(prompt=SECRET, timeout_ms=5_000, reply_to=reply_to, metadata={"note": "kept"})
    earlier = pipeline.request()
    replayed_once = replace(pipeline.request(), replay_of=earlier.request_id)
    letter = bench.bury(request)
    bench.bury(replayed_once)
    bench.bury_bytes(b"\x93no record", "k")
    reply = InferenceReply(request_id=request.request_id, tenant=tenant, outcome="ok")
    bench.bury_bytes(pipeline.codec.encode(reply), request.request_id)
    requests = pipeline.reader(names.requests_topic(tenant))
    audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)

    code, text, complaint = bench.run("replay", "--topic", "work", "--dry-run")
    assert code == 0
    assert f"work-0@0: would go to requests.{tenant}, replay of {request.request_id}" in text
    assert "2 would be replayed, 2 skipped" in text
    assert "work-0@2: skipped: it cannot be read: bad_magic" in complaint
    assert "work-0@3: skipped: it holds no request (InferenceReply)" in complaint
    assert sent(bench, requests) == []

    *done, last = bench.lines("replay", "--topic", "work", "--rate", "100")
    assert last["summary"] == {"replayed": 2, "skipped": 2, "failed": 0, "replayed_before": 0, "left": 0}
    assert [one["result"] for one in done] == ["replayed", "replayed", "skipped", "skipped"]
    first, second = sent(bench, requests)
    assert first.request_id == done[0]["request_id"] != request.request_id
    assert first == replace(request, request_id=first.request_id, replay_of=request.request_id)
    assert second.replay_of == earlier.request_id
    assert [record.key() for record in requests.records] == [one.request_id.encode() for one in (first, second)]

    audit.read_to_end()
    told = {event.request_id: event for event in pipeline.decoded(audit, AuditEvent)}
    assert {event.decision for event in told.values()} == {Decision.REPLAYED}
    new, old = told[first.request_id], told[request.request_id]
    assert new.inputs["replay_of"] == new.inputs["replayed_id"] == request.request_id
    assert new.inputs["letter"] == old.inputs["letter"] == f"{letter.topic}-0@0"
    assert (new.source.topic, new.source.offset) == (names.requests_topic(tenant), requests.records[0].offset())
    assert (old.source.topic, old.source.offset) == (names.requests_topic(tenant), 77)
    assert old.inputs["replayed_as"] == first.request_id
    assert new.actor.startswith("dlq:")
    assert SECRET not in repr(told)

    *_, last = bench.lines("replay", "--topic", "work", "--request-id", request.request_id)
    assert (last["summary"]["replayed"], last["summary"]["replayed_before"]) == (0, 1)
    assert len(sent(bench, requests)) == 2
    code, text, _ = bench.run("replay", "--topic", "work", "--offsets", "0", "--again")
    assert code == 0
    assert "1 replayed" in text
    assert len(sent(bench, requests)) == 3
    listed = bench.json("list", "--topic", "work")
    assert listed["found"] == 4, "marks are no letters"
    assert [len(one["replayed_as"]) for one in listed["letters"]] == [2, 1, 0, 0]
    assert listed["letters"][0]["replayed_as"] == [one.request_id for one in sent(bench, requests)[::2]]


def test_a_tenant_whose_topic_is_gone_stops_nobody_else(bench: DeadLettersBench) -> None:
    pipeline = bench.pipeline
    tenant = pipeline.tenant("gone")
    lost = replace(pipeline.request(), tenant=tenant)
    bench.bury_bytes(pipeline.codec.encode(lost), lost.request_id, topic=REQUESTS, origin=names.requests_topic(tenant))
    kept = pipeline.request()
    topic = names.backfill_topic(pipeline.tenant("b"))
    bench.bury_bytes(pipeline.codec.encode(kept), kept.request_id, topic=REQUESTS, origin=topic)
    code, text, complaint = bench.run("replay", "--all")
    assert code == 1
    assert "1 replayed, 1 failed" in text
    assert f"requests-0@0: failed: requests.{tenant}: " in complaint
    (found,) = sent(bench, pipeline.reader(topic))
    assert found.replay_of == kept.request_id, "where it came from, and that was backfill"
    assert header(pipeline.reader(topic).poll(5.0)[0], headers.TENANT) == ""


def test_what_is_purged_is_a_beginning(bench: DeadLettersBench) -> None:
    for _ in range(3):
        bench.bury(bench.pipeline.request())
    assert bench.run("replay", "--topic", "work", "--limit", "1")[0] == 0
    code, text, _ = bench.run("purge", "--topic", "work", "--offsets", "-1", "--dry-run")
    assert (code, text) == (0, f"would delete 2 dead letters of {bench.topics[WORK]}, 1 of them never replayed\n")
    assert bench.json("list")["found"] == 3
    code, text, complaint = bench.run("purge", "--topic", "work", "--offsets", "-1")
    assert (code, text.strip()) == (1, ""), "nobody answered"
    assert "Delete 2 dead letters" in complaint
    assert bench.json("list")["found"] == 3
    purged = bench.json("purge", "--topic", "work", "--offsets", "-1", "--yes")
    assert [(cut["before_offset"], cut["letters"], cut["replayed"]) for cut in purged["deleted"]] == [(2, 2, 1)]
    assert [letter["offset"] for letter in bench.json("list")["letters"]] == [2]
    assert bench.run("purge", "--topic", "work", "--until", "1h")[1] == "nothing to delete\n"
    assert bench.run("purge", "--topic", "work", "--until", "0s", "--yes")[0] == 0
    assert bench.run("list") == (0, "no dead letters\n", "")
