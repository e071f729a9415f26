"""POST /v1/requests has a short way past FastAPI: with and without it every call is answered alike."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi.dependencies.utils import solve_dependencies

from tests.kit.native_kit import KEY, MOST_BODY_BYTES, QUESTION, RESULTS_KEY, VIEWER_KEY, Bench
from tests.kit.openai_kit import MODEL

WHOLE = "?wait=0"
"""Says what is so anyway, and any query is FastAPI's to read."""
CHAT = {"model": MODEL, "input": {"messages": [{"role": "user", "content": "Hi"}]}, "parameters": {"stream": True}}

ORDER = "order"

CALLS: dict[str, tuple[str | bytes, str | None, dict[str, str]]] = {
    "prompt": (json.dumps(QUESTION), KEY, {}),
    "chat that streams": (json.dumps(CHAT), KEY, {}),
    "of another content type": (json.dumps(QUESTION), KEY, {"content-type": "text/plain"}),
    "with a key": (json.dumps(QUESTION), KEY, {"idempotency-key": ORDER}),
    "with a key that is none": (json.dumps(QUESTION), KEY, {"idempotency-key": "x" * 256}),
    "nothing": (b"", KEY, {}),
    "no JSON": ('{"model": ', KEY, {}),
    "no UTF-8": (b'{"model": "\xff"}', KEY, {}),
    "NaN": ('{"model": NaN}', KEY, {}),
    "no object": ("[1]", KEY, {}),
    "field missing": (json.dumps({"input": {"prompt": "Hi"}}), KEY, {}),
    "field unknown": (json.dumps({**QUESTION, "colour": "red"}), KEY, {}),
    "field of another type": (json.dumps({**QUESTION, "timeout_ms": "soon"}), KEY, {}),
    "field out of bounds": (json.dumps({**QUESTION, "parameters": {"top_p": 2}}), KEY, {}),
    "fields that do not go together": (json.dumps({**QUESTION, "task": "embed"}), KEY, {}),
    "model unknown": (json.dumps({**QUESTION, "model": "another"}), KEY, {}),
    "too large": (json.dumps({**QUESTION, "metadata": {"a": "x" * MOST_BODY_BYTES}}), KEY, {}),
    "nobody": (json.dumps(QUESTION), None, {}),
    "nobody, and no JSON": ("{", None, {}),
    "a viewer": (json.dumps(QUESTION), VIEWER_KEY, {}),
    "without the scope": (json.dumps(QUESTION), RESULTS_KEY, {}),
    "without the scope, and no JSON": ("{", RESULTS_KEY, {}),
}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def told(bench: Bench, query: str, name: str, method: str = "POST", path: str = "/v1/requests") -> tuple[object, ...]:
    """All of the answer, with any id by one name, and all that was published."""
    content, key, headers = CALLS[name]
    if headers.get("idempotency-key") == ORDER:
        headers = {"idempotency-key": f"{ORDER}-{path}{query}"}
    before = len(bench.submitter.submitted)
    answer = bench.run(lambda http: http.request(method, path + query, content=content, headers=headers), key)
    requests = [request for _, request in bench.submitter.submitted[before:]]
    text, fields, published = answer.text, str(sorted(answer.headers.items())), str(requests)
    for request in requests:
        text, fields, published = (one.replace(request.request_id, "ID") for one in (text, fields, published))
    return answer.status_code, text, fields, published


@pytest.mark.parametrize("path", ["/v1/requests", "/inference"])
@pytest.mark.parametrize("name", CALLS)
def test_both_ways_answer_alike(bench: Bench, name: str, path: str) -> None:
    short, whole = told(bench, "", name, path=path), told(bench, WHOLE, name, path=path)
    assert short == whole
    expected = {"prompt": 202, "no JSON": 400, "too large": 413, "nobody": 401, "without the scope": 403}
    assert short[0] == expected.get(name, short[0])


@pytest.mark.parametrize("method", ["PUT", "HEAD", "OPTIONS"])
def test_other_methods_are_refused_alike(bench: Bench, method: str) -> None:
    short = told(bench, "", "prompt", method)
    assert short == told(bench, WHOLE, "prompt", method)
    assert short[0] == 405


def test_a_query_is_checked(bench: Bench) -> None:
    content, key, _ = CALLS["prompt"]
    answer = bench.run(lambda http: http.post("/v1/requests?wait=-1", content=content), key)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "wait")


def test_only_calls_with_a_query_go_through_fastapi(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, Any]] = []

    async def noted(**arguments: Any) -> Any:
        asked.append(arguments)
        return await solve_dependencies(**arguments)

    monkeypatch.setattr("fastapi.routing.solve_dependencies", noted)

    async def test(http: httpx.AsyncClient) -> None:
        assert (await http.post("/v1/requests", json=QUESTION)).status_code == 202
        assert not asked
        assert (await http.post(f"/v1/requests{WHOLE}", json=QUESTION)).status_code == 202
        assert len(asked) == 1

    bench.run(test)
