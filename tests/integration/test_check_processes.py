"""Checks in processes of their own: what they answer, and what becomes of calls when one dies, hangs or is absent."""

import os
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import psutil
import pytest
from prometheus_client import REGISTRY

from fairlane.backoff import Backoff
from fairlane.guardrail_records import PostProcessing
from fairlane.settings import Settings
from inference_consumers.engine_process.host import without_settings
from inference_consumers.guardrails.check import CheckContext, Processed
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall
from inference_consumers.guardrails.process.checks import check_processes
from inference_consumers.guardrails.process.host import (
    DIED,
    ENDING,
    FAILED,
    LATE,
    MODULE,
    UNAVAILABLE,
    CheckHost,
    CheckLimits,
)
from tests.kit.troubled_check import (
    ALLOCATE,
    CRASH,
    CUT,
    HANG,
    LARGE,
    LARGE_S,
    LEAK,
    LEAKED_BYTES,
    MISSING,
    ODD,
    PACED,
    RAISE,
    SLOW,
)
from tests.kit.waiting import eventually

WAIT_S = 20
QUICK = Backoff(first_s=0.01, longest_s=0.02)
CONTEXT = CheckContext()
MEMORY_BYTES = 1 << 27
LIMITS = CheckLimits(question_ms=1_500, wait_ms=5_000, load_ms=20_000, memory_bytes=MEMORY_BYTES)


class Asked:
    """Asks a host and collects the answers by the text that was asked about."""

    def __init__(self, host: CheckHost) -> None:
        self.host = host
        self.answers: queue.SimpleQueue[tuple[str, Answers | CheckFailure]] = queue.SimpleQueue()

    def ask(
        self, text: str, within_ms: int = 60_000, tenant: str = "acme", context: CheckContext = CONTEXT
    ) -> CheckFailure | None:
        call = CheckCall(self.host.check, context, (text,))
        return self.host.submit(tenant, call, within_ms, lambda answer: self.answers.put((text, answer)))

    def next(self) -> tuple[str, Answers | CheckFailure]:
        return self.answers.get(timeout=WAIT_S)

    def types(self, text: str) -> list[str]:
        """The types that are found in a text."""
        assert self.ask(text) is None
        asked, answer = self.next()
        assert asked == text
        assert not isinstance(answer, CheckFailure), answer
        assert not isinstance(answer[0], Processed)
        return [finding.type for finding in answer[0]]


@contextmanager
def hosted(
    check: str = "secrets",
    limits: CheckLimits = LIMITS,
    backoff: Backoff = QUICK,
    module: str = "tests.kit.troubled_check",
) -> Iterator[Asked]:
    fatal: list[Exception] = []
    environment = without_settings(os.environ)
    host = CheckHost(check, sys.executable, environment, Path("models"), fatal.append, limits, module, backoff)
    try:
        yield Asked(host)
    finally:
        process = psutil.Process(pid) if (pid := host.pid) is not None else None
        host.close(WAIT_S)
        assert process is None or not process.is_running()
        assert fatal == []


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with hosted() as started:
        yield started


def test_a_process_starts_with_the_first_call(asked: Asked) -> None:
    assert asked.host.pid is None
    assert asked.types("my KEY1") == ["secrets_type"]
    assert asked.host.is_ready
    assert asked.types("nothing") == []


def test_calls_that_come_together_are_answered_each(asked: Asked) -> None:
    asked.ask(SLOW)
    for number in range(40):
        asked.ask("KEY" * (number % 2) + str(number))
    answers = dict(asked.next() for _ in range(41))
    for text, answer in answers.items():
        assert not isinstance(answer, CheckFailure)
        assert bool(answer[0]) == ("KEY" in text)


