"""The Locust file. Locust itself is not installed here: what the file uses of it is a stub of a few lines, with the
names and the meaning that it has in the version of requirements/locust.txt."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, final

import pytest

from producers.replay.profiles import PROFILES

_ROOT = Path(__file__).parents[3]
_FILE = _ROOT / "deploy" / "locust" / "locustfile.py"


class StubResponse:
    """What ``post(..., catch_response=True)`` gives."""

    def __init__(self, status_code: int, body: Any) -> None:
        self.status_code = status_code
        self.content = None if status_code == 0 else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.request_meta = {"name": "/v1/chat/completions"}
        self.headers: dict[str, str] = {}
        self.results: list[str | None] = []

    def success(self) -> None:
        self.results.append(None)

    def failure(self, why: str) -> None:
        self.results.append(why)


class StubClient:
    """Of an HttpUser."""

    def __init__(self, response: StubResponse) -> None:
        self.response = response
        self.posted: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def post(self, path: str, **options: Any) -> Iterator[StubResponse]:
        assert options["catch_response"]
        self.posted.append((path, options))
        yield self.response


class StubShape:
    run_time_s = 0.0

    def get_run_time(self) -> float:
        return self.run_time_s


class StubUser:
    client: StubClient
    on_start: Callable[[], None]
    ask: Callable[[], None]
    wait_time: Callable[[], float]

    @final
    def run(self) -> None:
        """Two tasks, as Locust runs them; the name is Locust's, and what has it in the file breaks every user."""
        self.on_start()
        for _ in range(2):
            self.ask()
            assert self.wait_time() >= 0

    def __init_subclass__(cls) -> None:
        assert "run" not in vars(cls)


class StubEvents:
    """Hooks of which each keeps who listens."""

    def __init__(self) -> None:
        self.init, self.test_start, self.test_stop = (StubHook() for _ in range(3))


class StubHook:
    def __init__(self) -> None:
        self.listeners: list[Callable[..., None]] = []

    def add_listener(self, listener: Callable[..., None]) -> Callable[..., None]:
        self.listeners.append(listener)
        return listener

    def fire(self, **arguments: Any) -> None:
        for listener in self.listeners:
            listener(**arguments)


