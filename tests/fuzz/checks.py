"""What is fuzzed within a process: one input in, a Finding when a promise about it does not hold."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import NoReturn

from aiokafka.structs import TopicPartition

from fairlane.codec import DecodeError
from fairlane.names import returned_topic
from fairlane.records import InferenceRequest
from fairlane.schema_files import default_codec
from producers.backfill.job import GoodRow
from producers.backfill.rows import parse_row
from producers.gateway.native.request_bodies import ClassifyRequest, NewRequest, RankRequest
from producers.gateway.openai.batches import BatchBody
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError
from producers.openai_api.request_models import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    chat_request,
    completion_request,
    embedding_request,
)
from stream_processors.dispatcher.intake.classifier import RecordClassifier
from stream_processors.dispatcher.queued_request import ReceivedRecord
from stream_processors.dispatcher.reading.fetched_partition import CommittedRecords
from tests.fuzz import corpus
from tests.fuzz.mutation import mutated_bytes, mutated_json
from tests.fuzz.record_batch import repaired, some_batch
from tests.kit.dispatcher_bench import PARTITION, Bench

_TENANT, _REQUEST_ID = "acme", "00000000-0000-0000-0000-000000000001"
_TOPICS = (PARTITION.topic, "backfill.acme", returned_topic("pool"))
_URL = "/v1/chat/completions"
_AT_MS = 1_000_000
_TP = TopicPartition("requests.acme", 0)


class Finding(Exception):  # noqa: N818 - it is what a fuzzer looks for, not an error of its own
    """A promise that an input broke; the text quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to fuzz.

    Attributes:
        seeds: inputs to begin with.
        mutated: an input made of them.
        check: raises Finding; any other exception is a finding too.
    """

    seeds: Sequence[bytes]
    mutated: Callable[[Random], bytes]
    check: Callable[[bytes], None]

    def case(self, seed: int, number: int) -> bytes:
        """The input of this number: the seeds first, as they are, then mutations of them."""
        return corpus.chosen(self.seeds, number) or self.mutated(Random(f"{seed}:{number}"))


def records() -> Target:
    """Bytes as a tenant writes them to a topic: decoding, and what intake makes of them."""
    seeds = corpus.records()
    return Target(seeds, lambda rng: mutated_bytes(rng.choice(seeds), rng, seeds), RecordCheck())


def bodies() -> Target:
    """Bodies of calls to the gateway and rows of offline jobs."""
    seeds = corpus.bodies()
    return Target(seeds, lambda rng: mutated_json(rng.choice(seeds), rng, seeds), check_body)


def batches() -> Target:
    """Record batches as a broker hands them on, read as a dispatcher does: records or reasons, in order, and no end."""
    seeds, values = corpus.remembered("batches"), corpus.records()

    def mutated(rng: Random) -> bytes:
        batch = rng.choice(seeds) if rng.random() < 0.2 else some_batch(rng, values, _AT_MS)
        changed = mutated_bytes(batch, rng, values)
        return repaired(changed) if rng.random() < 0.8 else changed

    def check(data: bytes) -> None:
        records = CommittedRecords(_TP, data, [], 0)
        position = 0
        for record in records:
            if record.offset < position or records.next_fetch_offset <= record.offset:
                raise Finding("offsets out of order")
            position = records.next_fetch_offset

    return Target(seeds, mutated, check)


class _ClassifierThatRaises(RecordClassifier):
    """What it would bury as a dead letter of our own making is to be seen here."""

    __slots__ = ()

    def broken(self, _arrival: ReceivedRecord, error: Exception) -> NoReturn:
        raise Finding(f"intake failed: {type(error).__name__}") from error


class RecordCheck:
    """A codec raises DecodeError and nothing else; intake answers everything, and nothing fails in our own code."""

    def __init__(self) -> None:
        self._codec = default_codec()
        self._bench = Bench()
        self._bench.assign(*_TOPICS[1:])
        partitions = [PARTITION._replace(topic=topic) for topic in _TOPICS]
        self._claims = [(partition, self._bench.ownership.deliver(partition, 0)) for partition in partitions]
        self._bench.classifier.__class__ = _ClassifierThatRaises

    def __call__(self, data: bytes) -> None:
        with suppress(DecodeError):
            self._codec.decode(data)
        for partition, claim in self._claims:
            assert claim is not None
            self._bench.classifier.classify(claim, ReceivedRecord(partition, 0, _AT_MS, b"key", data))


def check_body(data: bytes) -> None:
    """Every kind of body is refused with a 400 that may be sent, or becomes a request that can be encoded."""
    for make in (_chat, _completion, _embedding, _native, _rank, _classify, _batch):
        try:
            request = make(data)
        except GatewayError as refusal:
            if refusal.status != 400:
                raise Finding(f"{make.__name__}: status {refusal.status}") from None
            refusal.message.encode()
            continue
        _encodable(make.__name__, request)
    for url in (None, _URL):
        row = parse_row(data, _TENANT, {"model": "words"}, url)
        if isinstance(row, GoodRow):
            _encodable("row", row.request)


def _encodable(name: str, request: InferenceRequest | None) -> None:
    if request is not None:
        try:
            default_codec().encode(request)
        except ValueError as error:
            # The gateway answers 400 then; the reason must be one that names a field.
            if not str(error).partition(": ")[2]:
                raise Finding(f"{name}: a refusal without a field") from None


def _chat(data: bytes) -> InferenceRequest:
    return chat_request(parse(ChatBody, data), _TENANT, _REQUEST_ID)


def _completion(data: bytes) -> InferenceRequest:
    return completion_request(parse(CompletionBody, data), _TENANT, _REQUEST_ID)


def _embedding(data: bytes) -> InferenceRequest:
    return embedding_request(parse(EmbeddingBody, data), _TENANT, _REQUEST_ID)


def _native(data: bytes) -> InferenceRequest:
    return parse(NewRequest, data).to_request(_TENANT, _REQUEST_ID)


def _rank(data: bytes) -> InferenceRequest:
    return parse(RankRequest, data).to_request(_TENANT, _REQUEST_ID)


def _classify(data: bytes) -> InferenceRequest:
    return parse(ClassifyRequest, data).to_request(_TENANT, _REQUEST_ID)


def _batch(data: bytes) -> None:
    parse(BatchBody, data)
