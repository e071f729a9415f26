"""exactly-once-cost: a consumer's throughput with transactions, beside the same consumer without.

The engine is simulated: 100 ms a batch of 32, over 32 tenants' reply topics. Commits overlap the next batch in both.
"""

import threading
from collections.abc import Sequence

from benchmarks.cluster import cluster, shipped_model
from benchmarks.dispatch_rate import output_rate
from benchmarks.load import ends_of, make_request, make_work_item
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import idempotent_producer
from fairlane.names import priority_topic, replies_topic
from fairlane.offsets import MAX_SPAN
from fairlane.outcomes import Priority
from fairlane.ownership import Ownership
from fairlane.records import Parameters
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.kafka.transactions import Settlement, TransactionBatch, TransactionLoop
from inference_consumers.app import ConsumerApp

NAME = "exactly-once-cost"
HOW = MEDIAN_OF_REPETITIONS
AIM = 0.9
BATCH_MS = 100.0
BATCH_ITEMS = 32
BATCHES = 60
_TENANTS = tuple(f"tenant-{number}" for number in range(BATCH_ITEMS))
_POOL = "generate"
_TIMEOUT_S = 120.0
_NO_TIME_TOKENS_PER_S = 1e12


class PlainLoop(TransactionLoop):
    """The same loop without transactions: the outputs are produced and flushed, and no offset is committed at all."""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="plain", daemon=True)
        self._thread.start()

    def _commit(self, batch: TransactionBatch) -> Sequence[Settlement]:
        plan = self.ownership.plan((settlement.claim for settlement in batch.settlements), 1 << 20)
        if plan is None:
            return ()
        outputs = (record for settlement in batch.settlements for record in settlement.outputs)
        for record in (*batch.notes, *outputs):
            self.producers[0].produce(record.topic, value=record.value, key=record.key, headers=list(record.headers))
        self.producers[0].flush(10.0)
        self.ownership.settle(plan)
        return batch.settlements


class _PlainApp(ConsumerApp):
    def _transactions(self, ownership: Ownership) -> TransactionLoop:
        producer = KafkaProducer(idempotent_producer(self._settings) | {"linger.ms": 0})
        return PlainLoop((producer,), ownership, on_fatal=self._fail)


def run() -> Result:
    """Three repetitions; in each both consumers work off the same backlog, one after the other."""
    with cluster([], parts=("kafka",), tenants=_TENANTS) as running:
        _publish(running.settings)

        def measure(number: int) -> dict[str, float]:
            plain = _rate(running.settings, _PlainApp, f"plain-{number}")
            transactional = _rate(running.settings, ConsumerApp, f"transactional-{number}")
            return {"transactional_per_s": transactional, "plain_per_s": plain, "ratio": transactional / plain}

        runs = repeated(measure)
    return Result(
        NAME,
        (
            Figure(
                "throughput divided by that without transactions", median_of(runs, "ratio"), "ratio", "at least", AIM
            ),
            Figure("with transactions", median_of(runs, "transactional_per_s"), "items/s"),
            Figure("without", median_of(runs, "plain_per_s"), "items/s"),
        ),
        runs,
    )


def _rate(settings: Settings, app_type: type[ConsumerApp], group: str) -> float:
    """Items per second by the broker's timestamps of the replies."""
    own = settings.model_copy(
        update={
            "group_prefix": group,
            "instance_id": group,
            "max_undone_span": MAX_SPAN,
            "batch_timeout_ms": 5,
            "engine": "simulated",
            "simulated_batch_ms": BATCH_MS,
            "simulated_prefill_tokens_per_s": _NO_TIME_TOKENS_PER_S,
            "simulated_decode_tokens_per_s": _NO_TIME_TOKENS_PER_S,
        }
    )
    app = app_type(own, _POOL)
    ends = ends_of(settings, [replies_topic(tenant) for tenant in _TENANTS])
    thread = threading.Thread(target=app.run_here, name=group)
    thread.start()
    try:
        # The first batch fills while the group forms.
        return output_rate(settings, ends, BATCHES * BATCH_ITEMS, skip=BATCH_ITEMS)
    finally:
        app.stop()
        thread.join(_TIMEOUT_S)


def _publish(settings: Settings) -> None:
    producer = KafkaProducer(idempotent_producer(settings))
    codec = default_codec()
    model = shipped_model()
    for number in range(BATCHES * BATCH_ITEMS):
        tenant = _TENANTS[number % len(_TENANTS)]
        request = make_request(model=model.model, parameters=Parameters(max_tokens=8))
        item = make_work_item(request, tenant, _POOL, number, model_version=model.version, cost_tokens=10)
        producer.produce(priority_topic(_POOL, Priority.NORMAL), value=codec.encode(item), key=request.request_id)
        producer.poll(0)
    if producer.flush(30):
        raise TimeoutError("the backlog could not be published within 30 s")
