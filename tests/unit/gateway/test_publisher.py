"""Publishing: acknowledged, refused for sure, or uncertain; and when nothing is sent any more."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from fairlane.client.connector import KafkaHeaders
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from producers.gateway.pipeline.publisher import TOO_MANY_CALLS, AsyncPublisher
from producers.openai_api.errors import UNAVAILABLE, UNCERTAIN, GatewayError
from tests.kit.waiting import eventually_async

MAX_RECORDS, MAX_BYTES = 8, 2_000
DeliveryReport = Callable[[KafkaError | None, Message], None]
Report = tuple[DeliveryReport, KafkaError | None]


@dataclass
class Producer:
    """Keeps what it was given until the test says what becomes of it."""

    sent: list[tuple[bytes, DeliveryReport]] = field(default_factory=list)
    refuses: Exception | None = None
    dies: Exception | None = None
    was_purged: bool = False
    errors: list[KafkaError] = field(default_factory=list)
    on_error: Callable[[KafkaError], None] = lambda _error: None
    _reports: list[Report] = field(default_factory=list)

    def produce(
        self, topic: str, value: bytes, key: bytes, *, headers: KafkaHeaders, on_delivery: DeliveryReport
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.sent.append((key, on_delivery))

    def poll(self, timeout: float) -> int:
        if self.dies is not None:
            raise self.dies
        if self.errors:
            self.on_error(self.errors.pop())
        assert timeout == 0, "the event loop waits for nothing"
        count = 0
        while self._reports:
            report, error = self._reports.pop(0)
            report(error, Message())
            count += 1
        return count

    def purge(self, *, in_flight: bool, blocking: bool) -> None:
        assert not in_flight, "what is in flight may be in the log"
        assert not blocking, "the event loop waits for nothing"
        self.was_purged = True

    def report(self, code: int | None = None) -> None:
        """The oldest record was acknowledged, or given up with this error."""
        _, on_delivery = self.sent.pop(0)
        self._reports.append((on_delivery, None if code is None else KafkaError(code)))


@dataclass
class Bench:
    producer: Producer = field(default_factory=Producer)
    without_id: Producer = field(default_factory=Producer)
    """Takes the place of the other one, which is idempotent."""
    failures: list[BaseException] = field(default_factory=list)
    now_ms: int = 1_000

    def run(self, test: Callable[[AsyncPublisher], Awaitable[None]]) -> None:
        async def main() -> None:
            def made(on_error: Callable[[KafkaError], None], is_idempotent: bool) -> Producer:
                producer = self.producer if is_idempotent else self.without_id
                producer.on_error = on_error
                return producer

            publisher = AsyncPublisher(
                made,  # type: ignore[arg-type]  # a double
                self.failures.append,
                CircuitBreaker(BreakerPolicy(failures=2)),
                lambda: self.now_ms,
                MAX_RECORDS,
                MAX_BYTES,
            )
            publisher.start()
            try:
                await test(publisher)
            finally:
                await publisher.close()

        asyncio.run(main())


def publish(
    publisher: AsyncPublisher, number: int = 1, size: int = 10, topic: str = "requests.acme"
) -> "asyncio.Future[None]":
    return asyncio.ensure_future(publisher.publish(topic, f"id-{number}", b"x" * size, []))


async def refused(publisher: AsyncPublisher, topic: str = "requests.acme") -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await publisher.publish(topic, "id-9", b"x", [])
    return raised.value


async def outcome_of(call: "asyncio.Future[None]") -> GatewayError | None:
    try:
        await call
    except GatewayError as error:
        return error
    return None


def test_it_returns_when_the_record_is_acknowledged() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        calls = [publish(publisher, number) for number in range(3)]
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
        assert publisher.on_the_way == 3
        for _ in range(3):
            bench.producer.report()
        assert [await outcome_of(call) for call in calls] == [None] * 3
        assert publisher.on_the_way == 0

    bench.run(test)


def test_when_waiting_ends_nobody_knows_what_became_of_what_is_on_its_way() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher)
        await asyncio.sleep(0)
        publisher.end_waiting()
        error = await outcome_of(call)
        assert error is not None
        assert (error.code, error.request_id) == (UNCERTAIN, "id-1")
        bench.producer.report()
        await eventually_async(lambda: not publisher.on_the_way, what="its report")

    bench.run(test)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (KafkaError._MSG_TIMED_OUT, UNCERTAIN),
        (KafkaError.REQUEST_TIMED_OUT, UNCERTAIN),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, UNAVAILABLE),
        (KafkaError._UNKNOWN_TOPIC, UNAVAILABLE),
    ],
)
def test_what_may_be_in_the_log_is_told_with_its_id(code: int, expected: str) -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher)
        await asyncio.sleep(0)
        bench.producer.report(code)
        error = await outcome_of(call)
        assert error is not None
        assert (error.status, error.code) == (503, expected)
        assert error.request_id == ("id-1" if expected == UNCERTAIN else None)
        assert error.retry_after_ms

    bench.run(test)


def test_what_is_too_large_for_its_topic_is_the_callers_mistake() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher)
        await asyncio.sleep(0)
        bench.producer.report(KafkaError.MSG_SIZE_TOO_LARGE)
        error = await outcome_of(call)
        assert error is not None
        assert (error.status, error.field) == (413, "input")

    bench.run(test)


def test_more_than_fits_is_refused_at_once_and_the_room_comes_back() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        calls = [publish(publisher, number, topic=f"requests.{number % 4}") for number in range(8)]
        await asyncio.sleep(0)
        assert (await refused(publisher)).code == "overloaded"
        bench.producer.report()
        await calls[0]
        calls.append(publish(publisher, size=1_980))
        await asyncio.sleep(0)
        assert (await outcome_of(calls.pop())) is not None, "too many bytes"
        calls.append(publish(publisher))
        await asyncio.sleep(0)
        assert publisher.on_the_way == 8
        for _ in range(8):
            bench.producer.report()
        assert [await outcome_of(call) for call in calls] == [None] * 9

    bench.run(test)


def test_one_topic_has_half_of_the_room_and_the_others_the_rest() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        calls = [publish(publisher, number) for number in range(4)]
        await asyncio.sleep(0)
        error = await refused(publisher)
        assert (error.status, error.code) == (429, TOO_MANY_CALLS)
        assert error.retry_after_ms
        calls.append(publish(publisher, size=900, topic="requests.globex"))
        await asyncio.sleep(0)
        error_of_bytes = await outcome_of(publish(publisher, size=101, topic="requests.globex"))
        assert error_of_bytes is not None
        assert error_of_bytes.code == TOO_MANY_CALLS, "many bytes are as much as many records"
        assert publisher.on_the_way == 5
        bench.producer.report()
        await calls[0]
        calls.append(publish(publisher))
        await asyncio.sleep(0)
        for _ in range(5):
            bench.producer.report()
        assert [await outcome_of(call) for call in calls] == [None] * 6

    bench.run(test)


def test_a_record_that_is_alone_may_be_of_any_size() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher, size=5_000)
        await asyncio.sleep(0)
        bench.producer.report()
        assert await outcome_of(call) is None

    bench.run(test)


def test_nothing_is_sent_while_the_oldest_record_waits_for_too_long() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher)
        await asyncio.sleep(0)
        bench.now_ms += 3_000
        assert not publisher.is_available
        assert (await refused(publisher)).code == UNAVAILABLE
        assert len(bench.producer.sent) == 1, "nothing was handed to the producer: it is not accepted for sure"
        bench.producer.report()
        await call
        assert publisher.is_available

    bench.run(test)


def test_a_process_that_did_not_look_for_a_while_looks_before_it_refuses() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher)
        await asyncio.sleep(0)
        bench.now_ms += 3_000
        bench.producer.report()
        again = publish(publisher, 2)
        await asyncio.sleep(0)
        assert [key for key, _ in bench.producer.sent] == [b"id-2"]
        bench.producer.report()
        assert [await outcome_of(one) for one in (call, again)] == [None, None]

    bench.run(test)


def test_a_topic_that_stalls_alone_is_refused_alone() -> None:
    bench = Bench()
    mine, theirs = "requests.acme", "requests.globex"

    async def acknowledged(publisher: AsyncPublisher) -> None:
        call = publish(publisher, topic=theirs)
        await asyncio.sleep(0)
        bench.producer.sent.reverse()
        bench.producer.report()
        bench.producer.sent.reverse()
        await call

    async def test(publisher: AsyncPublisher) -> None:
        stuck = [publish(publisher, number, topic=mine) for number in range(2)]
        await asyncio.sleep(0)
        for _ in range(3):
            bench.now_ms += 1_500
            await acknowledged(publisher)
        assert publisher.is_available
        assert (await refused(publisher, mine)).code == UNAVAILABLE
        for _ in stuck:
            bench.producer.report(KafkaError._MSG_TIMED_OUT)
        errors = [await outcome_of(call) for call in stuck]
        assert [error and error.code for error in errors] == [UNCERTAIN] * 2
        await acknowledged(publisher)
        # Several that stall are the log itself.
        for number, topic in enumerate((mine, theirs)):
            publish(publisher, number, topic=topic)
        await asyncio.sleep(0)
        bench.now_ms += 1_500
        last = publish(publisher, topic="requests.initech")
        await asyncio.sleep(0)
        bench.producer.sent.reverse()
        bench.producer.report()
        await last
        bench.now_ms += 1_500
        assert publisher.is_stalled(bench.now_ms)
        assert (await refused(publisher, "requests.initech")).code == UNAVAILABLE
        for _ in range(2):
            bench.producer.report()
        await eventually_async(lambda: not publisher.on_the_way, what="the end of all")

    bench.run(test)


def test_after_records_were_given_up_one_is_tried_now_and_then() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        calls = [publish(publisher, number) for number in range(2)]
        await asyncio.sleep(0)
        for _ in range(2):
            bench.producer.report(KafkaError._MSG_TIMED_OUT)
        await asyncio.gather(*calls, return_exceptions=True)
        assert (await refused(publisher)).code == UNAVAILABLE
        bench.now_ms += 10_000
        tried = publish(publisher)
        await asyncio.sleep(0)
        assert (await refused(publisher)).code == UNAVAILABLE
        bench.producer.report()
        await tried
        again = publish(publisher)
        await asyncio.sleep(0)
        bench.producer.report()
        await again

    bench.run(test)


def test_a_refused_topic_closes_nothing_for_others() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        for _ in range(3):
            call = publish(publisher)
            await asyncio.sleep(0)
            bench.producer.report(KafkaError._UNKNOWN_TOPIC)
            await outcome_of(call)
        assert publisher.is_available

    bench.run(test)


@pytest.mark.parametrize("error", [BufferError(), KafkaException(KafkaError(KafkaError._INVALID_ARG))])
def test_what_the_producer_does_not_take_is_not_accepted(error: Exception) -> None:
    bench = Bench(Producer(refuses=error))

    async def test(publisher: AsyncPublisher) -> None:
        assert (await refused(publisher)).status == 503
        assert publisher.on_the_way == 0

    bench.run(test)


def test_a_caller_who_is_gone_does_not_disturb_the_others() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        gone, here = publish(publisher, 1), publish(publisher, 2)
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        for _ in range(2):
            bench.producer.report()
        assert await outcome_of(here) is None
        assert publisher.on_the_way == 0

    bench.run(test)


def test_room_that_is_free_and_was_not_looked_for_is_found() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        calls = [publish(publisher, number) for number in range(4)]
        await asyncio.sleep(0)
        bench.producer.report()
        # Before the event loop comes to look.
        calls.append(publish(publisher, 5))
        await asyncio.sleep(0)
        assert not calls[-1].done()
        for _ in range(4):
            bench.producer.report()
        assert [await outcome_of(call) for call in calls] == [None] * 5

    bench.run(test)


def test_a_producer_that_dies_is_told_and_nobody_waits_for_it() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        bench.producer.dies = KafkaException(KafkaError(KafkaError._FATAL))
        await eventually_async(lambda: bench.failures, what="the failure")
        assert (await refused(publisher)).code == UNAVAILABLE

    bench.run(test)
    assert [type(failure) for failure in bench.failures] == [KafkaException]


FATAL = KafkaError(KafkaError._FATAL, "out of order sequence number", fatal=True)


@pytest.mark.parametrize(
    "code",
    [KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.UNKNOWN_PRODUCER_ID],
)
def test_a_record_that_is_lost_with_the_producers_id_is_sent_without_one(code: int) -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        lost, other = publish(publisher, 1), publish(publisher, 2, topic="requests.globex")
        await asyncio.sleep(0)
        bench.producer.report(code)
        await eventually_async(lambda: bench.without_id.sent, what="the record, once more")
        assert [key for key, _ in bench.without_id.sent] == [b"id-1"]
        assert bench.producer.was_purged
        later = publish(publisher, 3)
        await asyncio.sleep(0)
        for _ in range(2):
            bench.without_id.report()
        # What was in flight with an id is still acknowledged.
        bench.producer.report()
        assert [await outcome_of(call) for call in (lost, other, later)] == [None] * 3
        assert publisher.is_available

    bench.run(test)
    assert bench.failures == []


@pytest.mark.parametrize("where", ["poll", "error_cb", "produce"])
def test_a_fatal_error_of_the_idempotent_producer_ends_nothing(where: str) -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        waiting = publish(publisher, 1)
        await asyncio.sleep(0)
        if where == "poll":
            bench.producer.dies = KafkaException(FATAL)
        elif where == "error_cb":
            bench.producer.errors = [FATAL]
        else:
            bench.producer.refuses = KafkaException(FATAL)
            next_one = publish(publisher, 2)
        await eventually_async(lambda: bench.producer.was_purged, what="the other producer")
        bench.producer.dies = None
        bench.producer.report(KafkaError._PURGE_QUEUE)
        expected = 2 if where == "produce" else 1
        await eventually_async(lambda: len(bench.without_id.sent) == expected, what="the records, once more")
        for _ in range(expected):
            bench.without_id.report()
        assert await outcome_of(waiting) is None
        if where == "produce":
            assert await outcome_of(next_one) is None

    bench.run(test)
    assert bench.failures == []


def test_a_record_is_sent_again_once() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        call = publish(publisher)
        await asyncio.sleep(0)
        bench.producer.report(KafkaError.INVALID_PRODUCER_EPOCH)
        await eventually_async(lambda: bench.without_id.sent, what="the record, once more")
        bench.without_id.report(KafkaError.INVALID_PRODUCER_EPOCH)
        error = await outcome_of(call)
        assert error is not None
        assert error.code == UNAVAILABLE
        assert publisher.on_the_way == 0

    bench.run(test)


def test_a_record_that_may_be_in_the_log_is_not_sent_again() -> None:
    bench = Bench()

    async def test(publisher: AsyncPublisher) -> None:
        lost, uncertain = publish(publisher, 1), publish(publisher, 2)
        await asyncio.sleep(0)
        bench.producer.report(KafkaError.INVALID_PRODUCER_EPOCH)
        bench.producer.report(KafkaError._MSG_TIMED_OUT)
        error = await outcome_of(uncertain)
        assert error is not None
        assert error.code == UNCERTAIN
        bench.without_id.report()
        assert await outcome_of(lost) is None

    bench.run(test)


def test_a_fatal_error_without_an_id_is_told_and_another_error_is_not() -> None:
    bench = Bench()

    async def test(_publisher: AsyncPublisher) -> None:
        bench.producer.errors = [FATAL, KafkaError(KafkaError._ALL_BROKERS_DOWN)]
        await eventually_async(lambda: bench.producer.was_purged, what="the other producer")
        assert bench.failures == []
        bench.without_id.errors = [FATAL, KafkaError(KafkaError._ALL_BROKERS_DOWN)]
        await eventually_async(lambda: bench.failures, what="the failure")

    bench.run(test)
    assert not bench.producer.errors
    assert len(bench.failures) == 1


def test_the_end_waits_for_what_is_on_its_way() -> None:
    bench = Bench()
    calls: list[asyncio.Future[None]] = []

    async def test(publisher: AsyncPublisher) -> None:
        calls.append(publish(publisher))
        await asyncio.sleep(0)
        bench.producer.report()
        await publisher.close()
        assert await outcome_of(calls[0]) is None
        assert not publisher.on_the_way

    bench.run(test)
