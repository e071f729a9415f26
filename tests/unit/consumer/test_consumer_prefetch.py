"""How much a consumer takes into memory before it has answered some of it."""

from collections.abc import Sequence
from typing import Any

from fairlane.ownership import Ownership
from fairlane.schema_files import default_codec
from inference_consumers.consumer import InferenceConsumer, Prefetch
from inference_consumers.schema_waits import SchemaWaits
from tests.kit.driver_bench import DriverBench, named


class Paused:
    """A member in which nothing is written; remembers of which priorities nothing is to be fetched."""

    def __init__(self) -> None:
        self.full: set[str] = set()

    def poll(self, timeout_s: float) -> Sequence[Any]:
        return []

    def pause_priorities(self, full: set[str]) -> None:
        self.full = set(full)


def full_after(bench: DriverBench, consumer: InferenceConsumer) -> set[str]:
    member: Any = Paused()
    consumer.poll_once(member)
    full: set[str] = member.full
    return full


def consumer_of(bench: DriverBench, prefetch: Prefetch) -> InferenceConsumer:
    loop: Any = bench.transactions
    codec = default_codec()
    return InferenceConsumer(
        codec=codec,
        ownership=Ownership(1_000),
        transactions=loop,
        driver=bench.driver,
        prefetch=prefetch,
        clock=lambda: bench.now_ms,
        schema_waits=SchemaWaits(codec),
    )


def test_a_priority_that_holds_its_share_of_bytes_is_not_fetched_until_it_is_half_empty() -> None:
    bench = DriverBench(max_items=1)
    consumer = consumer_of(bench, Prefetch(max_items=100, max_bytes=3_000))
    bench.add(*(named(str(number), priority="low", size_bytes=300) for number in range(3)))
    bench.add(named("other", priority="high", size_bytes=300))
    assert full_after(bench, consumer) == set()
    bench.add(named("4", priority="low", size_bytes=300))
    assert full_after(bench, consumer) == {"low"}, "and no other"
    waits = bench.driver.waiting
    waits.take(lambda one: one.request_id in {"0", "1"})
    assert full_after(bench, consumer) == {"low"}
    waits.take(lambda one: one.request_id == "2")
    assert full_after(bench, consumer) == set()


def test_a_priority_that_holds_its_items_is_not_fetched_until_it_is_half_empty() -> None:
    bench = DriverBench(max_items=1)
    consumer = consumer_of(bench, Prefetch(max_items=4, max_bytes=1 << 30))
    bench.add(*(named(str(number), priority="normal") for number in range(4)))
    assert full_after(bench, consumer) == {"normal"}
    waits = bench.driver.waiting
    waits.take(lambda one: one.request_id in {"0", "1"})
    assert full_after(bench, consumer) == {"normal"}
    waits.take(lambda one: one.request_id == "2")
    assert full_after(bench, consumer) == set()
