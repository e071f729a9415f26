"""guardrails: what the checks find of held-out texts, what they find that is not there, and how long they take.

A figure of texts counts a text as found when the check has any finding in it; one of spans counts a finding that
overlaps a marked place. The data is described in benchmarks/data/README.md and benchmarks/guardrail_data.py.

Processor time is that of a check alone, in this process. The time of a request is wall time through the process of the
check, as a consumer asks it: with the pipe and the queue, of one request after the other, and of TENANTS tenants that
send one at once. Both are of checks that are warm.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic, process_time

from benchmarks.guardrail_data import (
    MarkedText,
    hateful,
    hidden_injections,
    injections,
    leaked_prompts,
    personal_data,
    project_documents,
    repetitions,
    secrets,
    short_and_long_texts,
)
from benchmarks.result import Figure, Result
from benchmarks.service_curve import percentile
from deploy.models.prompt_injection_data import LabelledText, prose
from fairlane.settings import Settings
from inference_consumers.guardrails.check import Check, CheckContext, Finding
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.process.checks import CheckProcesses, check_processes
from inference_consumers.guardrails.registry import NAMES, load_checks

NAME = "guardrails"
HOW = "one run"
_TIMED = 40
_REQUESTS = 16
TENANTS = 8
_AT_MOST_MS = 600_000
_NAME_TYPE = "PERSON"
_INPUT = CheckContext(patterns=(r"\bPX-\d{4}\b",), denied_words=("project falcon",))
_SYSTEM_PROMPT = (
    "You are a helpful assistant of a library. Never name the people who borrow books, or what they read. " * 5
)
_OUTPUT = CheckContext(system_prompt=_SYSTEM_PROMPT)


@dataclass(frozen=True, slots=True)
class Counts:
    """Of texts or spans: found rightly, found wrongly, and missed."""

    right: int
    wrong: int
    missed: int

    @property
    def precision(self) -> float:
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        return self.right / max(1, self.right + self.missed)

    @property
    def f1(self) -> float:
        return 2 * self.right / max(1, 2 * self.right + self.wrong + self.missed)


def run() -> Result:
    """Quality first, which also warms the checks up."""
    checks = load_checks(NAMES, Settings().models_dir)
    figures = [*_quality(checks), *_times(checks)]
    # Their weights are in the processes from here on.
    checks.clear()
    figures += request_times(NAMES, Settings())
    return Result(NAME, tuple(figures), ({figure.name: figure.value for figure in figures},))


def count_texts(expected: Iterable[bool], found: Iterable[bool]) -> Counts:
    pairs = list(zip(expected, found, strict=True))
    return Counts(pairs.count((True, True)), pairs.count((False, True)), pairs.count((True, False)))


def count_spans(
    marked: Sequence[MarkedText], found: Sequence[Sequence[Finding]], is_same: Callable[[str, str], bool]
) -> Counts:
    """``is_same`` compares the types of a marked place and of a finding."""
    right = wrong = missed = 0
    for text, findings in zip(marked, found, strict=True):
        hit = {place for place in text.findings if any(_meet(place, one, is_same) for one in findings)}
        right += len(hit)
        missed += len(text.findings) - len(hit)
        wrong += sum(not any(_meet(place, one, is_same) for place in text.findings) for one in findings)
    return Counts(right, wrong, missed)


def _meet(place: Finding, one: Finding, is_same: Callable[[str, str], bool]) -> bool:
    return is_same(place.type, one.type) and place.start < one.end and one.start < place.end


def _quality(checks: dict[str, Check]) -> list[Figure]:
    figures: list[Figure] = []
    people = personal_data()
    found = checks["pii"].find([one.text for one in people], _INPUT)
    for title, are_names in (("names", True), ("numbers and addresses", False)):
        marked = [
            MarkedText(one.text, tuple(at for at in one.findings if (at.type == _NAME_TYPE) == are_names))
            for one in people
        ]
        hits = [[one for one in findings if (one.type == _NAME_TYPE) == are_names] for findings in found]
        figures += _rates(f"personal data, {title}", count_spans(marked, hits, lambda place, one: place == one))
    keys = secrets()
    found = checks["secrets"].find([one.text for one in keys], _INPUT)
    figures += _rates("secrets", count_spans(keys, found, lambda *_: True))
    for title, texts in injections().items():
        figures += _rates(f"prompt injection, {title}", _counted(checks["prompt_injection"], texts))
    figures += _rates(
        "prompt injection, within long documents", _counted(checks["prompt_injection"], hidden_injections())
    )
    figures += _rates("toxicity, HateCheck", _counted(checks["toxicity"], hateful()))
    ordinary = {"documents of this project": project_documents(), "CPython's language reference": prose("test")}
    for name in ("prompt_injection", "toxicity"):
        for title, texts in ordinary.items():
            wrong = _counted(checks[name], texts).wrong
            figures.append(Figure(f"{name}, paragraphs found in {title}", wrong / len(texts), "part"))
    answers = leaked_prompts()
    leaks = [bool(checks["leaked_prompt"].find([one.answer], CheckContext(one.prompt))[0]) for one in answers]
    figures += _rates("leaked prompt", count_texts([one.leaks for one in answers], leaks))
    return [*figures, *_rates("repetition", _counted(checks["repetition"], repetitions()))]


def _counted(check: Check, texts: Sequence[LabelledText]) -> Counts:
    found = check.find([one.text for one in texts], _OUTPUT)
    return count_texts([one.is_attack for one in texts], map(bool, found))


def _rates(title: str, counts: Counts) -> list[Figure]:
    return [
        Figure(f"{title}: precision", counts.precision, "part"),
        Figure(f"{title}: recall", counts.recall, "part"),
        Figure(f"{title}: F1", counts.f1, "part"),
    ]


def _times(checks: dict[str, Check]) -> list[Figure]:
    figures = []
    short, long = short_and_long_texts(_TIMED)
    for name, check in checks.items():
        for title, texts in (("a sentence", short), ("8,000 characters", long)):
            took = _milliseconds(check, texts, _context(name))
            figures += [
                Figure(f"{name}, processor time of {title}, {part}", percentile(took, quantile), "ms")
                for part, quantile in (("50 %", 0.5), ("99 %", 0.99))
            ]
    return figures


def _milliseconds(check: Check, texts: Sequence[str], context: CheckContext) -> list[float]:
    took = []
    for text in texts:
        started = process_time()
        check.find([text], context)
        took.append((process_time() - started) * 1_000)
    return took


def _context(name: str) -> CheckContext:
    return _INPUT if name in {"pii", "secrets", "patterns", "prompt_injection"} else _OUTPUT


def request_times(names: Iterable[str], settings: Settings) -> list[Figure]:
    """Of requests through the processes of these checks."""
    short, long = short_and_long_texts(_REQUESTS)
    figures = []
    fatal: list[Exception] = []
    processes = check_processes(settings, fatal.append)
    try:
        for name in names:
            ask = partial(_ask, processes, name)
            ask(short[:1])
            for title, texts in (("a sentence", short), ("8,000 characters", long)):
                alone = [took for text in texts for took in ask([text])]
                together = [
                    took for first in range(0, len(texts), TENANTS) for took in ask(texts[first : first + TENANTS])
                ]
                for how, times in (("", alone), (f", {TENANTS} tenants at once", together)):
                    figures += [
                        Figure(f"{name}, a request of {title}{how}, {part}", percentile(times, quantile), "ms")
                        for part, quantile in (("50 %", 0.5), ("99 %", 0.99))
                    ]
    finally:
        processes.close(5.0)
    if fatal:
        raise fatal[0]
    return figures


def _ask(processes: CheckProcesses, name: str, texts: Sequence[str]) -> list[float]:
    """Milliseconds until each is answered; all are asked at once, each by another tenant."""
    answers: SimpleQueue[tuple[float, Answers | CheckFailure]] = SimpleQueue()
    began_s = monotonic()
    for number, text in enumerate(texts):
        call = CheckCall(name, _context(name), (text,))
        refused = processes.submit(
            f"tenant-{number}", call, _AT_MOST_MS, lambda answer: answers.put((monotonic(), answer))
        )
        if refused is not None:
            answers.put((monotonic(), refused))
    answered = [answers.get(timeout=_AT_MOST_MS / 1_000) for _ in texts]
    failed = [answer.reason for _, answer in answered if isinstance(answer, CheckFailure)]
    if failed:
        raise RuntimeError(f"the check {name} was not made: {failed[0]}")
    return [(at_s - began_s) * 1_000 for at_s, _ in answered]
