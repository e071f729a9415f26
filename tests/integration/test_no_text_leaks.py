"""No text of a request appears in a log, a metric, a header, the audit or a listing, whatever way it took.

An address and a key are planted in requests by HTTP, by Kafka, in a batch and in a dead letter that is replayed, for a
tenant with guardrails and one without; some are refused, broken or end in a crash. Then every sink is searched.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import httpx
import openai
import psutil
import psycopg
import pytest
from confluent_kafka import Message
from confluent_kafka.admin import AdminClient

from deploy.local.layout import PROJECT_ROOT
from deploy.local.services import Service, default_services
from fairlane import names
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule
from fairlane.kafka_config import connection
from fairlane.outcomes import Code, Outcome
from fairlane.records import AuditEvent, RequestInput, Retrieval, TenantSpec, UsageEvent
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.log_reader import LogReader
from tests.kit.stack import PostgresServer
from tests.kit.troubled_engine import POISON
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

ADDRESS = "planted.person@example.com"
KEY = "AKIAQX7PLN4TEDLE6K77"
TEXT = f"I am {ADDRESS} and my key is {KEY}"
PLANTED = (ADDRESS, KEY, "planted.person", "QX7PLN4TEDLE6K77")
POLICY = GuardrailPolicy(
    input=(GuardrailRule("patterns", "redact", "closed"), GuardrailRule("secrets", "block", "closed")),
    output=(GuardrailRule("patterns", "log", "open"),),
    patterns=("planted[.]person@[a-z.]+",),
)
END_S = 180.0


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("leaks")
    env = {"FILES_URL": str(folder / "files"), "LOG_LEVEL": "DEBUG"}
    tenants = [TenantSpec("a", guardrails=POLICY), TenantSpec("b")]
    with serving(broker, postgres, folder, redis_url=redis_url, env=env, tenants=tenants) as served:
        yield served


@pytest.fixture(scope="module")
def used(served: Served) -> Served:
    """After everything was sent, answered and recorded."""
    # The engines of this consumer break on a prompt that says so.
    served.consumer.stop()
    pipeline = served.pipeline
    arguments = ("-m", "tests.kit.troubled_consumer", "--pool", pipeline.pool)
    troubled = pipeline.launch(Service(f"consumer-{pipeline.pool}-2", arguments, {})).wait_ready()
    (runner,) = [one for one in default_services() if "producers.backfill" in one.arguments]
    pipeline.launch(replace(runner, env={"POSTGRES_DSN": served.database.backfill_dsn})).wait_ready()
    for tenant in ("a", "b"):
        by_http(served, tenant)
        by_kafka(served, tenant)
        by_batch(served, tenant)
    in_a_crash(served, troubled.pid)
    by_replay(served)
    eventually(lambda: not lag(served), END_S, "the recorder")
    return served


def by_http(served: Served, tenant: str) -> None:
    """Whole and streamed, native and OpenAI's; answered, blocked and malformed."""
    with served.client(tenant) as client:
        for text in (TEXT, f"I am {ADDRESS}", f"my key is {KEY}"):
            client.post("/v1/chat/completions", json=served.chat(text))
            client.post("/v1/chat/completions", json=served.chat(text, stream=True, user=text))
            accepted = client.post("/v1/requests", json=served.question(text) | {"metadata": {"note": text}})
            if accepted.status_code < 300:
                wait_for_result(client, accepted.json()["id"])
        bad = [
            served.chat(TEXT, n=7),
            served.chat(TEXT, no_such_field=TEXT),
            served.chat(TEXT, max_tokens=TEXT),
            served.question(TEXT) | {"priority": TEXT},
            served.question(TEXT) | {"retrieval": {"collection": TEXT}},
        ]
        for body in bad:
            assert client.post("/v1/chat/completions", json=body).status_code == 400
            client.post("/v1/requests", json=body)
        client.post("/v1/chat/completions", content=f'{{"messages": "{TEXT}'.encode())
        client.post("/v1/embeddings", json={"model": served.pipeline.model_for("embed"), "input": [TEXT]})


def wait_for_result(client: httpx.Client, request_id: str) -> None:
    eventually(lambda: client.get(f"/v1/results/{request_id}").status_code == 200, END_S, "a result")


