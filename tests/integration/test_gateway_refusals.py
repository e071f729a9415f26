"""What a gateway answers before anything is published, and what when the answer does not come in time; with the
dispatcher and a consumer whose engine is slow."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fairlane.names import requests_topic
from fairlane.outcomes import Code
from fairlane.records import TenantSpec
from tests.kit.gateway_kit import Served, serving
from tests.kit.log_reader import LogReader
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

WORDS_PER_S = 10
LONG_WORDS = 50
"""Five seconds of the engine's time by itself, and more beside others: longer than a call waits here."""
DAY_MS = 86_400_000
"""Whatever waits before it, it has the time."""
SHORT_MS = 5_000
"""A pool that was just lost is not expected back so soon."""


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(
        broker,
        postgres,
        tmp_path_factory.mktemp("refusals"),
        redis_url=redis_url,
        env={"SIMULATED_DECODE_TOKENS_PER_S": str(WORDS_PER_S)},
        gateway_env={"GATEWAY_WAIT_S": "1"},
        tenants=("a", "b", TenantSpec("small", max_queue_requests=2)),
    ) as served:
        yield served


@pytest.fixture(scope="module")
def gateway(served: Served) -> ServiceProcess:
    return served.pipeline.processes["gateway-1"]


class Log:
    """A tenant's requests as they are in the log."""

    def __init__(self, served: Served, tenant: str) -> None:
        self._reader: LogReader = served.pipeline.reader(requests_topic(served.pipeline.tenant(tenant)))

    def ids(self) -> list[str]:
        """All of them by now."""
        self._reader.read_to_end()
        return [(record.key() or b"").decode() for record in self._reader.records]


def question(served: Served, timeout_ms: int) -> dict[str, Any]:
    body = served.question() | {"timeout_ms": timeout_ms}
    return body | {"parameters": {"max_tokens": LONG_WORDS}}


def refused(client: httpx.Client, log: Log, body: dict[str, Any], code: str) -> list[httpx.Response]:
    """Send until this refusal comes; the others were accepted, and only those are in the log."""
    answers: list[httpx.Response] = []
    known = log.ids()

    def is_refused() -> bool:
        answer = client.post("/v1/requests", json=body)
        assert answer.status_code in (202, 429, 503), answer.text
        answers.append(answer)
        return bool(answer.status_code != 202 and answer.json()["error"]["code"] == code)

    eventually(is_refused, what=f"a refusal as {code}")
    accepted = [answer.json()["id"] for answer in answers if answer.status_code == 202]
    assert sorted(log.ids()) == sorted(known + accepted)
    return [answer for answer in answers if answer.status_code != 202 and answer.json()["error"]["code"] == code]


def refused_early(gateway: ServiceProcess, code: str) -> float:
    """How many it has refused like that by itself."""
    return gateway.metric("fairlane_gateway_refused_early_total", code=code)


def test_who_waits_too_long_is_told_the_id_and_finds_the_result_there(served: Served) -> None:
    with served.client() as client:
        answer = client.post("/v1/chat/completions", json=served.chat(max_tokens=LONG_WORDS))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        request_id = answer.headers["x-request-id"]
        assert request_id in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        line = served.call_line(request_id)
        assert (line["status"], line["outcome"], line["code"]) == (504, "pending", "timeout")
        path = f"/v1/results/{request_id}"
        eventually(lambda: client.get(path).status_code == 200, 2 * PATIENCE_S, "the result")
        result = client.get(path).json()
    assert (result["id"], result["outcome"]) == (request_id, "ok")
    assert len(result["output"]["text"].split()) == LONG_WORDS


def test_who_has_a_full_queue_is_refused_at_once(served: Served, gateway: ServiceProcess) -> None:
    log, before = Log(served, "small"), refused_early(gateway, Code.OVERLOADED)
    with served.client("small") as client:
        answers = refused(client, log, question(served, DAY_MS), Code.OVERLOADED)
    assert {answer.status_code for answer in answers} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert refused_early(gateway, Code.OVERLOADED) >= before + len(answers)
    line = served.call_line(answers[-1].headers["x-request-id"])
    assert (line["status"], line["outcome"], line["code"]) == (429, "refused", Code.OVERLOADED)
    assert line["tenant"] == served.pipeline.tenant("small")


def test_what_cannot_be_done_in_its_time_is_refused_at_once(served: Served, gateway: ServiceProcess) -> None:
    # The engine has the work of the test before it for longer than that.
    before = refused_early(gateway, Code.DEADLINE_UNMEETABLE)
    with served.client("b") as client:
        answers = refused(client, Log(served, "b"), question(served, SHORT_MS), Code.DEADLINE_UNMEETABLE)
    assert {answer.status_code for answer in answers} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert refused_early(gateway, Code.DEADLINE_UNMEETABLE) >= before + len(answers)


# The last one: no engine comes back.


def test_a_pool_that_lost_its_last_consumer_is_told_to_who_cannot_wait(served: Served, gateway: ServiceProcess) -> None:
    before = refused_early(gateway, "no_capacity")
    served.consumer.kill()
    with served.client("b") as client:
        answers = refused(client, Log(served, "b"), question(served, SHORT_MS), "no_capacity")
        # There is time enough for another consumer to come.
        assert client.post("/v1/requests", json=question(served, DAY_MS)).status_code == 202
    assert {answer.status_code for answer in answers} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert refused_early(gateway, "no_capacity") >= before + len(answers)
    line = served.call_line(answers[-1].headers["x-request-id"])
    assert (line["status"], line["outcome"], line["code"]) == (503, "refused", "no_capacity")
