"""Five load profiles of users who ask, read, think and ask again. Pure.

They are the scenarios of ``python -m producers.replay profile`` and of the Locust file; this module needs nothing but
the standard library, so that both read the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from producers.replay.trace import Call, text_of

PATH = "/v1/chat/completions"
MOST_TRIES = 10
"""Of one question, by a user who obeys."""


def chat_body(call: Call, model: str, timeout_s: float, *, stream: bool = False) -> dict[str, Any]:
    """Body of a request to ``PATH`` that is never answered from the cache. ``timeout_s``: its deadline."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text_of(call.number, call.prompt_tokens)}],
        "max_tokens": call.output_tokens,
        "fairlane": {"timeout_ms": max(1, round(timeout_s * 1_000)), "cache": "none"},
    }
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of users for some seconds."""

    seconds: float
    users: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A load profile. ``think_s``: mean pause between an answer and the next question, varied by half of it; tokens
    are of each question and answer. ``obeys``: a user repeats a shed question after its time to retry."""

    name: str
    stages: tuple[Stage, ...]
    think_s: float
    prompt_tokens: int = 64
    output_tokens: int = 32
    obeys: bool = False

    @property
    def most_users(self) -> int:
        return max(stage.users for stage in self.stages)

    def asks_again(self, retry_after_s: float | None, tries: int) -> bool:
        """Whether a user repeats a question that was shed with this time to retry; None: it was not shed, or got no
        time to retry."""
        return self.obeys and retry_after_s is not None and tries < MOST_TRIES

    def users_at(self, at_s: float) -> int | None:
        """Number of users at a time after the start; None at the end."""
        for stage in self.stages:
            if at_s < stage.seconds:
                return stage.users
            at_s -= stage.seconds
        return None

    def scaled(self, *, users: int | None = None, seconds: float | None = None) -> "Profile":
        """The same shape with another peak of users and another total time. Raises ValueError."""
        if users is not None and users < 1:
            raise ValueError(f"users: {users} is below 1")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds: {seconds:g} is not above 0")
        high = 1.0 if users is None else users / self.most_users
        long = 1.0 if seconds is None else seconds / sum(stage.seconds for stage in self.stages)
        stages = (Stage(stage.seconds * long, max(1, round(stage.users * high))) for stage in self.stages)
        return replace(self, stages=tuple(stages))


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("baseline", (Stage(60, 10),), think_s=1.0),
        Profile("burst", (Stage(20, 10), Stage(20, 200), Stage(20, 10)), think_s=1.0),
        Profile(
            "saturation",
            (Stage(15, 25), Stage(15, 50), Stage(15, 100), Stage(15, 200), Stage(15, 400)),
            think_s=0.25,
        ),
        Profile("degradation", (Stage(60, 200),), think_s=0.25, prompt_tokens=256, output_tokens=512),
        Profile("overload", (Stage(60, 300),), think_s=0.25, prompt_tokens=256, output_tokens=512, obeys=True),
    )
}
