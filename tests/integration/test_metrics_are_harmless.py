"""Metrics never matter to a request: scrapers that hang or never read, a port that is taken."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import pytest

from deploy.local.services import HOST
from fairlane.outcomes import Outcome
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

SCRAPERS = 15


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path_factory.mktemp("metrics"), unique_name(), tenants=("a",)) as pipeline:
        pipeline.start()
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


def answers(pipeline: Pipeline, replies: Replies, count: int = 50) -> None:
    """So many requests are answered, in time, once."""
    requests = [pipeline.request() for _ in range(count)]
    pipeline.publish("a", *requests)
    found = replies.wait(request.request_id for request in requests)
    assert {reply.outcome for reply in found.values()} == {Outcome.OK}


def connect(process: ServiceProcess) -> socket.socket:
    return socket.create_connection((HOST, process.metrics_port), timeout=5)


def silent(process: ServiceProcess) -> socket.socket:
    """Connects and says nothing."""
    return connect(process)


def slow(process: ServiceProcess) -> socket.socket:
    """Asks half a question."""
    scraper = connect(process)
    scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: te")
    return scraper


def deaf(process: ServiceProcess) -> socket.socket:
    """Asks and never reads the answer."""
    scraper = socket.socket()
    scraper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    scraper.settimeout(5)
    scraper.connect((HOST, process.metrics_port))
    scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    return scraper


def rude(process: ServiceProcess) -> socket.socket:
    """Speaks no HTTP."""
    scraper = connect(process)
    scraper.sendall(b"\x16\x03\x01\x00\xff" * 100)
    return scraper


@contextmanager
def many(process: ServiceProcess, scraper: Callable[[ServiceProcess], socket.socket]) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(SCRAPERS):
            stack.enter_context(closing(scraper(process)))
        yield


def test_health_ready_and_metrics(pipeline: Pipeline, replies: Replies) -> None:
    answers(pipeline, replies, 3)
    conditions = {"dispatcher": {"feeds", "producer", "assignment"}, "consumer": {"engines", "producer", "assignment"}}
    families = {
        "dispatcher": ("fairlane_requests_read_total", "fairlane_decisions_total", "fairlane_transaction_seconds"),
        "consumer": ("fairlane_replies_total", "fairlane_batch_items", "fairlane_prefetched_items"),
    }
    for name, process in pipeline.processes.items():
        kind = name.partition("-")[0]
        status, body = process.get("/health")
        assert (status, json.loads(body)) == (200, {"status": "alive"})
        status, body = process.get("/health/ready")
        assert (status, json.loads(body)) == (
            200,
            {"status": "ready", "conditions": dict.fromkeys(conditions[kind]), "degraded": {}},
        )
        status, body = process.get("/metrics")
        assert status == 200
        for family in (*families[kind], "fairlane_ready 1.0", "process_resident_memory_bytes"):
            assert family in body
        assert process.get("/")[0] == 404

    dispatcher, consumer = pipeline.processes.values()
    assert dispatcher.metric("fairlane_requests_read_total", tenant=pipeline.tenant("a")) >= 3
    assert consumer.metric("fairlane_replies_total", outcome="ok") >= 3


@pytest.mark.parametrize("scraper", [silent, slow, deaf, rude])
def test_a_bad_scraper_changes_no_outcome(
    pipeline: Pipeline, replies: Replies, scraper: Callable[[ServiceProcess], socket.socket]
) -> None:
    dispatcher, consumer = pipeline.processes.values()
    with many(dispatcher, scraper), many(consumer, scraper):
        answers(pipeline, replies)
        for process in (dispatcher, consumer):
            assert process.get("/metrics")[0] == 200
    assert dispatcher.alive
    assert consumer.alive


def test_a_taken_port_changes_no_outcome(pipeline: Pipeline, replies: Replies) -> None:
    dispatcher, consumer = pipeline.processes.values()
    with ExitStack() as stack:
        for process in (dispatcher, consumer):
            assert process.stop() == 0
            stack.enter_context(closing(socket.create_server((HOST, process.metrics_port))))
            process.start()
        for process in (dispatcher, consumer):
            told = partial(process.events, "metrics_port_unavailable")
            eventually(told, 20, f"what {process.name} says of its port")
        pipeline.wait_all_own()
        answers(pipeline, replies)
        assert [process.stop() for process in (dispatcher, consumer)] == [0, 0]