@pytest.mark.parametrize(
    ("text", "failure"), [(CRASH, DIED), (HANG, DIED), (ALLOCATE, DIED), (RAISE, FAILED), (ODD, FAILED)]
)
def test_a_text_that_a_check_cannot_bear_fails_and_its_neighbours_do_not(
    asked: Asked, text: str, failure: CheckFailure
) -> None:
    asked.ask(SLOW)
    for one in ("KEY before", text, "KEY behind"):
        asked.ask(one)
    answers = dict(asked.next() for _ in range(4))
    assert answers.pop(text) == failure
    for answer in answers.values():
        assert not isinstance(answer, CheckFailure)
    assert asked.types("KEY") == ["secrets_type"], "another process took its place"


def test_half_a_character_fails_and_the_process_lives(asked: Asked) -> None:
    assert asked.types("KEY") == ["secrets_type"]
    pid = asked.host.pid
    asked.ask("\ud800")
    assert asked.next() == ("\ud800", FAILED)
    assert asked.types("KEY") == ["secrets_type"]
    assert asked.host.pid == pid


def test_a_process_that_is_killed_is_started_again(asked: Asked) -> None:
    asked.types("KEY")
    pid = asked.host.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: asked.host.pid not in (None, pid), WAIT_S, "a new process")
    assert asked.types("KEY") == ["secrets_type"]


def ended_for_memory(check: str) -> float:
    labels = {"check": check, "end": "out_of_memory"}
    return REGISTRY.get_sample_value("fairlane_guardrail_restarts_total", labels) or 0.0


def test_a_process_that_needs_too_much_memory_ends_alone_and_is_counted(asked: Asked) -> None:
    with hosted("patterns") as other:
        other.types("KEY")
        before, others_pid = ended_for_memory(asked.host.check), other.host.pid
        asked.ask(ALLOCATE)
        assert asked.next() == (ALLOCATE, DIED)
        assert ended_for_memory(asked.host.check) > before
        assert asked.types("KEY") == ["secrets_type"]
        assert (other.host.pid, ended_for_memory(other.host.check)) == (others_pid, 0)