@pytest.fixture
def locustfile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    stub = ModuleType("locust")
    stub.__dict__.update(HttpUser=StubUser, LoadTestShape=StubShape, events=StubEvents(), task=lambda asked: asked)
    monkeypatch.setitem(sys.modules, "locust", stub)
    monkeypatch.setenv("FAIRLANE_API_KEY", "fl_key")
    for name in ("PROFILE", "USERS", "SECONDS", "TIMEOUT_S", "TABLE", "MODEL"):
        monkeypatch.delenv(f"FAIRLANE_{name}", raising=False)
    spec = importlib.util.spec_from_file_location("locustfile_under_test", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_needs_nothing_but_locust_and_the_standard_library() -> None:
    stub = "import sys; from unittest.mock import MagicMock; sys.modules['locust'] = MagicMock()"
    load = f"import runpy; sys.path.insert(0, {str(_ROOT)!r}); runpy.run_path({str(_FILE)!r})"
    command = [sys.executable, "-S", "-c", f"{stub}; {load}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def test_who_is_shed_asks_again_when_told_to(locustfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_PROFILE", "overload")
    waits: list[float] = []
    monkeypatch.setattr(locustfile, "sleep", waits.append)
    shed, served = StubResponse(429, {"error": {"code": "overloaded"}}), StubResponse(200, {"usage": {}})
    shed.headers = {"Retry-After": "3", "retry-after-ms": "2500"}
    answers, user = iter((shed, served, served)), locustfile.ChatUser()

    class Client(StubClient):
        @contextmanager
        def post(self, path: str, **options: Any) -> Iterator[StubResponse]:
            self.posted.append((path, options))
            yield next(answers)

    user.client = Client(served)
    user.ask()
    user.ask()
    bodies = [options["json"] for _, options in user.client.posted]

    assert waits == [2.5]
    assert bodies[0] == bodies[1] != bodies[2], "the same question"
    assert user.figures.scenario().report.total.in_by_second_try == 1.0


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


def test_a_profile_is_scaled_as_it_is_without_locust(locustfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_PROFILE", "burst")
    monkeypatch.setenv("FAIRLANE_USERS", "20")
    monkeypatch.setenv("FAIRLANE_SECONDS", "6")

    assert locustfile.profile() == PROFILES["burst"].scaled(users=20, seconds=6)


def user_of(locustfile: ModuleType, response: StubResponse, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user who finds every pause over at once, and every call answered so."""
    monkeypatch.setattr(locustfile, "sleep", lambda _seconds: None)
    user = locustfile.ChatUser()
    user.client = StubClient(response)
    return user


SHED = "/v1/chat/completions shed: "


@pytest.mark.parametrize(
    ("response", "result", "name"),
    [
        (StubResponse(200, {"fairlane": {"degradations": []}}), None, "/v1/chat/completions"),
        (
            StubResponse(200, {"fairlane": {"degradations": ["capped_max_tokens"]}}),
            None,
            "/v1/chat/completions degraded",
        ),
        (StubResponse(429, {"error": {"code": "overloaded"}}), None, SHED + "overloaded"),
        (StubResponse(503, b"<html>"), None, SHED + "http_503"),
        (StubResponse(422, {"error": {"code": "deadline_unmeetable"}}), None, SHED + "deadline_unmeetable"),
        (StubResponse(404, {"error": {"code": "model_not_found"}}), "model_not_found", "/v1/chat/completions"),
        (StubResponse(502, b""), "http_502", "/v1/chat/completions"),
        (StubResponse(500, []), "http_500", "/v1/chat/completions"),
        (StubResponse(200, b"{"), "unreadable", "/v1/chat/completions"),
        (StubResponse(0, None), "connection", "/v1/chat/completions"),
    ],
    ids=[
        "served",
        "degraded",
        "shed",
        "away",
        "shed by its code",
        "refused",
        "no json",
        "no object",
        "cut",
        "no answer",
    ],
)
def test_locust_is_told_what_failed_what_was_shed_and_what_was_degraded(
    locustfile: ModuleType, monkeypatch: pytest.MonkeyPatch, response: StubResponse, result: str | None, name: str
) -> None:
    user = user_of(locustfile, response, monkeypatch)
    user.run()
    [(path, first), (_, second)] = user.client.posted

    assert path == "/v1/chat/completions"
    assert first["headers"] == {"Authorization": "Bearer fl_key"}
    assert first["json"]["max_tokens"] == PROFILES["baseline"].output_tokens
    assert first["json"]["messages"] != second["json"]["messages"]
    assert response.results == [result] * 2
    assert response.request_meta["name"] == name


def test_a_run_ends_with_its_row_of_the_result_table(
    locustfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    monkeypatch.setenv("FAIRLANE_PROFILE", "burst")
    monkeypatch.setenv("FAIRLANE_TABLE", str(table))
    user_of(locustfile, StubResponse(500, []), monkeypatch).run()
    locustfile.events.test_start.fire(environment=None)
    for response in (
        StubResponse(200, {"fairlane": {"degradations": ["capped_max_tokens"]}}),
        StubResponse(200, {}),
        StubResponse(429, {"error": {"code": "overloaded"}}),
        StubResponse(504, {"error": {"code": "timeout"}}),
    ):
        user_of(locustfile, response, monkeypatch).run()
    locustfile.events.test_stop.fire(environment=None)

    head, _, row = table.read_text(encoding="utf-8").splitlines()
    cells = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row)), strict=True))
    assert (cells["scenario"], cells["users"]) == ("burst", "200")
    assert (cells["failure rate"], cells["shed"], cells["degraded"]) == ("25.0%", "25.0%", "25.0%")
    assert row in capsys.readouterr().out


def test_users_who_leave_read_their_answer_first(locustfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_TIMEOUT_S", "20")
    environments = [SimpleNamespace(stop_timeout=given) for given in (0.0, 3.0)]
    for environment in environments:
        locustfile.events.init.fire(environment=environment, runner=None, web_ui=None)

    assert [environment.stop_timeout for environment in environments] == [20.0, 3.0]
