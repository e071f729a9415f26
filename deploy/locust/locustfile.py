"""The profiles of ``producers/replay/profiles.py``, run by Locust against a gateway; see README.md beside it.

Outcomes are classified, counted and shown by the code of ``producers/replay``, so that the result tables of both tools
can be compared. Only modules that need nothing but the standard library are imported: Locust has an environment of its
own.
"""

import os
import random
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from locust import HttpUser, LoadTestShape, events, task

from producers.replay.calls import CONNECTION, OK, TIMEOUT, CallOutcome, of_body, retry_after_s
from producers.replay.profiles import PATH, PROFILES, Profile, chat_body
from producers.replay.report import Scenario, Tallies, markdown, outcome_lines
from producers.replay.trace import Call

_TENANT = "key"
"""Tenant in the report."""


def profile() -> Profile:
    """The profile of FAIRLANE_PROFILE, scaled. Raises KeyError, ValueError."""
    users, seconds = os.environ.get("FAIRLANE_USERS"), os.environ.get("FAIRLANE_SECONDS")
    return PROFILES[os.environ.get("FAIRLANE_PROFILE", "baseline")].scaled(
        users=int(users) if users else None, seconds=float(seconds) if seconds else None
    )


def timeout_s() -> float:
    """Time of a call. Raises ValueError."""
    return float(os.environ.get("FAIRLANE_TIMEOUT_S", "60"))


class Figures:
    """Outcomes of the calls of this process since the run began."""

    def __init__(self) -> None:
        self._tallies = Tallies((_TENANT,), timeout_s())
        self._began_s = monotonic()
        self._last_end_s = 0.0

    def elapsed_s(self) -> float:
        return monotonic() - self._began_s

    def add(self, sent_s: float, outcome: CallOutcome) -> None:
        """Count a call that ends now."""
        self._last_end_s = self.elapsed_s()
        self._tallies.add(_TENANT, outcome, due_s=sent_s, sent_s=sent_s, ended_s=self._last_end_s)

    def tried(self, tries: int, outcome: CallOutcome) -> None:
        """Count the outcome of a try, from 1, of an obedient user's question."""
        self._tallies.tried(_TENANT, tries, outcome)

    def scenario(self) -> Scenario:
        chosen = profile()
        return Scenario(chosen.name, chosen.most_users, self._tallies.report(self._last_end_s, interrupted=False))


class ProfileShape(LoadTestShape):  # type: ignore[misc]  # Locust is not installed where types are checked
    """The users of the profile at each moment."""

    def tick(self) -> tuple[int, float] | None:
        """Number of users, and how many may start or end in a second; None at the end."""
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
        """One question; a user who obeys asks it again when told to."""
        chosen = profile()
        ChatUser.calls += 1
        call = Call(ChatUser.calls, 0.0, _TENANT, chosen.prompt_tokens, chosen.output_tokens)
        tries = 0
        while True:
            tries += 1
            outcome = self.ask_once(call)
            if chosen.obeys:
                self.figures.tried(tries, outcome)
            if not chosen.asks_again(outcome.retry_after_s if outcome.shed else None, tries):
                break
            sleep(outcome.retry_after_s or 0.0)

    def ask_once(self, call: Call) -> CallOutcome:
        """One call."""
        limit_s = timeout_s()
        body = chat_body(call, os.environ.get("FAIRLANE_MODEL", "smollm2-135m-instruct"), limit_s)
        headers = {"Authorization": f"Bearer {os.environ['FAIRLANE_API_KEY']}"}
        sent_s = self.figures.elapsed_s()
        with self.client.post(PATH, json=body, headers=headers, timeout=limit_s, catch_response=True) as response:
            if response.status_code == 0:  # no answer at all
                late = self.figures.elapsed_s() - sent_s >= limit_s
                outcome = CallOutcome(TIMEOUT if late else CONNECTION)
            else:
                answered = {name.lower(): value for name, value in response.headers.items()}
                outcome = of_body(response.status_code, response.content, retry_after_s(answered))
            _show_locust(response, outcome)
        # Not for a call that Locust ends together with its user: its outcome is unknown.
        self.figures.add(sent_s, outcome)
        return outcome


def _show_locust(response: Any, outcome: CallOutcome) -> None:
    """A line of Locust's statistics for each kind: a shed call is neither a failure there nor a quick answer."""
    kind = ""
    if outcome.code != OK and not outcome.shed:
        response.failure(outcome.code)
    else:
        response.success()
        kind = f" shed: {outcome.code}" if outcome.shed else " degraded" if outcome.degraded else ""
    response.request_meta["name"] = PATH + kind


@events.init.add_listener  # type: ignore[untyped-decorator]  # as above
def let_calls_end(environment: Any, **_: Any) -> None:
    """A user that ends reads its answer first, unless ``--stop-timeout`` is set."""
    environment.stop_timeout = environment.stop_timeout or timeout_s()


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # as above
def begin(**_: Any) -> None:
    """Reset the counts."""
    ChatUser.figures = Figures()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]  # as above
def show(**_: Any) -> None:
    """Print the row of the result table, and write it to FAIRLANE_TABLE."""
    scenario = ChatUser.figures.scenario()
    table = markdown([scenario])
    print("\n".join((table, *outcome_lines(scenario.report))), flush=True)
    if path := os.environ.get("FAIRLANE_TABLE"):
        Path(path).write_text(table, encoding="utf-8")
