"""backfill: rows per second and peak memory of an offline job, beside a bare loop of confluent-kafka.

The bare loop produces as many requests and consumes them again, on a topic of its own. The same loop through the
dispatcher and the simulated engine shows what the pipeline costs without chunks, checkpoints and files. Both loops end
after ``BARE_ROWS``: their rates are steady. Memory is compared with that of a smaller job.
"""

import json
import subprocess
import sys
import uuid
from contextlib import suppress
from time import monotonic
from typing import Any

from benchmarks.cluster import BenchStack, cluster
from benchmarks.load import ends_of
from benchmarks.processes import peak_bytes
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import MODEL, POOL, UNBOUNDED, UNBOUNDED_TENANT, consumer, dispatcher, simulated_model
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import backfill_topic, replies_topic
from fairlane.outcomes import Priority, Task
from fairlane.records import InferenceRequest, Parameters, RequestInput
from fairlane.schema_files import default_codec
from fairlane.settings import Settings

NAME = "backfill"
HOW = "one run of each"
AIM_RATE = 0.5
AIM_OF_STACK = 0.8
AIM_MEMORY = 1.2
ROWS, FEWER_ROWS, BARE_ROWS = 1_000_000, 100_000, 200_000
_TENANT = "acme"
_BARE_TOPIC = "baseline.bare"
_PROMPT = "why?"
_MAX_TOKENS = 2
_TIMEOUT_MS = 86_400_000
_LOOK_S = 0.1
_TIMEOUT_S = 7_200.0
_BATCH_ITEMS = 256
_LIMITS = {
    "max_context_tokens": 2_048,
    "max_output_tokens": 512,
    "max_batch_size": _BATCH_ITEMS,
    "max_batch_tokens": 65_536,
}
_MODEL = simulated_model(MODEL, Task.GENERATE, POOL, **_LIMITS)
_ENGINE = {
    "ENGINE": "simulated",
    "SIMULATED_PREFILL_TOKENS_PER_S": "1e9",
    "SIMULATED_DECODE_TOKENS_PER_S": "1e9",
    "MAX_BATCH_SIZE": str(_BATCH_ITEMS),
    "MAX_PREFETCH_ITEMS": "2048",
}


def run(rows: int = ROWS, fewer_rows: int = FEWER_ROWS) -> Result:
    """A job of fewer rows, one of all rows, and the bare loops."""
    services = [dispatcher(env=UNBOUNDED), consumer(env=_ENGINE)]
    tenants = [{"tenant": _TENANT, **UNBOUNDED_TENANT}]
    parts = ("kafka", "redis", "postgres")
    with cluster(services, parts=parts, tenants=tenants, topics=(_BARE_TOPIC,), models=(_MODEL,)) as running:
        fewer = _job(running, fewer_rows)
        all_rows = _job(running, rows)
        bare_rows = min(rows, BARE_ROWS)
        through = _bare(running.settings, bare_rows, backfill_topic(_TENANT), replies_topic(_TENANT))
        alone = _bare(running.settings, bare_rows, _BARE_TOPIC, _BARE_TOPIC)
    found = {**all_rows, "through_per_s": through, "alone_per_s": alone, "peak_mib_of_fewer": fewer["peak_mib"]}
    return Result(
        NAME,
        (
            Figure("rows/s divided by a bare loop's", found["rows_per_s"] / alone, "ratio", "at least", AIM_RATE),
            Figure(
                "rows/s divided by a bare loop's through the same pipeline",
                found["rows_per_s"] / through,
                "ratio",
                "at least",
                AIM_OF_STACK,
            ),
            Figure(
                f"peak memory at {rows} rows divided by that at {fewer_rows}",
                found["peak_mib"] / found["peak_mib_of_fewer"],
                "ratio",
                "at most",
                AIM_MEMORY,
            ),
            Figure("job", found["rows_per_s"], "rows/s"),
            Figure("bare loop through the same pipeline", through, "rows/s"),
            Figure("bare loop on a topic of its own", alone, "rows/s"),
            Figure(f"peak memory at {rows} rows", found["peak_mib"], "MiB"),
            Figure(f"peak memory at {fewer_rows} rows", found["peak_mib_of_fewer"], "MiB"),
        ),
        (found,),
    )


def _job(running: BenchStack, rows: int) -> dict[str, float]:
    """The rate and the peak memory of a runner, from when it took the job until the output was whole."""
    source = running.folder / f"{rows}.jsonl"
    with source.open("w") as file:
        row = {"model": MODEL, "prompt": _PROMPT, "max_tokens": _MAX_TOKENS}
        file.writelines(json.dumps({"id": number, **row}) + "\n" for number in range(rows))
    submitted = running.command("producers.backfill", "submit", str(source), f"{source}.out", "--tenant", _TENANT)
    process = subprocess.Popen(
        [sys.executable, "-m", "producers.backfill", "run", submitted["job_id"], "--json"],
        env=running.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak, deadline = 0, monotonic() + _TIMEOUT_S
    try:
        while process.poll() is None:
            # None any more if it ended just now.
            with suppress(OSError):
                peak = max(peak, peak_bytes(process.pid))
            if monotonic() > deadline:
                raise TimeoutError(f"the job did not end within {_TIMEOUT_S:g} s")
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()
        process.wait()
    done = running.command("producers.backfill", "status", submitted["job_id"])
    if done["rows"]["ok"] != rows:
        raise RuntimeError(f"{done['rows']['ok']} of {rows} rows were answered: {done['status']}, {done['reason']}")
    took_s = (done["ended_at_ms"] - done["started_at_ms"]) / 1000
    return {"rows_per_s": rows / took_s, "peak_mib": peak / 1024**2}


def _bare(settings: Settings, rows: int, topic: str, answers: str) -> float:
    """Rows a second, from the first that is produced to the last that is consumed."""
    codec = default_codec()
    fields: dict[str, Any] = {
        "input": RequestInput(prompt=_PROMPT),
        "parameters": Parameters(max_tokens=_MAX_TOKENS),
        "priority": Priority.LOW.value,
        "timeout_ms": _TIMEOUT_MS,
    }
    config = idempotent_producer(settings) | {"queue.buffering.max.messages": 200_000, "linger.ms": 5}
    producer = KafkaProducer(config)
    consumer = KafkaConsumer(read_committed_consumer(settings, f"bench-{uuid.uuid4()}"))
    consumer.assign(ends_of(settings, (answers,)))
    started, produced, consumed = monotonic(), 0, 0
    while consumed < rows:
        if monotonic() - started > _TIMEOUT_S:
            raise TimeoutError(f"{consumed} of {rows} answers after {_TIMEOUT_S:g} s")
        for _ in range(min(1_000, rows - produced)):
            try:
                request = InferenceRequest(str(uuid.uuid4()), MODEL, Task.GENERATE.value, **fields)
                producer.produce(topic, codec.encode(request), request.request_id)
            except BufferError:
                break
            produced += 1
        producer.poll(0)
        consumed += sum(message.error() is None for message in consumer.consume(2_000, 0 if produced < rows else 0.1))
    took_s = monotonic() - started
    producer.flush(10)
    consumer.close()
    return rows / took_s
