"""Requests that go on while a rollout is judged, and a user who says of each answer whether it is right."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, cycle

from deploy.demo_rollout.versions import DIGITS, LANGUAGE_MODEL
from deploy.models.digits_data import load_split
from fairlane import Client, Handle
from fairlane.client.requests import RequestFields
from fairlane.outcomes import Outcome, Task

_IN_FLIGHT = 32
_RATERS = 8
_TIMEOUT_S = 60.0
_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Question:
    """The fields of a request, and the label that is right; None if nobody knows."""

    fields: RequestFields
    label: str | None = None


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


def ask_until(
    client: Client,
    questions: Iterator[Question],
    is_over: Callable[[Answers], bool],
    progress: Callable[[Answers], None],
) -> Answers:
    """Ask until ``is_over``, and rate each answer of which is known whether it is right; then wait for what is in
    flight."""
    answers = Answers()
    waiting: deque[tuple[Handle, str | None]] = deque()
    ratings: deque[Future[None]] = deque()
    with ThreadPoolExecutor(_RATERS) as raters:
        while waiting or not is_over(answers):
            while len(waiting) < _IN_FLIGHT and not is_over(answers):
                question = next(questions)
                waiting.append((client.submit(**question.fields), question.label))
            if not waiting:
                continue
            handle, label = waiting.popleft()
            reply = handle.reply(_TIMEOUT_S)
            if reply.outcome != Outcome.OK:
                answers.refused[reply.code or reply.outcome] += 1
                continue
            arm = reply.arm or "", reply.model_version or ""
            answers.requests[arm] += 1
            if label is not None:
                labels = (reply.output and reply.output.labels) or ()
                is_right = bool(labels) and labels[0].label == label
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


def images() -> Iterator[Question]:
    """Images that no version has seen in its training, again and again."""
    split = load_split()
    for image, label in cycle(list(zip(split.test_images, split.test_labels, strict=True))):
        yield Question({"model": DIGITS, "task": Task.CLASSIFY, "image": image.tobytes()}, str(label))


def prompts() -> Iterator[Question]:
    """Short texts to go on with, none twice."""
    for number in count(1):
        prompt = f"{number} plus {number % 7 + 1} equals"
        yield Question({"model": LANGUAGE_MODEL, "task": Task.GENERATE, "prompt": prompt, "max_tokens": _ANSWER_TOKENS})
