"""Whatever a tenant writes on its topic: a refusal that names the field or a dead letter, an audit event, and good
requests around it that are all answered, once. One running pipeline on the real broker for all of it."""

import random
import signal
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from deploy.local.stack import LocalStack
from fairlane import headers, names
from fairlane.codec import DecodeProblem
from fairlane.kafka_config import transactional_producer
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import SourceCoordinate, TenantSpec
from tests.kit.answers_bench import Bench, source_of
from tests.kit.bad_requests import BAD_IDS, GARBAGE, SECRET, WRONG
from tests.kit.deployment import model_per_task
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, header, unique_name

pytestmark = pytest.mark.broker

TENANTS = (
    TenantSpec("a", services=("search",)),
    TenantSpec("b"),
    TenantSpec("no-high", classes=("normal", "low")),
    TenantSpec("no-models", models=("none-of-ours",)),
)
MUTATIONS = 300

Written = dict[str, tuple[bytes | None, SourceCoordinate]]


@pytest.fixture(scope="module")
def bench(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder, unique = tmp_path_factory.mktemp("bad-input"), unique_name()
    models = model_per_task(unique, f"{unique}-pool")
    with (
        LocalStack(data_dir=folder / "redis", parts=("redis",), environ={}) as redis,
        Pipeline(
            broker, folder, unique, tenants=TENANTS, models=models, redis_url=redis.endpoints.redis_url
        ) as pipeline,
    ):
        audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
        letters = pipeline.reader(names.DEAD_LETTER_REQUESTS, from_beginning=False)
        pipeline.start()
        topics = [names.replies_topic(tenant) for tenant in pipeline.tenants]
        topics.append(names.replies_topic(pipeline.tenant("a"), "search"))
        replies = Replies(pipeline.reader(*topics), pipeline.codec)
        yield Bench(pipeline, redis, replies, audit, letters)


@pytest.fixture
def surrounded(bench: Bench) -> Iterator[Bench]:
    """Good requests of two tenants before and after whatever the test writes; all are answered in the end."""
    bench.publish_good()
    yield bench
    bench.publish_good()
    bench.check_answers()


@pytest.fixture(scope="module")
def written(bench: Bench) -> Written:
    """Every bad record by the name of its case, written between good requests: its bytes and where it stands."""
    pipeline = bench.pipeline
    values = {name: garbage(pipeline) for name, _, garbage in GARBAGE}
    requests = {name: change(pipeline) for name, _, _, change in WRONG}
    requests |= {name: pipeline.request(request_id=request_id) for name, request_id in BAD_IDS}
    bench.expected |= {request.request_id[:128]: 1 for request in requests.values()}
    values |= {name: pipeline.codec.encode(request) for name, request in requests.items()}

    topic, found = names.requests_topic(pipeline.tenant("a")), {}
    for name, value in values.items():
        bench.publish_good()
        found[name] = value, pipeline.write(topic, [(b"the key", value)])[0]
    bench.publish_good()
    bench.check_answers()
    bench.read_to_end()
    return found


@pytest.mark.parametrize(("name", "problem"), [case[:2] for case in GARBAGE], ids=[case[0] for case in GARBAGE])
def test_undecodable_bytes_become_a_dead_letter(
    bench: Bench, written: Written, name: str, problem: DecodeProblem
) -> None:
    value, source = written[name]
    letter = bench.letter_of(source)
    assert (letter.key(), letter.value()) == (b"the key", value or b"")
    assert header(letter, headers.DLT_EXCEPTION_CLASS) == "fairlane.codec.DecodeError"
    assert header(letter, headers.DLT_EXCEPTION_MESSAGE).startswith(f"{problem}: ")
    assert int(header(letter, headers.DLT_ORIGINAL_TIMESTAMP)) > 0
    assert SECRET not in repr(letter.headers())

    event = bench.audit_of(source)
    assert (event.decision, event.code) == (Decision.DEAD_LETTERED, problem)
    assert SECRET not in repr(event)


@pytest.mark.parametrize(("name", "code", "wrong"), [case[:3] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_request_is_refused_by_field(bench: Bench, written: Written, name: str, code: Code, wrong: str) -> None:
    source = written[name][1]
    topic, reply = bench.reply_to(source)
    assert (reply.outcome, reply.code, reply.field) == (Outcome.REJECTED, code, wrong)
    assert reply.message
    assert (topic, reply.tenant) == (names.replies_topic(reply.tenant), bench.pipeline.tenant("a"))
    assert SECRET not in repr(reply)

    event = bench.audit_of(source)
    assert (event.decision, event.code, event.inputs["field"]) == (Decision.REFUSED, code, wrong)
    assert event.request_id == reply.request_id
    assert SECRET not in repr(event)


@pytest.mark.parametrize(("name", "request_id"), BAD_IDS, ids=[case[0] for case in BAD_IDS])
def test_a_bad_request_id_is_refused(bench: Bench, written: Written, name: str, request_id: str) -> None:
    source = written[name][1]
    _, reply = bench.reply_to(source)
    assert (reply.outcome, reply.code, reply.field) == (Outcome.REJECTED, Code.INVALID, "request_id")
    # The id is what is wrong, so it is repeated in part only.
    assert reply.request_id == request_id[:128]
    assert bench.audit_of(source).code == Code.INVALID


@pytest.mark.parametrize(
    ("tenant", "priority", "wrong"), [("no-high", "high", "priority"), ("no-models", "normal", "model")]
)
def test_what_a_tenant_may_not_use_is_refused(surrounded: Bench, tenant: str, priority: str, wrong: str) -> None:
    request = surrounded.pipeline.request(priority=priority)
    surrounded.expected[request.request_id] = 1
    surrounded.pipeline.publish(tenant, request)

    reply = surrounded.replies.wait([request.request_id])[request.request_id]
    assert (reply.outcome, reply.code, reply.field) == (Outcome.REJECTED, Code.FORBIDDEN, wrong)


@pytest.mark.parametrize(("timeout_ms", "outcome"), [(60_000, Outcome.OK), (0, Outcome.REJECTED)])
def test_a_registered_service_is_answered_on_its_own_topic(
    surrounded: Bench, timeout_ms: int, outcome: Outcome
) -> None:
    topic = names.replies_topic(surrounded.pipeline.tenant("a"), "search")
    request = surrounded.pipeline.request(reply_to=topic, timeout_ms=timeout_ms)
    surrounded.expected[request.request_id] = 1
    surrounded.pipeline.publish("a", request)

    assert surrounded.replies.wait([request.request_id])[request.request_id].outcome == outcome
    assert surrounded.replies.topic_of[request.request_id] == topic


def test_what_an_upstream_transaction_aborted_is_never_dispatched(surrounded: Bench) -> None:
    pipeline = surrounded.pipeline
    topic = names.requests_topic(pipeline.tenant("a"))
    producer = Producer(transactional_producer(pipeline.settings, f"{pipeline.unique}-upstream", 10_000))
    producer.init_transactions(10)
    for committed in (False, True, False):
        requests = [pipeline.request(prompt=SECRET) for _ in range(5)]
        producer.begin_transaction()
        for request in requests:
            producer.produce(topic, pipeline.codec.encode(request), request.request_id)
        producer.flush(10)  # the broker has them before the transaction ends
        surrounded.expected |= {request.request_id: int(committed) for request in requests}
        if committed:
            producer.commit_transaction(10)
        else:
            producer.abort_transaction(10)


def test_a_repeated_request_id_is_run_once(surrounded: Bench) -> None:
    pipeline = surrounded.pipeline
    request = pipeline.request(prompt=SECRET)
    surrounded.expected[request.request_id] = 1
    first, *again = pipeline.publish("a", request, request, request)
    surrounded.replies.wait([request.request_id])
    again += pipeline.publish("a", request)

    for source in again:
        event = surrounded.audit_of(source)
        assert event.decision == Decision.DUPLICATE
        assert event.message == f"first at {first.topic}-{first.partition}@{first.offset}"


def test_another_tenant_may_use_the_same_request_id(surrounded: Bench) -> None:
    request = surrounded.pipeline.request()
    surrounded.expected[request.request_id] = 2
    surrounded.pipeline.publish("a", request)
    surrounded.pipeline.publish("b", request)


def test_mutated_requests_each_come_to_one_end(surrounded: Bench) -> None:
    """Every byte of a good request may be another one. Nothing is lost, nothing ends twice, nothing stops."""
    pipeline, chance = surrounded.pipeline, random.Random(7)
    values = []
    for _ in range(MUTATIONS):
        value = bytearray(pipeline.codec.encode(pipeline.request(prompt=SECRET, metadata={"note": "x"})))
        for _ in range(chance.choice((1, 1, 2, 5))):
            value[chance.randrange(len(value))] = chance.randrange(256)
        values.append((None, bytes(value)))
    sources = pipeline.write(names.requests_topic(pipeline.tenant("a")), values)

    wanted = {source.offset for source in sources}

    def ends() -> list[int]:
        surrounded.replies.read_to_end()
        surrounded.letters.read_to_end()
        replies = (reply for found in surrounded.replies.by_id.values() for reply in found)
        answered = [reply.source for reply in replies if reply.source in sources]
        buried = [source_of(letter) for letter in pipeline.dead_letters(surrounded.letters)]
        return sorted(source.offset for source in (*answered, *buried) if source in sources)

    surrounded.letters.wait(lambda: wanted <= set(ends()), what="an end for every mutation")
    assert ends() == sorted(wanted)


def test_no_prompt_is_logged(bench: Bench) -> None:
    logs = "".join(process.log() for process in bench.pipeline.processes.values())
    assert "assigned" in logs
    assert SECRET not in logs


def test_a_redis_that_hangs_stops_nothing(surrounded: Bench) -> None:
    """Its time-out is short, and a request whose id was not looked up goes on."""
    surrounded.redis.supervisor.kill("redis", signal.SIGSTOP)
    try:
        surrounded.publish_good()
        surrounded.check_answers()
    finally:
        surrounded.redis.supervisor.kill("redis", signal.SIGCONT)


def test_without_redis_duplicates_pass(surrounded: Bench) -> None:
    surrounded.redis.stop()
    request = surrounded.pipeline.request()
    surrounded.expected[request.request_id] = 2
    surrounded.pipeline.publish("a", request, request)
    surrounded.check_answers()
    assert surrounded.pipeline.processes["dispatcher-1"].events("duplicate_index_unavailable")


def test_the_processes_lived_through_all_of_it(bench: Bench) -> None:
    bench.publish_good()
    bench.check_answers()
    assert {name: process.stop() for name, process in bench.pipeline.processes.items()} == dict.fromkeys(
        bench.pipeline.processes, 0
    )
