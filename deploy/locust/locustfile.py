"""The profiles of ``producers/replay/profiles.py``, run by Locust against a gateway; see README.md beside it.

What became of a call is told, counted and shown by the code of ``producers/replay``, so that both tools mean the same
by every column of the result table. Only modules that need nothing but the standard library are imported of it: Locust
has an environment of its own.
"""

import os
import random
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from locust import HttpUser, LoadTestShape, events, task

from producers.replay.calls import CONNECTION, OK, TIMEOUT, Answer
from producers.replay.chat_stream import answer_of
from producers.replay.profiles import PATH, PROFILES, Profile, chat_body
from producers.replay.report import Ended, Scenario, Tallies, markdown, outcome_lines
from producers.replay.trace import Call

_TENANT = "key"
"""What the report calls whoever the key belongs to."""


def profile() -> Profile:
    """The one that FAIRLANE_PROFILE names, as large and as long as it is to be.

    Raises KeyError for one there is not, ValueError for a size or a time that none can have.
    """
    users, seconds = os.environ.get("FAIRLANE_USERS"), os.environ.get("FAIRLANE_SECONDS")
    return PROFILES[os.environ.get("FAIRLANE_PROFILE", "baseline")].scaled(
        users=int(users) if users else None, seconds=float(seconds) if seconds else None
    )


def timeout_s() -> float:
    """How long a call has. Raises ValueError."""
    return float(os.environ.get("FAIRLANE_TIMEOUT_S", "60"))


class Figures:
    """What came of the calls of this process since the run began."""

    def __init__(self) -> None:
        self._tallies = Tallies((_TENANT,), timeout_s())
        self._began_s = monotonic()
        self._last_end_s = 0.0

    def elapsed_s(self) -> float:
        """Since the run began."""
        return monotonic() - self._began_s

    def add(self, sent_s: float, answer: Answer) -> None:
        """Take what became of a call that ends now."""
        self._last_end_s = self.elapsed_s()
        self._tallies.add(Ended(_TENANT, sent_s, sent_s, self._last_end_s, answer))

    def scenario(self) -> Scenario:
        """The row of the result table."""
        chosen = profile()
        return Scenario(chosen.name, chosen.most_users, self._tallies.report(self._last_end_s, interrupted=False))


class ProfileShape(LoadTestShape):  # type: ignore[misc]  # Locust is not installed where types are checked
    """As many users as the profile has at each moment."""

    def tick(self) -> tuple[int, float] | None:
        """Users, and how many may come or go in a second; None when it is over."""
        chosen = profile()
        users = chosen.users_at(self.get_run_time())
        return None if users is None else (users, float(chosen.most_users))


class ChatUser(HttpUser):  # type: ignore[misc]  # as above
    """Asks, reads the answer, thinks, and asks again."""

    calls = 0
    figures = Figures()

    def on_start(self) -> None:
        """Not all ask at the same moment."""
        sleep(random.uniform(0, profile().think_s))  # noqa: S311 - a pause, and nothing secret

    def wait_time(self) -> float:
        return profile().think_s * random.uniform(0.5, 1.5)  # noqa: S311 - as above

    @task  # type: ignore[untyped-decorator]  # as above
    def ask(self) -> None:
        """One question, and what became of it."""
        chosen, limit_s = profile(), timeout_s()
        ChatUser.calls += 1
        call = Call(ChatUser.calls, 0.0, _TENANT, chosen.prompt_tokens, chosen.output_tokens)
        body = chat_body(call, os.environ.get("FAIRLANE_MODEL", "smollm2-135m-instruct"), limit_s)
        headers = {"Authorization": f"Bearer {os.environ['FAIRLANE_API_KEY']}"}
        sent_s = self.figures.elapsed_s()
        with self.client.post(PATH, json=body, headers=headers, timeout=limit_s, catch_response=True) as response:
            answer = _answer(response, late=self.figures.elapsed_s() - sent_s >= limit_s)
            _tell_locust(response, answer)
        # Not of a call that Locust ends together with its user: nobody knows what would have become of it.
        self.figures.add(sent_s, answer)


def _answer(response: Any, *, late: bool) -> Answer:
    if response.status_code == 0:  # Locust's word for no answer at all
        return Answer(TIMEOUT if late else CONNECTION)
    return answer_of(response.status_code, response.content)


def _tell_locust(response: Any, answer: Answer) -> None:
    """Its statistics have a line for each of them: what was shed is no failure there, and no quick answer either."""
    if answer.code == OK:
        response.success()
        kind = " degraded" if answer.degraded else ""
    elif answer.shed:
        response.success()
        kind = f" shed: {answer.code}"
    else:
        response.failure(answer.code)
        kind = ""
    response.request_meta["name"] = PATH + kind


@events.init.add_listener  # type: ignore[untyped-decorator]  # as above
def let_calls_end(environment: Any, **_: Any) -> None:
    """A user who is not needed any more reads its answer first, unless ``--stop-timeout`` says otherwise."""
    environment.stop_timeout = environment.stop_timeout or timeout_s()


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # as above
def begin(**_: Any) -> None:
    """Count from nothing."""
    ChatUser.figures = Figures()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]  # as above
def show(**_: Any) -> None:
    """Print the row of the result table, and write it where FAIRLANE_TABLE says."""
    scenario = ChatUser.figures.scenario()
    table = markdown([scenario])
    print("\n".join((table, *outcome_lines(scenario.report))), flush=True)
    if path := os.environ.get("FAIRLANE_TABLE"):
        Path(path).write_text(table, encoding="utf-8")
