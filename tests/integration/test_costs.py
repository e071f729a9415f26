"""Costs from end to end: prices take effect without a restart, replies and usage carry the same cost, and the sums of
the day equal them, over kills."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairlane import names
from fairlane.records import Cost, ModelPrices, Price, UsageEvent
from fairlane_server.costs.price_book import PriceBook
from tests.kit.gateway_kit import Served, serving
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

PRICE = Price(0, None, input_nanos=2_000_000, output_nanos=8_000_000, cached_answer_nanos=700)
DEARER = Price(0, None, input_nanos=20_000_000, output_nanos=80_000_000, cached_answer_nanos=700)


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("costs"), redis_url=redis_url) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def answered(client: httpx.Client, served: Served, text: str = "what is a watermark?", **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/requests?wait=60", json=served.question(text) | fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def cost_by_hand(reply: dict[str, Any], price: Price) -> dict[str, str]:
    usage = reply["usage"]
    nanos = usage["prompt_tokens"] * price.input_nanos + usage["completion_tokens"] * price.output_nanos
    return {"amount": Cost(nanos // 10**6, "XTS").amount, "currency": "XTS"}


def priced(served: Served, client: httpx.Client, price: Price) -> None:
    """Publish a price; when this returns, the consumer and the dispatcher know it."""
    dispatcher = served.pipeline.processes["dispatcher-1"]
    read = len(dispatcher.events("prices_read"))
    served.pipeline.price(price)

    def is_known() -> bool:
        reply = answered(client, served)
        return bool(reply.get("cost") == cost_by_hand(reply, price))

    eventually(is_known, what="the price at the consumer")
    eventually(lambda: len(dispatcher.events("prices_read")) > read, what="the price at the dispatcher")


def ledger(served: Served) -> list[UsageEvent]:
    """All usage of this pipeline."""
    reader = served.pipeline.reader(names.LEDGER_USAGE)
    reader.read_to_end()
    return served.pipeline.decoded(reader, UsageEvent)


def fairlane(served: Served, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", *arguments),
        env={
            "KAFKA_BOOTSTRAP_SERVERS": served.pipeline.env["KAFKA_BOOTSTRAP_SERVERS"],
            "POSTGRES_DSN": served.database.operator_dsn,
            "MODELS_FILE": served.pipeline.env["MODELS_FILE"],
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_prices_take_effect_without_a_restart_and_never_for_what_is_recorded(
    served: Served, client: httpx.Client
) -> None:
    assert "cost" not in answered(client, served), "nobody has said what it costs"
    priced(served, client, PRICE)
    before = answered(client, served)
    priced(served, client, DEARER)
    after = answered(client, served)
    assert before["cost"] == cost_by_hand(before, PRICE) != after["cost"] == cost_by_hand(after, DEARER)
    # The first reply is what it was, from wherever it is read.
    tables = Tables(served.database)
    eventually(lambda: tables.rows("SELECT 1 FROM results WHERE request_id = %s", before["id"]), what="its row")
    assert client.get(f"/v1/results/{before['id']}").json()["cost"] == before["cost"]
    (row,) = tables.rows("SELECT cost_nanos, currency FROM results WHERE request_id = %s", before["id"])
    assert Cost(*row).amount == before["cost"]["amount"]


def test_the_caller_is_named_by_the_id_of_its_key_and_never_by_the_key(served: Served, client: httpx.Client) -> None:
    reply = answered(client, served)
    key_id, secret = served.keys["a"].removeprefix("fl_").split("_", 1)
    (event,) = [event for event in ledger(served) if event.request_id == reply["id"]]
    assert event.requested_by == f"key:{key_id}"
    assert secret not in repr(event)


def test_reply_usage_table_sums_and_command_agree_over_kills(served: Served, client: httpx.Client) -> None:
    priced(served, client, PRICE)
    pipeline = served.pipeline
    replies = pipeline.replies("a", "b")
    requests = [pipeline.request(prompt=f"request {number}") for number in range(60)]
    for start in range(0, 60, 20):
        pipeline.publish("a", *requests[start : start + 20 : 2])
        pipeline.publish("b", *requests[start + 1 : start + 20 : 2])
        process = (served.consumer, pipeline.processes["recorder-1"], pipeline.processes["dispatcher-1"])[start // 20]
        process.kill()
        process.start()
    answers = replies.wait([request.request_id for request in requests])
    for process in pipeline.processes.values():
        process.wait_ready()

    events = {event.request_id: event for event in ledger(served)}
    book = PriceBook([ModelPrices(pipeline.model_for("generate"), "XTS", (PRICE,))])
    for request in requests:
        reply, event = answers[request.request_id], events[request.request_id]
        assert reply.cost == event.cost == book.cost_of(event)
        assert reply.cost is not None
        assert reply.cost.nanos > 0

    # The recorder records every tenant of the broker.
    tables, all_events, ours = Tables(served.database), ledger(served), list(pipeline.tenants)
    mine = "FROM usage WHERE tenant = ANY(%s)"
    eventually(
        lambda: tables.rows(f"SELECT count(*) {mine}", ours)[0][0] == len(all_events),
        what="all usage in Postgres",
    )
    nanos = sum(event.cost.nanos for event in all_events if event.cost)
    assert tables.rows(f"SELECT sum(cost_nanos) {mine}", ours) == [(nanos,)]
    told = fairlane(served, "costs", "--by", "tenant,model,day,class", "--json")
    assert told.returncode == 0, told.stderr
    costs = [one for one in json.loads(told.stdout)["costs"] if one["tenant"] in ours]
    assert {one["tenant"] for one in costs} == set(ours)
    assert sum(one["requests"] for one in costs) == len(all_events)
    assert sum(one["cost_nanos"] or 0 for one in costs) == nanos

    # Each tenant sees its own.
    for tenant in ("a", "b"):
        with served.client(tenant) as caller:
            page = caller.get("/v1/usage", params={"by": "model"}).json()
        own = [event for event in all_events if event.tenant == pipeline.tenant(tenant)]
        assert sum(one["requests"] for one in page["data"]) == len(own)


def test_a_cached_answer_costs_its_own_price(served: Served, client: httpx.Client) -> None:
    priced(served, client, PRICE)

    def repeated() -> dict[str, Any]:
        return answered(client, served, "the very same question", cache="exact")

    repeated()
    eventually(lambda: "cache" in repeated(), what="an answer from the cache")
    reply = repeated()
    assert reply["cost"] == {"amount": "0.0000007", "currency": "XTS"}
    (event,) = [event for event in ledger(served) if event.request_id == reply["id"]]
    assert (event.cached, event.cost) == (True, Cost(700, "XTS"))


def test_prices_are_published_from_a_file_and_taken_back(served: Served, client: httpx.Client, tmp_path: Path) -> None:
    model = served.pipeline.model_for("generate")
    file = tmp_path / "prices.yaml"
    file.write_text(
        f"currency: XTS\nprices:\n  - {{model: {model}, from: 2020-01-01, per_million_tokens: {{output: 5}}}}\n"
    )
    env = {"PRICES_FILE": str(file)}
    told = fairlane(served, "prices", "apply", env=env)
    assert told.returncode == 0, told.stderr
    assert f"model {model}: published" in told.stdout
    assert "1 unchanged" in fairlane(served, "prices", "apply", env=env).stdout
    listed = json.loads(fairlane(served, "prices", "list", "--json").stdout)
    (mine,) = [one for one in listed["models"] if one["model"] == model]
    assert (mine["currency"], mine["prices"][0]["output_nanos"]) == ("XTS", 5 * 10**9)

    def costs() -> object:
        return answered(client, served).get("cost", {}).get("amount")

    eventually(lambda: costs() == Cost(4 * 5_000, "XTS").amount, what="the price of the file")
    file.write_text("currency: XTS\nprices: []\n")
    told = fairlane(served, "prices", "apply", "--delete", env=env)
    assert f"model {model}: withdrawn" in told.stdout
    assert f"model {model} has no price in {file}" in told.stderr
    eventually(lambda: costs() is None, what="no price")
