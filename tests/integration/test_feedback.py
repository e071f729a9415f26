"""Feedback through real processes: from the gateway and from a tenant on Kafka alone, to rows and scores."""

from collections.abc import Iterator

import httpx
import pytest

from fairlane.client import Client
from fairlane.clock import now_ms
from fairlane.names import LEDGER_FEEDBACK, requests_topic
from fairlane.records import Feedback, TenantSpec
from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import parse_key
from fairlane_server.postgres.feedback_scores import feedback_scores
from tests.kit.gateway_kit import Served, serving
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.broker

ROWS = (
    "SELECT thumb, rating, correction, comment, given_by, model, model_version, arm FROM feedback "
    "WHERE request_id = %s ORDER BY given_by"
)


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    tenants = (TenantSpec("a", evaluation="allowed"), "b")
    folder = tmp_path_factory.mktemp("feedback")
    with serving(broker, postgres, folder, redis_url=redis_url, tenants=tenants) as served:
        yield served


def given(http: httpx.Client, **body: object) -> httpx.Response:
    """The answer to feedback, when there is one: on a busy machine a look-up may take too long, which is a 503."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(http.post("/v1/feedback", json=body))
        return answers[-1].status_code != 503

    eventually(answered, what="an answer")
    return answers[-1]


def test_feedback_of_both_ways_counts_and_that_of_others_does_not(served: Served, broker: str) -> None:
    tables, tenant = Tables(served.database), served.pipeline.tenant("a")
    ledger = served.pipeline.reader(LEDGER_FEEDBACK, from_beginning=False)
    with served.client("a") as http, served.client("b") as other:
        answer = http.post("/v1/requests", json=served.question(), params={"wait": PATIENCE_S})
        assert answer.status_code == 200, answer.text
        asked = answer.json()["id"]
        eventually(lambda: tables.count(tenant) == 1, what="the result")
        assert given(http, request_id=asked, thumb="down", correction="better", comment="no").status_code == 202
        foreign, unknown = (given(other, request_id=one, thumb="up") for one in (asked, asked[:-4] + "ffff"))
        assert (foreign.status_code, foreign.json()) == (unknown.status_code, unknown.json())
        assert foreign.status_code == 404
    # A tenant with a connection to Kafka alone writes where it writes its requests.
    with Client(tenant, broker) as mine, Client(served.pipeline.tenant("b"), broker) as theirs:
        theirs.feedback(asked, thumb="up")
        for score in (0.25, 0.75, 0.75):
            mine.feedback(asked, score=score, given_by="person-7")
    ledger.wait(lambda: len(ledger.records) >= 5, what="what was passed on")
    passed_on = [served.pipeline.codec.decode_as(Feedback, one.value()) for one in ledger.records]
    assert {one.tenant for one in passed_on} == {tenant, served.pipeline.tenant("b")}
    assert all(one.given_at_ms > now_ms() - 600_000 for one in passed_on)
    model = served.pipeline.model_for("generate")
    key = parse_key(served.keys["a"])
    assert key is not None
    wanted = [
        ("up", 1.0, None, None, "", None, None, None),
        ("down", 0.0, "better", "no", f"key:{key.key_id}", model, "1", "champion"),
        (None, 0.75, None, None, "person-7", model, "1", "champion"),
    ]

    def rows() -> list[tuple[object, ...]]:
        return tables.rows(ROWS, asked)

    eventually(lambda: rows() == wanted, what="the rows")
    settings = Settings(postgres_dsn=served.database.operator_dsn)
    (sums,) = feedback_scores(settings, now_ms() - 600_000)
    assert (sums.model, sums.model_version, sums.count, sums.mean) == (model, "1", 1, 0.375)
    # A recorder that is killed and reads on adds nothing, and looks for what is to be labelled when it starts.
    recorder = next(one for name, one in served.pipeline.processes.items() if name.startswith("recorder"))
    recorder.kill()
    recorder.start().wait_ready()
    with Client(tenant, broker) as mine:
        mine.feedback(asked, thumb="up", given_by="person-8")
    eventually(lambda: len(rows()) == 4, what="the row of after")
    assert rows()[:3] == wanted
    query = "SELECT tenant, request_id, origin, input->>'prompt', output->'text' IS NOT NULL FROM label_items"
    eventually(lambda: tables.rows(query), what="the item to be labelled")
    prompt = served.question()["input"]["prompt"]
    assert tables.rows(query) == [(tenant, asked, "feedback", prompt, True)]


def test_invalid_feedback_is_refused_in_the_audit_and_nothing_stops(served: Served, broker: str) -> None:
    tables, tenant = Tables(served.database), served.pipeline.tenant("b")
    bad = Feedback("0b6f9c1e-5d0a-4c57-9f43-2a7c61d0e001", thumb="sideways", comment="what nobody may read")
    producer = served.pipeline.producer
    producer.produce(requests_topic(tenant), served.pipeline.codec.encode(bad), bad.request_id.encode())
    producer.flush(PATIENCE_S)
    query = "SELECT message, inputs->>'field' FROM audit_logs WHERE request_id = %s"
    eventually(lambda: tables.rows(query, bad.request_id), what="the refusal")
    assert tables.rows(query, bad.request_id) == [("feedback: must be up or down", "thumb")]
    with served.client("b") as http:
        answer = http.post("/v1/requests", json=served.question(), params={"wait": PATIENCE_S})
    assert answer.status_code == 200
