"""Requests that are answered from documents: a handbook of each tenant, and questions about it."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.load import Observed, Planned, latency_percentile_ms
from deploy.models.prepare import DEFAULT_MODELS_DIR
from fairlane.records import InferenceRequest, RequestInput, Retrieval
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from fairlane_server.retrieval.store import NewDocument, NewPassage
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually

BUDGET_MS = 150
"""As it is by default. What a store does that is gone or hangs costs a request no more."""

NOISE_MS = 150
"""By which the slowest of so few requests differ on a small machine in any case."""

WARM_UP_S = 2.0
"""In which services that were just started are slower than ever after."""

AROUND_S = 3.0
"""Load before the outage, which begins after this and the warm-up, and after it."""

_NAME = "handbook"
_TOPICS = ("vault", "canteen", "workshop", "lighthouse", "ferry", "archive", "greenhouse", "observatory")


def fill(dsn: str, tenant: str) -> None:
    """Store a passage about each topic, as an operator."""
    texts = [f"The {topic} is opened by the duty engineer at seven." for topic in _TOPICS]
    embedder = StaticEmbedder(DEFAULT_MODELS_DIR / "all-minilm-l6-v2-static")
    vectors = embedder.embed(texts)
    with PgVectorCollections(dsn) as store:
        store.create(tenant, _NAME, embedder.name, embedder.dimensions)
        store.put(
            tenant,
            _NAME,
            [
                NewDocument(topic, text, topic, [NewPassage(text, "", 20)], vectors[index : index + 1])
                for index, (topic, text) in enumerate(zip(_TOPICS, texts, strict=True))
            ],
        )


def grounded(pipeline: Pipeline, planned: list[Planned]) -> list[Planned]:
    """The same, each with a question of its own about the handbook."""

    def asked(number: int, one: Planned) -> Planned:
        request = pipeline.codec.decode_as(InferenceRequest, one.value)
        prompt = f"{number}: who opens the {_TOPICS[number % len(_TOPICS)]}?"
        changed = replace(request, input=RequestInput(prompt=prompt), retrieval=Retrieval(_NAME, 2))
        return replace(one, value=pipeline.codec.encode(changed))

    return [asked(number, one) for number, one in enumerate(planned)]


class Probes:
    """Questions of one tenant beside the load."""

    def __init__(self, pipeline: Pipeline, tenant: str, replies: Replies) -> None:
        self._pipeline = pipeline
        self._tenant = tenant
        self._replies = replies
        self.request_ids: list[str] = []

    def wait_found(self, what: str) -> None:
        """Ask until an answer has passages."""
        eventually(self._finds, what=what)

    def _finds(self) -> bool:
        request = self._pipeline.request(prompt="who opens the vault?", retrieval=Retrieval(_NAME, 2))
        self._pipeline.publish(self._tenant, request)
        self.request_ids.append(request.request_id)
        return bool(self._replies.wait([request.request_id])[request.request_id].passages)


def allowed_p99_ms(around: Sequence[Observed]) -> float:
    """What 99 of 100 requests may take while a store is away, by what they took around it on the same machine, in which
    a moment of it may have been slower than the next."""
    return 2 * p99_ms(around) + BUDGET_MS + NOISE_MS


def p99_ms(observed: Sequence[Observed]) -> float:
    return latency_percentile_ms(observed, 0.99)