def by_kafka(served: Served, tenant: str) -> None:
    """Good, blocked, sent twice, invalid, too late, cancelled; and bytes that are no record."""
    pipeline = served.pipeline
    replies = pipeline.replies(tenant, from_beginning=False)
    good = [pipeline.request(prompt=text, timeout_ms=LONG_MS) for text in (TEXT, f"I am {ADDRESS}")]
    good.append(replace(pipeline.request(timeout_ms=LONG_MS), metadata={TEXT: TEXT}))
    good.append(
        replace(pipeline.request("rank", timeout_ms=LONG_MS), input=RequestInput(query=TEXT, documents=(TEXT,)))
    )
    good.append(replace(pipeline.request("embed", timeout_ms=LONG_MS), input=RequestInput(texts=(TEXT,))))
    asked = pipeline.request(prompt=TEXT)
    refused = [
        replace(asked, request_id=str(uuid4()), task=TEXT),
        replace(asked, request_id=str(uuid4()), priority=TEXT),
        replace(asked, request_id=str(uuid4()), cache=TEXT),
        replace(asked, request_id=str(uuid4()), group=TEXT),
        replace(asked, request_id=str(uuid4()), retrieval=Retrieval(TEXT)),
        replace(asked, request_id=str(uuid4()), retrieval=Retrieval("docs", mode=TEXT)),
        replace(asked, request_id=str(uuid4()), input=wrong()),
    ]
    pipeline.publish(tenant, *good, *refused)
    pipeline.publish(tenant, good[1])
    pipeline.publish(tenant, pipeline.request(prompt=TEXT, timeout_ms=1))
    found = replies.wait([one.request_id for one in (*good, *refused)], END_S)
    for request in refused:
        assert found[request.request_id].code == Code.INVALID
    expected = (Outcome.REJECTED, Code.GUARDRAIL_BLOCKED) if tenant == "a" else (Outcome.OK, None)
    assert (found[good[0].request_id].outcome, found[good[0].request_id].code) == expected
    topic = names.requests_topic(pipeline.tenant(tenant))
    encoded = pipeline.codec.encode(good[0])
    pipeline.write(topic, [(TEXT.encode(), TEXT.encode()), (None, encoded[:-5]), (b"k", encoded + TEXT.encode())])


def wrong() -> RequestInput:
    """Fields of two tasks."""
    return RequestInput(prompt=TEXT, texts=(TEXT,), query=TEXT)


