"""Requests that go on while a rollout is judged, and a user who says of each answer whether it is right."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle

from deploy.demo_rollout.versions import MODEL
from deploy.models.digits_data import load_split
from fairlane import Client, Handle
from fairlane.outcomes import Outcome, Task

_IN_FLIGHT = 32
_RATERS = 8
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Answers:
    """Counts of answers and of right answers, by arm and version; ``refused`` counts refusals by code."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    right: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def accuracy(self, arm: tuple[str, str]) -> float:
        return self.right[arm] / self.requests[arm]


def ask_until(client: Client, is_over: Callable[[Answers], bool], progress: Callable[[Answers], None]) -> Answers:
    """Ask, and rate every answer, until ``is_over``; then wait for what is in flight."""
    answers, images = Answers(), _images()
    waiting: deque[tuple[Handle, str]] = deque()
    ratings: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_RATERS) as raters:
        while waiting or not is_over(answers):
            while len(waiting) < _IN_FLIGHT and not is_over(answers):
                image, label = next(images)
                waiting.append((client.submit(model=MODEL, task=Task.CLASSIFY, image=image), label))
            if not waiting:
                continue
            handle, label = waiting.popleft()
            reply = handle.reply(_TIMEOUT_S)
            if reply.outcome != Outcome.OK:
                answers.refused[reply.code or reply.outcome] += 1
                continue
            labels = (reply.output and reply.output.labels) or ()
            is_right = bool(labels) and labels[0].label == label
            arm = reply.arm or "", reply.model_version or ""
            answers.requests[arm] += 1
            answers.right[arm] += is_right
            ratings.append(
                raters.submit(client.feedback, reply.request_id, score=float(is_right), given_by="user:demo")
            )
            while ratings and ratings[0].done():
                ratings.popleft().result()
            progress(answers)
        for rating in ratings:
            rating.result(_TIMEOUT_S)
    return answers


def _images() -> Iterator[tuple[bytes, str]]:
    """Images that no version has seen in its training, again and again, with their labels."""
    split = load_split()
    return cycle(
        [(image.tobytes(), str(label)) for image, label in zip(split.test_images, split.test_labels, strict=True)]
    )
