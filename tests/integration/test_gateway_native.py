"""The native routes of a real gateway, with everything behind it: sent, followed, found again, cancelled, listed."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from fairlane.names import requests_topic
from fairlane.records import CancelRequest
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("native"), redis_url=redis_url, each_task=True) as served:
        # A consumer that is paused stays a member.
        served.pipeline.lengthen_session(60)
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def question(served: Served, text: str = "what is a watermark?", **parameters: Any) -> dict[str, Any]:
    model = served.pipeline.model_for("generate")
    return {
        "model": model,
        "input": {"prompt": text},
        "parameters": {"max_tokens": 8} | parameters,
        "timeout_ms": LONG_MS,
    }


def posted(client: httpx.Client, body: dict[str, Any]) -> dict[str, str]:
    """Its links, with its id."""
    answer = client.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    accepted = answer.json()
    return {"id": accepted["id"], **accepted["links"]}


def read(client: httpx.Client, path: str, **parameters: Any) -> httpx.Response:
    """The answer to a GET, when there is one: on a busy machine a look-up may take too long, which is a 503."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(client.get(path, **parameters))
        return answers[-1].status_code != 503

    eventually(answered, what=f"an answer from {path}")
    return answers[-1]


def told(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Every event to the end."""
    events, name = [], ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append((name, json.loads(line.removeprefix("data: "))))
    return events


def test_a_request_is_found_from_its_acceptance_to_its_result(served: Served, client: httpx.Client) -> None:
    links = posted(client, question(served))
    assert read(client, links["self"]).json()["status"] in {"queued", "running", "finishing", "done"}
    eventually(lambda: read(client, links["result"]).status_code == 200, what="the result")
    result = read(client, links["result"]).json()
    assert (result["id"], result["outcome"]) == (links["id"], "ok")
    assert result["output"]["text"]

    def decisions() -> list[str]:
        return [event["event"] for event in read(client, links["self"]).json()["events"]]

    # The recorder comes a little later than the reply.
    eventually(lambda: {"dispatched", "replied"} <= set(decisions()), what="the story")
    status = read(client, links["self"]).json()
    assert (status["status"], status["outcome"]) == ("done", "ok")
    assert status["submitted_at_ms"] <= status["ended_at_ms"]
    assert served.chat()["messages"][0]["content"] not in json.dumps(status)

    def listed() -> set[str]:
        page = read(client, "/v1/requests", params={"model": result["model"], "limit": 100}).json()
        return {one["id"] for one in page["data"]}

    # What was told of the reply may have been the reply itself.
    eventually(lambda: links["id"] in listed(), what="its row")
    with served.client("b") as other:
        for path in (links["self"], links["result"], links["events"], f"/results/{links['id']}"):
            assert read(other, path).status_code == 404
        assert other.delete(links["self"]).status_code == 404
        assert links["id"] not in {one["id"] for one in read(other, "/v1/requests").json()["data"]}


def test_who_waits_gets_the_answer(served: Served, client: httpx.Client) -> None:
    answer = client.post("/inference", json=question(served), params={"wait": 60})
    assert answer.status_code == 200, answer.text
    assert read(client, f"/results/{answer.json()['id']}").json()["output"] == answer.json()["output"]


def test_a_stream_is_followed_over_either_way(served: Served, client: httpx.Client) -> None:
    with served.engines_paused():
        links = posted(client, question(served, stream=True, max_tokens=64))
        silent = posted(client, question(served))
    with client.stream("GET", links["events"]) as answer:
        events = told(answer)
    assert events[0][0] == "status"
    assert events[-1][0] == "result"
    assert "".join(body["text"] for name, body in events if name == "delta") == events[-1][1]["output"]["text"]
    address = served.url(silent["events"]).replace("http", "ws")
    with connect(address, additional_headers=served.headers(), open_timeout=PATIENCE_S) as listening:
        names = [json.loads(message)["event"] for message in listening]
    assert (names[0], names[-1]) == ("status", "result")
    with pytest.raises(InvalidStatus) as caught, connect(address, open_timeout=PATIENCE_S):
        pass
    assert caught.value.response.status_code == 401


def test_a_cancel_is_published_and_what_is_done_stays_done(served: Served, client: httpx.Client) -> None:
    reader = served.pipeline.reader(requests_topic(served.pipeline.tenant("a")), from_beginning=False)
    with served.engines_paused():
        links = posted(client, question(served))
        assert client.delete(links["self"]).status_code == 202
        reader.wait(lambda: len(reader.records) >= 2, what="the request and its cancel")
    cancel = served.pipeline.codec.decode(reader.records[1].value())
    assert isinstance(cancel, CancelRequest)
    assert cancel.request_id == links["id"]
    # It may have been too late for the engine: there is one final reply in any case.
    eventually(lambda: read(client, links["result"]).status_code == 200, what="the final reply")
    assert read(client, links["result"]).json()["outcome"] in {"cancelled", "ok"}
    assert client.delete(links["self"]).status_code == 200


def test_an_early_refusal_is_told_in_our_own_shape(served: Served, client: httpx.Client) -> None:
    answer = client.post("/v1/requests", json=question(served) | {"model": "no-such-model"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_model")
    image = base64.b64encode(b"\x89PNG\r\n").decode()
    answer = client.post("/v1/classify", json={"model": served.pipeline.model_for("generate"), "image": image})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "task")
