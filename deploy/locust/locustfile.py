"""The profiles of ``producers/replay/profiles.py``, run by Locust against a gateway; see README.md beside it."""

import os
import random

from locust import HttpUser, LoadTestShape, task

from producers.replay.chat_body import PATH, chat_body
from producers.replay.plan import Call
from producers.replay.profiles import PROFILES, Profile

_TIMEOUT_S = 60.0


def profile() -> Profile:
    """The one that FAIRLANE_PROFILE names. Raises KeyError for one there is not."""
    return PROFILES[os.environ.get("FAIRLANE_PROFILE", "baseline")]


class ProfileShape(LoadTestShape):  # type: ignore[misc]  # Locust is not installed where types are checked
    """As many users as the profile has at each moment."""

    def tick(self) -> tuple[int, float] | None:
        """Users, and how many may come or go in a second; None when it is over."""
        users = profile().users_at(self.get_run_time())
        return None if users is None else (users, float(profile().most_users))


class ChatUser(HttpUser):  # type: ignore[misc]  # as above
    """Asks, reads the answer, thinks, and asks again."""

    calls = 0

    def wait_time(self) -> float:
        return profile().think_s * random.uniform(0.5, 1.5)  # noqa: S311 - a pause, and nothing secret

    @task  # type: ignore[untyped-decorator]  # as above
    def ask(self) -> None:
        """One question. What was refused is a failure under its code, so that Locust counts it by itself."""
        shape = profile()
        ChatUser.calls += 1
        call = Call(ChatUser.calls, 0.0, "", shape.prompt_tokens, shape.output_tokens)
        body = chat_body(call, os.environ.get("FAIRLANE_MODEL", "smollm2-135m-instruct"), _TIMEOUT_S)
        headers = {"Authorization": f"Bearer {os.environ['FAIRLANE_API_KEY']}"}
        with self.client.post(PATH, json=body, headers=headers, timeout=_TIMEOUT_S, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(_code(response))


def _code(response: "object") -> str:
    try:
        return str(response.json()["error"]["code"])  # type: ignore[attr-defined]  # Locust's, see above
    except (ValueError, KeyError, TypeError):
        return f"http_{getattr(response, 'status_code', 0)}"