def test_a_process_that_grows_is_replaced_and_every_call_answered(asked: Asked) -> None:
    asked.types("KEY")
    before, pids = ended_for_memory(asked.host.check), set()
    for number in range(2 * MEMORY_BYTES // LEAKED_BYTES):
        assert asked.types(f"{LEAK} KEY{number}") == ["secrets_type"]
        pid = asked.host.pid
        pids.add(pid)
        assert psutil.Process(pid).memory_info().rss < 2 * MEMORY_BYTES
    assert ended_for_memory(asked.host.check) == before + len(pids) - 1
    assert len(pids) >= 2


def test_a_stopped_process_is_replaced_and_its_call_answered_by_the_next() -> None:
    with hosted() as asked:
        asked.types("KEY")
        pid = asked.host.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert asked.types("KEY") == ["secrets_type"]
        assert asked.host.pid != pid


def test_a_process_that_is_stopped_while_it_gets_a_large_question_is_replaced_in_time() -> None:
    with hosted() as asked:
        asked.types("KEY")
        pid = asked.host.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        asked.ask("KEY" + " x" * (1 << 20))
        asked.ask("of another", within_ms=300, tenant="other")
        assert asked.next() == ("of another", LATE), "its own limit goes on"
        _, answer = asked.next()
        assert not isinstance(answer, CheckFailure)
        assert not isinstance(answer[0], Processed)
        assert [one.type for one in answer[0]] == ["secrets_type"]
        assert asked.host.pid != pid


def test_a_check_that_cannot_be_loaded_fails_every_call() -> None:
    with hosted(MISSING, backoff=Backoff(first_s=60, longest_s=60)) as asked:
        if asked.ask("a") is None:
            assert asked.next() == ("a", UNAVAILABLE)
        began = monotonic()
        assert asked.ask("b") == UNAVAILABLE
        assert monotonic() - began < 5, "at once"


def test_calls_wait_for_a_process_no_longer_than_they_may() -> None:
    slow = Backoff(first_s=60, longest_s=60, jitter=0)
    with hosted(limits=CheckLimits(question_ms=5_000, wait_ms=300, load_ms=20_000), backoff=slow) as asked:
        asked.ask(CRASH)
        assert asked.next() == (CRASH, LATE), "its second try does not come"
        asked.ask("KEY")
        assert asked.next() == ("KEY", LATE)
        asked.ask("short", within_ms=1)
        assert asked.next() == ("short", LATE)


def test_calls_of_a_slow_check_wait_for_their_turn_and_end_no_process() -> None:
    """Each takes a third of what a question may take, and the last waits for longer than for a process that is not
    there."""
    limits = CheckLimits(question_ms=1_200, wait_ms=1_000, load_ms=20_000)
    with hosted(limits=limits) as asked:
        asked.types("KEY")
        pid = asked.host.pid
        texts = [f"{number} {PACED * 2_000} KEY" for number in range(8)]
        for text in texts:
            assert asked.ask(text) is None
        answers = dict(asked.next() for _ in texts)
        assert answers.keys() == set(texts)
        assert [answer for answer in answers.values() if isinstance(answer, CheckFailure)] == []
        assert asked.host.pid == pid


def test_a_long_text_is_asked_about_in_pieces_and_delays_no_other_tenant_to_its_end() -> None:
    """All of it takes longer than a question may take."""
    limits = CheckLimits(question_ms=1_200, wait_ms=1_000, load_ms=20_000)
    with hosted(CUT, limits) as asked:
        asked.types("MAIL")
        pid = asked.host.pid
        part = f"{PACED * 500} " * 6
        text = f"MAIL1 {part}MAIL2 {part}{part}MAIL3"
        asked.ask(text)
        asked.ask("MAIL of another", tenant="other")
        first, _ = asked.next()
        assert first == "MAIL of another"
        _, answer = asked.next()
        assert not isinstance(answer, CheckFailure)
        assert not isinstance(answer[0], Processed)
        assert [text[one.start : one.end] for one in answer[0]] == ["MAIL1", "MAIL2", "MAIL3"]
        assert asked.host.pid == pid


def test_calls_wait_for_the_first_load_of_a_check() -> None:
    with hosted(LARGE, limits=CheckLimits(question_ms=5_000, wait_ms=round(300 * LARGE_S), load_ms=20_000)) as asked:
        asked.ask("MAIL1")
        text, answer = asked.next()
        assert text == "MAIL1"
        assert not isinstance(answer, CheckFailure)


def test_calls_of_a_host_that_ends_fail() -> None:
    with hosted() as asked:
        asked.types("KEY")
        asked.ask(SLOW)
        asked.ask("KEY")
        asked.host.close(WAIT_S)
        left = dict(asked.next() for _ in range(2))
        assert set(left) == {SLOW, "KEY"}
        assert left["KEY"] == ENDING
        assert asked.ask("KEY") == ENDING


def test_the_process_gets_no_setting_and_its_streams_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_DSN", "postgresql://user:password@nowhere/db")
    with hosted() as asked:
        asked.types("KEY")
        process = psutil.Process(asked.host.pid)
        assert "POSTGRES_DSN" not in process.environ()
        assert {str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)} == {"/dev/null"}


def test_answers_are_processed_in_a_process_each_for_itself() -> None:
    wanted = PostProcessing(trim=True, json_schema='{"required": ["a"]}')
    with hosted("post_processing", CheckLimits(question_ms=5_000, load_ms=20_000), module=MODULE) as asked:
        for text in (' {"a": 1}', "{'a': 2,}", '{"b": 3}'):
            asked.ask(text, context=CheckContext(post_processing=wanted))
        answers = dict(asked.next() for _ in range(3))
    assert answers == {
        ' {"a": 1}': [Processed('{"a": 1}', ("trimmed",))],
        "{'a': 2,}": [Processed('{"a": 2}', ("json_repaired",), is_put_together=True)],
        '{"b": 3}': [Processed(refusal="the schema's required is not satisfied")],
    }


def test_a_consumer_has_every_check_and_starts_none() -> None:
    checks = check_processes(Settings(), lambda _: None)
    try:
        unknown = CheckCall("horoscope", CONTEXT, ("a",))
        assert checks.submit("acme", unknown, 1_000, lambda _: None) == UNAVAILABLE
    finally:
        checks.close(1.0)
