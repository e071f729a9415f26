"""Callers of gateways while something is away, and what became of what they were told.

with Traffic(served) as traffic:
    traffic.wait_more(20, "calls before the outage")
    ...
check_promise(served, traffic.ids)
"""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import cycle
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import httpx

from fairlane.names import GATEWAY_REPLIES
from fairlane.outcomes import Outcome
from producers.gateway.idempotency import IN_FLIGHT
from producers.openai_api.errors import REQUEST_ID_HEADER, UNAVAILABLE, UNCERTAIN
from tests.kit.gateway_kit import LONG_MS, Served
from tests.kit.log_reader import Replies
from tests.kit.recorder_kit import Tables
from tests.kit.waiting import INTERVAL_S, PATIENCE_S, eventually

CALLERS = 6
PASSING = frozenset({"overloaded", "no_capacity", "deadline_unmeetable", UNAVAILABLE, UNCERTAIN, IN_FLIGHT})
"""What callers come back after. A machine that is slow enough has these said to anybody."""
CALL_PATIENCE_S = 10 * PATIENCE_S
"""Longer than a key stays with a gateway that died before it said whether it had published, and than an outage."""
MOST_LOOKED_UP = 1_000
"""Over HTTP; of more, the others are looked for in the log and in Postgres."""


class Traffic:
    """Callers of the tenant ``a`` while its context is open. Each sends a request and goes on when it is accepted; then
    it asks a question and waits for the answer. Each call has a key, under which it is sent again until it is taken. A
    refusal that is none of ``PASSING`` ends the test.

    Args:
        served: who is called.
        gateways: numbers of those that are called. With several, who loses the connection goes to the next.
    """

    def __init__(self, served: Served, *, gateways: Sequence[int] = (1,)) -> None:
        self._served = served
        self._gateways = gateways
        self._stopping, self._hurrying = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(CALLERS)
        self._calls: list[Future[None]] = []
        self.sent: list[str] = []
        """Ids of what was sent and accepted."""
        self.answered: list[str] = []
        """Ids of what was waited for and answered."""
        self.refused: list[httpx.Response] = []

    @property
    def ids(self) -> set[str]:
        """Of everything that was accepted."""
        return {*self.sent.copy(), *self.answered.copy()}

    def __enter__(self) -> Self:
        self._calls = [self._pool.submit(self._call_for_ever, number) for number in range(CALLERS)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets every caller finish its call. Raises what ended one, unless the test has failed by itself."""
        self._stopping.set()
        if error is not None:
            self._hurrying.set()
        self._pool.shutdown()
        if error is None:
            for call in self._calls:
                call.result()
            assert len(self.ids) == len(self.sent) + len(self.answered), "a key is a request"

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """``eventually``; what ends a caller meanwhile is raised here."""

        def came_about() -> bool:
            for call in self._calls:
                if call.done():
                    call.result()
            return bool(condition())

        eventually(came_about, timeout_s, what)

    def wait_more(self, calls: int, what: str, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Until so many more of either kind were successful. What ends by itself meanwhile is started again."""
        sent, answered = len(self.sent) + calls, len(self.answered) + calls

        def came_about() -> bool:
            self._served.run_all()
            return len(self.sent) >= sent and len(self.answered) >= answered

        self.wait(came_about, what, timeout_s)

    def _call_for_ever(self, number: int) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(self._served.client(number=gateway)) for gateway in self._gateways]
            for client in clients:
                client.timeout = httpx.Timeout(CALL_PATIENCE_S)
            turns = cycle(clients[number % len(clients) :] + clients[: number % len(clients)])
            while not self._stopping.is_set():
                body = {**self._served.question(), "timeout_ms": LONG_MS}
                self.sent.append(self._done(turns, "/v1/requests", body, 202))
                if not self._stopping.is_set():
                    self.answered.append(self._done(turns, "/v1/chat/completions", self._served.chat(), 200))

    def _done(self, turns: "cycle[httpx.Client]", path: str, body: dict[str, Any], status: int) -> str:
        """Sent again until it is taken; the id of its request."""
        headers, deadline = {"Idempotency-Key": str(uuid4())}, monotonic() + CALL_PATIENCE_S
        client = next(turns)
        while not self._hurrying.is_set():
            assert monotonic() < deadline, f"{path} was refused for {CALL_PATIENCE_S:g} s"
            try:
                answer = client.post(path, json=body, headers=headers)
            except httpx.TransportError:
                if len(self._gateways) == 1:
                    raise
                client = next(turns)
                self._hurrying.wait(0.1)
                continue
            if answer.is_success:
                # Of one that was sent before, the answer may be there.
                assert answer.status_code == status, answer.text
                return answer.headers[REQUEST_ID_HEADER]
            assert answer.json()["error"]["code"] in PASSING, f"{answer.status_code} {answer.text}"
            self.refused.append(answer)
            self._hurrying.wait(int(answer.headers["retry-after-ms"]) / 1_000)
        raise AssertionError("the test failed meanwhile")


