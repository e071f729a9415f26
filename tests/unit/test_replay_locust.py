"""The Locust file. Locust itself is not installed here: what the file uses of it is a stub of a few lines, so this says
that the file and the profiles go together, and not that Locust takes it."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from producers.replay.profiles import PROFILES

_FILE = Path(__file__).parents[2] / "deploy" / "locust" / "locustfile.py"


class StubResponse:
    def __init__(self, status_code: int, body: Any) -> None:
        self.status_code = status_code
        self.body = body
        self.failures: list[str] = []

    def json(self) -> Any:
        if self.body is None:
            raise ValueError
        return self.body

    def failure(self, why: str) -> None:
        self.failures.append(why)


class StubClient:
    """Of an HttpUser."""

    def __init__(self, response: StubResponse) -> None:
        self.response = response
        self.posted: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def post(self, path: str, **options: Any) -> Iterator[StubResponse]:
        self.posted.append((path, options))
        yield self.response


class StubShape:
    run_time_s = 0.0

    def get_run_time(self) -> float:
        return self.run_time_s


class StubUser:
    client: StubClient


@pytest.fixture
def locustfile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    stub = ModuleType("locust")
    stub.__dict__.update(HttpUser=StubUser, LoadTestShape=StubShape, task=lambda asked: asked)
    monkeypatch.setitem(sys.modules, "locust", stub)
    monkeypatch.setenv("FAIRLANE_API_KEY", "fl_key")
    spec = importlib.util.spec_from_file_location("locustfile_under_test", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PROFILES)
def test_the_shape_is_the_profiles_own(locustfile: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FAIRLANE_PROFILE", name)
    profile, shape, start_s = PROFILES[name], locustfile.ProfileShape(), 0.0
    for stage in profile.stages:
        shape.run_time_s = start_s + stage.seconds / 2
        assert shape.tick() == (stage.users, profile.most_users)
        start_s += stage.seconds
    shape.run_time_s = start_s

    assert shape.tick() is None
    assert 0.5 * profile.think_s <= locustfile.ChatUser().wait_time() <= 1.5 * profile.think_s


@pytest.mark.parametrize(
    ("response", "failures"),
    [
        (StubResponse(200, {}), []),
        (StubResponse(429, {"error": {"code": "overloaded"}}), ["overloaded"]),
        (StubResponse(502, None), ["http_502"]),
        (StubResponse(500, []), ["http_500"]),
    ],
    ids=["served", "refused", "no json", "no object"],
)
def test_a_user_asks_with_the_key_and_tells_refusals_apart(
    locustfile: ModuleType, response: StubResponse, failures: list[str]
) -> None:
    user = locustfile.ChatUser()
    user.client = StubClient(response)
    user.ask()
    user.ask()
    [(path, first), (_, second)] = user.client.posted

    assert path == "/v1/chat/completions"
    assert first["headers"] == {"Authorization": "Bearer fl_key"}
    assert first["json"]["max_tokens"] == PROFILES["baseline"].output_tokens
    assert first["json"]["messages"] != second["json"]["messages"]
    assert response.failures == failures * 2