def by_batch(served: Served, tenant: str) -> None:
    body = {"model": served.pipeline.model_for("generate"), "max_tokens": 3}
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body | {"messages": messages},
        }
        for number, messages in enumerate(
            [[{"role": "user", "content": TEXT}], [{"role": "user", "content": f"I am {ADDRESS}"}], TEXT]
        )
    ]
    lines = b"\n".join(json.dumps(row).encode() for row in rows) + b'\n{"custom_id": "' + TEXT.encode()
    with openai.OpenAI(base_url=served.url("/v1"), api_key=served.keys[tenant], max_retries=0) as client:
        file = client.files.create(file=("rows.jsonl", lines), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        final = {"completed", "failed", "expired", "cancelled"}
        eventually(lambda: client.batches.retrieve(batch.id).status in final, END_S, "the end of the batch")


def in_a_crash(served: Served, pid: int) -> None:
    """An engine breaks on a request until it is poison; the process of a check dies on a signal."""
    pipeline = served.pipeline
    replies = pipeline.replies("b", from_beginning=False)
    request = pipeline.request(prompt=f"{POISON}: {TEXT}", timeout_ms=LONG_MS)
    pipeline.publish("b", request)
    assert replies.wait([request.request_id], END_S)[request.request_id].code == Code.POISON
    for child in psutil.Process(pid).children():
        if "inference_consumers.guardrails.process" in child.cmdline():
            os.kill(child.pid, signal.SIGSEGV)
    others = pipeline.replies("a", from_beginning=False)
    again = pipeline.request(prompt=TEXT, timeout_ms=LONG_MS)
    pipeline.publish("a", again)
    assert others.wait([again.request_id], END_S)[again.request_id].outcome == Outcome.REJECTED


def by_replay(served: Served) -> None:
    pipeline = served.pipeline
    replayed = cli(served, "dlq", "replay", "--topic", "work", "--tenant", pipeline.tenant("b"), "--json")
    assert '"replay_of"' in replayed


def cli(served: Served, *arguments: str) -> str:
    """What a command printed."""
    env = dict(os.environ) | served.pipeline.env | {"POSTGRES_DSN": served.database.owner_dsn}
    ran = subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", *arguments),
        cwd=PROJECT_ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def lag(served: Served) -> bool:
    """Whether the recorder has not recorded yet what is known to be settled."""
    return served.pipeline.processes["recorder-1"].metric("fairlane_recorder_lag_records") > 0


def leaks(sink: str | bytes) -> list[str]:
    data = sink.encode() if isinstance(sink, str) else sink
    return [text for text in PLANTED if text.encode() in data]


def test_the_search_finds_what_is_there(used: Served) -> None:
    """Its sinks are those of this run: the ids of its requests are in the logs, and the text is in its topic."""
    pipeline = used.pipeline
    topic = pipeline.reader(names.requests_topic(pipeline.tenant("a")))
    topic.read_to_end()
    values = [message.value() for message in topic.records]
    assert any(leaks(value or b"") for value in values)
    request_id = next((message.key() or b"").decode() for message in topic.records)
    assert any(request_id in process.log_file.read_text() for process in pipeline.processes.values())


def test_no_log_has_text(used: Served) -> None:
    for name, process in used.pipeline.processes.items():
        assert leaks(process.log_file.read_bytes()) == [], name


def test_no_metric_has_text(used: Served) -> None:
    for name, process in used.pipeline.processes.items():
        if process.alive:
            status, text = process.get("/metrics")
            assert (status, leaks(text)) == (200, []), name


def test_no_header_of_a_record_and_no_key_of_ours_has_text(used: Served) -> None:
    """The keys of requests are the tenants' own, and a dead letter has that of its original."""
    for message in everything(used):
        topic = message.topic() or ""
        assert leaks(repr(message.headers())) == [], topic
        if names.is_replies(topic) or names.is_priority(topic) or topic.startswith(("ledger.", "chunks.")):
            assert leaks(message.key() or b"") == [], topic


def test_no_decision_and_no_usage_has_text(used: Served) -> None:
    pipeline = used.pipeline
    audit, usage = pipeline.reader(names.LEDGER_AUDIT), pipeline.reader(names.LEDGER_USAGE)
    audit.read_to_end()
    usage.read_to_end()
    events = [*pipeline.decoded(audit, AuditEvent), *pipeline.decoded(usage, UsageEvent)]
    assert events
    assert [event for event in events if leaks(repr(event))] == []
    with psycopg.connect(used.database.owner_dsn) as connection:
        for table in ("audit_logs", "usage", "usage_daily", "tenants"):
            connection.execute("SELECT set_config('fairlane.tenant', '*', false)")
            rows = connection.execute(f"SELECT t::text FROM {table} AS t").fetchall()  # noqa: S608 - our own names
            assert rows, table
            assert [row for row in rows if leaks(row[0])] == [], table


def test_no_result_has_text_beside_its_output(used: Served) -> None:
    """The answer is the tenant's; everything else about it is about the request."""
    with psycopg.connect(used.database.owner_dsn) as connection:
        connection.execute("SELECT set_config('fairlane.tenant', '*', false)")
        rows = connection.execute("SELECT (to_jsonb(r) - 'output')::text FROM results AS r").fetchall()
    assert rows
    assert [row for row in rows if leaks(row[0])] == []


def test_no_listing_has_text(used: Served) -> None:
    pipeline = used.pipeline
    # Tests before this one may have left more letters than a list shows.
    of_tenant = ("dlq", "list", "--tenant", pipeline.tenant("b"))
    listed = cli(used, *of_tenant, "--json")
    assert json.loads(listed)["found"] > 0
    assert leaks(listed) == []
    assert leaks(cli(used, *of_tenant)) == []
    audit = pipeline.reader(names.LEDGER_AUDIT)
    audit.read_to_end()
    ids = {event.request_id for event in pipeline.decoded(audit, AuditEvent) if event.request_id}
    for request_id in sorted(ids)[:3]:
        assert leaks(cli(used, "explain", request_id)) == []


def test_no_answer_over_http_has_text_in_its_head_or_its_error(used: Served) -> None:
    with used.client("a") as client:
        for body in (used.chat(TEXT), used.chat(TEXT, n=7), used.chat(TEXT, no_such_field=TEXT)):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert leaks(repr(answer.headers)) == []
            assert leaks(answer.content) == []


def everything(served: Served) -> list[Message]:
    """Every committed record of this pipeline's topics and of those that it shares."""
    admin = AdminClient(connection(served.pipeline.settings))
    shared = (names.LEDGER_AUDIT, names.LEDGER_USAGE, names.DEAD_LETTER_WORK, names.DEAD_LETTER_REQUESTS)
    topics = [name for name in admin.list_topics(timeout=10).topics if served.pipeline.unique in name or name in shared]
    reader: LogReader = served.pipeline.reader(*topics)
    reader.read_to_end()
    return reader.records