def check_promise(served: Served, ids: Collection[str], *, number: int = 1) -> None:
    """One final reply to each of these in the log, one row with it in Postgres, and found at this gateway."""
    wanted = set(ids)
    assert wanted
    replies = Replies(served.pipeline.reader(GATEWAY_REPLIES), served.pipeline.codec)

    def answered() -> bool:
        served.run_all()
        with suppress(AssertionError):
            replies.wait(wanted, 1.0)
        return wanted <= replies.by_id.keys()

    eventually(answered, 2 * PATIENCE_S, "a final reply to each request that was accepted")
    replies.read_to_end()
    assert {reply.outcome for reply in replies.exactly_once(wanted).values()} == {Outcome.OK}
    tables = Tables(served.database)

    def recorded() -> bool:
        served.run_all()
        rows = tables.rows(
            "SELECT request_id, replies_seen FROM results WHERE tenant = %s AND request_id = ANY(%s)",
            served.pipeline.tenant("a"),
            list(wanted),
        )
        assert {seen for _, seen in rows} <= {1}
        assert len(rows) == len(dict(rows)), "one row for each"
        return dict(rows).keys() == wanted

    eventually(recorded, 2 * PATIENCE_S, "a row for each request that was accepted")
    wait_found(served, wanted, number=number)


def wait_found(served: Served, ids: Collection[str], *, number: int = 1) -> None:
    """Until this gateway tells the results of these, all of them or as many as may be looked up. Before, it says that
    there are none yet, or that it cannot look, or not so often: then it is asked again when it says."""
    missing = dict.fromkeys(sorted(ids)[:: -(-len(ids) // MOST_LOOKED_UP)])
    deadline = monotonic() + 2 * PATIENCE_S

    def asked(request_id: str) -> httpx.Response:
        while True:
            answer = client.get(f"/v1/results/{request_id}")
            if answer.status_code not in (429, 503):
                return answer
            assert monotonic() < deadline, f"{len(missing)} results could not be looked up: {answer.text}"
            sleep(int(answer.headers["retry-after-ms"]) / 1_000)  # as a caller is told to

    with served.client(number=number) as client:
        while missing:
            for request_id in list(missing):
                answer = asked(request_id)
                assert answer.status_code in (200, 202), answer.text
                if answer.status_code == 200:
                    assert (answer.json()["id"], answer.json()["outcome"]) == (request_id, Outcome.OK)
                    del missing[request_id]
                    # Of as many as there are: it only bounds a hang.
                    deadline = monotonic() + 2 * PATIENCE_S
            assert monotonic() < deadline, f"{len(missing)} results of what was accepted were not found"
            if missing:
                sleep(INTERVAL_S)


def until_taken(send: Callable[[], httpx.Response]) -> httpx.Response:
    """What is said to a call that is sent again when it is told to come back. Whose request is in flight is not."""
    deadline = monotonic() + CALL_PATIENCE_S
    while (answer := send()).status_code in (429, 503):
        assert answer.json()["error"]["code"] in PASSING, answer.text
        assert monotonic() < deadline, answer.text
        sleep(int(answer.headers["retry-after-ms"]) / 1_000)  # as a caller is told to
    return answer


def degraded(served: Served) -> set[str]:
    """What the first gateway says that it does without, as soon as it is ready: a busy broker keeps it from that for a
    moment."""
    answers: list[httpx.Response] = []

    def is_ready() -> bool:
        answers.append(httpx.get(served.url("/health/ready"), timeout=PATIENCE_S))
        return answers[-1].status_code == 200

    eventually(is_ready, what="a gateway that is ready")
    return set(answers[-1].json()["degraded"])
