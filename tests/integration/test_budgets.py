"""Budgets from end to end: the bound over kills of dispatchers, by the sums in Postgres; what callers see over HTTP."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from fairlane import names
from fairlane.outcomes import Code, Outcome
from fairlane.records import Budget, InferenceReply, Price, TenantSpec
from fairlane_server.api_keys.key_store import ApiKeys
from tests.kit.gateway_kit import Served
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

# 2 nanos for a token of the prompt, 8 for one of the answer.
PRICE = Price(0, None, input_nanos=2_000_000, output_nanos=8_000_000)
LIMIT = 3_000
TENANTS = (
    TenantSpec("a", budgets=(Budget("tenant", "month", "XTS", hard_nanos=LIMIT),)),
    TenantSpec("soft", budgets=(Budget("tenant", "day", "XTS", soft_nanos=0),)),
    TenantSpec("none", budgets=(Budget("each_key", "day", "XTS", hard_nanos=60),)),
    # Refused whenever its spending is known, whatever that is.
    TenantSpec("never", budgets=(Budget("tenant", "month", "XTS", hard_nanos=0),)),
    TenantSpec("early", budgets=(Budget("tenant", "month", "XTS", hard_nanos=1_000_000),)),
)


@dataclass(frozen=True)
class Everything:
    """Two dispatchers, a consumer, a recorder, a gateway."""

    served: Served
    postgres_env: dict[str, str]

    @property
    def pipeline(self) -> Pipeline:
        return self.served.pipeline


@pytest.fixture(scope="module")
def everything(broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everything]:
    unique = unique_name()
    with (
        migrated_database(postgres, unique) as database,
        Pipeline(broker, tmp_path_factory.mktemp("budgets"), unique, tenants=TENANTS) as pipeline,
    ):
        with ApiKeys(database.owner_dsn) as keys:
            issued = {spec.tenant: keys.create(pipeline.tenant(spec.tenant), "tests").text for spec in TENANTS}
        served = Served(pipeline, database, issued)
        pipeline.price(PRICE)
        gateway = served.gateway()
        pipeline.recorder(postgres_dsn=database.recorder_dsn)
        env = {"POSTGRES_DSN": database.dispatcher_dsn}
        pipeline.start(dispatchers=2, env=env)
        gateway.wait_ready()
        yield Everything(served, env)


def unsettled_at_the_last_admission(answers: list[InferenceReply]) -> int:
    """The cost of the requests that were not settled, or whose usage may not have been read, when the last one was
    dispatched."""
    last_ms = max(reply.timings.dispatched_at_ms or 0 for reply in answers)
    not_read_ms = 2_000
    return sum(
        reply.cost.nanos
        for reply in answers
        if reply.cost is not None and (reply.timings.engine_finished_at_ms or 0) >= last_ms - not_read_ms
    )


def test_kills_of_dispatchers_do_not_break_the_bound(everything: Everything) -> None:
    pipeline = everything.pipeline
    replies = pipeline.replies("a")
    requests = [pipeline.request(prompt=f"request {number}") for number in range(300)]
    backfill = names.backfill_topic(pipeline.tenant("a"))
    for start in range(0, 300, 50):
        part = requests[start : start + 50]
        pipeline.publish("a", *part[::2])
        pipeline.write(backfill, [(one.request_id.encode(), pipeline.codec.encode(one)) for one in part[1::2]])
        replies.wait([request.request_id for request in part[:10:2]])
        if start in (0, 50, 100):
            pipeline.wait_all_own()
            victim = pipeline.processes[f"dispatcher-{1 + start // 50 % 2}"]
            victim.kill()
            victim.start()
            victim.wait_ready()
    answers = replies.wait([request.request_id for request in requests])

    def all_are_known() -> bool:
        again = [pipeline.request() for reply in answers.values() if reply.code == Code.BUDGET_UNKNOWN]
        pipeline.publish("a", *again)
        for request_id in [name for name, reply in answers.items() if reply.code == Code.BUDGET_UNKNOWN]:
            del answers[request_id]
        answers.update(replies.wait([request.request_id for request in again]))
        return all(reply.code != Code.BUDGET_UNKNOWN for reply in answers.values())

    # A dispatcher that has just started may not know what was spent: then, as a caller would, they try again.
    eventually(all_are_known, what="an answer to each that is final")
    outcomes = Counter((reply.outcome, reply.code) for reply in answers.values())
    assert set(outcomes) <= {
        (Outcome.OK, None),
        (Outcome.REJECTED, Code.INSUFFICIENT_QUOTA),
    }, outcomes
    assert outcomes[Outcome.REJECTED, Code.INSUFFICIENT_QUOTA] > 0

    answered = [reply for reply in answers.values() if reply.outcome == Outcome.OK]
    tables, tenant = Tables(everything.served.database), pipeline.tenant("a")
    query = "SELECT coalesce(sum(cost_nanos), 0)::bigint FROM usage_daily WHERE tenant = %s"
    paid = sum(reply.cost.nanos for reply in answered if reply.cost is not None)
    eventually(lambda: tables.rows(query, tenant) == [(paid,)], what="all usage in Postgres")
    assert LIMIT / 2 < paid <= LIMIT + unsettled_at_the_last_admission(answered)


def test_a_caller_is_refused_until_the_budget_renews(everything: Everything) -> None:
    served = everything.served
    with served.client("none") as client:
        assert client.post("/v1/requests?wait=60", json=served.question()).status_code == 200
        for path, body in (("/v1/requests?wait=60", served.question()), ("/v1/chat/completions", served.chat())):
            refused = client.post(path, json=body)
            assert refused.status_code == 429, refused.text
            error = refused.json()["error"]
            assert error["code"] == "insufficient_quota"
            assert "it renews at" in error["message"]
            assert "budget of key:" in error["message"]
            assert 0 < int(refused.headers["retry-after"]) <= 86_415
            assert refused.headers["x-fairlane-budget"].startswith("day; limit=hard; of=each_key; amount=0.00000006;")


def test_the_gateway_refuses_at_once_what_the_dispatcher_would_and_nothing_after_the_budget_is_raised(
    everything: Everything,
) -> None:
    served, pipeline = everything.served, everything.pipeline
    gateway, tenant = pipeline.processes["gateway-1"], pipeline.tenant("early")
    answers: dict[bool, httpx.Response] = {}

    with served.client("early") as client:

        def ask() -> httpx.Response:
            return client.post("/v1/requests?wait=60", json=served.question())

        def refused_early() -> float:
            return gateway.metric("fairlane_gateway_refused_early_total", code="insufficient_quota")

        def both_say_the_same() -> bool:
            before = refused_early()
            answer = ask()
            answers[refused_early() > before] = answer
            spent = {one.headers.get("x-fairlane-budget") for one in answers.values()}
            return len(answers) == 2 and len(spent) == 1

        def limit(hard_nanos: int) -> None:
            budget = Budget("tenant", "month", "XTS", hard_nanos=hard_nanos)
            pipeline.tenants[tenant] = TenantSpec(tenant, budgets=(budget,))
            pipeline.apply()

        # Each costs 42, so that another one alone would fit the budget that is then used up.
        assert [ask().status_code for _ in range(3)] == [200] * 3
        limit(100)
        eventually(both_say_the_same, what="a refusal by each of them")
        of_dispatcher, of_gateway = answers[False], answers[True]
        assert of_gateway.status_code == of_dispatcher.status_code == 429
        errors = [answer.json()["error"] for answer in (of_dispatcher, of_gateway)]
        told = [{name: error.get(name) for name in ("code", "message", "field")} for error in errors]
        assert told[0] == told[1]
        assert told[0]["code"] == "insufficient_quota"
        waits = [int(answer.headers["retry-after-ms"]) for answer in (of_dispatcher, of_gateway)]
        # Until the month ends, within the spread of all who come back then.
        assert abs(waits[0] - waits[1]) < 10_000 + 60_000
        names_of_headers = [{name.lower() for name in answer.headers} for answer in (of_dispatcher, of_gateway)]
        assert names_of_headers[0] == names_of_headers[1]

        limit(1_000_000)
        eventually(lambda: ask().status_code == 200, what="an answer within the new budget")
        before = refused_early()
        assert [ask().status_code for _ in range(5)] == [200] * 5
        assert refused_early() == before


def test_a_soft_budget_is_in_a_header_the_body_and_the_stored_result(everything: Everything) -> None:
    served = everything.served

    def noted(response: httpx.Response) -> bool:
        assert response.status_code == 200, response.text
        return "x-fairlane-budget" in response.headers

    with served.client("soft") as client:
        response = client.post("/v1/requests?wait=60", json=served.question())
        assert noted(response)
        assert response.json()["budget"]["limit"] == "soft"
        chat = client.post("/v1/chat/completions", json=served.chat())
        assert noted(chat)
        assert chat.json()["fairlane"]["budget"]["period"] == "day"
        request_id = response.json()["id"]
        tables = Tables(served.database)
        eventually(
            lambda: tables.rows("SELECT budget FROM results WHERE request_id = %s", request_id), what="its result"
        )
        ((stored,),) = tables.rows("SELECT budget FROM results WHERE request_id = %s", request_id)
        assert stored["limit"] == "soft"


def test_without_postgres_at_its_start_a_dispatcher_refuses_what_hard_budgets_are_about(
    everything: Everything,
) -> None:
    pipeline = everything.pipeline
    for number in (1, 2):
        pipeline.processes[f"dispatcher-{number}"].kill()
    pipeline.dispatcher(3, {"POSTGRES_DSN": "postgresql://nobody@127.0.0.1:1/nothing"}).wait_ready()
    replies = pipeline.replies("never", "soft", from_beginning=False)
    hard, soft = pipeline.request(), pipeline.request()
    pipeline.publish("never", hard)
    pipeline.publish("soft", soft)
    answers = replies.wait([hard.request_id, soft.request_id])
    assert answers[hard.request_id].code == Code.BUDGET_UNKNOWN
    assert answers[soft.request_id].outcome == Outcome.OK
    assert answers[soft.request_id].budget is None
    pipeline.processes["dispatcher-3"].kill()
    again = pipeline.processes["dispatcher-1"].start()
    again.wait_ready()
    codes: list[str | None] = []

    def is_known() -> bool:
        later = pipeline.request()
        pipeline.publish("never", later)
        codes.append(replies.wait([later.request_id])[later.request_id].code)
        return codes[-1] != Code.BUDGET_UNKNOWN

    # As long as the recorder is behind, which stores its offsets once a second and is slow on a busy machine.
    eventually(is_known, what="the spending")
    assert codes[-1] == Code.INSUFFICIENT_QUOTA
