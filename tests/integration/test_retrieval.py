"""Requests answered from their tenant's documents and from what was said before: the dispatcher, the recorder, Postgres
and the static embedder, all real."""

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from deploy.models.prepare import DEFAULT_MODELS_DIR
from fairlane.names import LEDGER_AUDIT
from fairlane.outcomes import Code, Degradation, HistoryReason, Outcome, RetrievalMode, RetrievalReason
from fairlane.records import AuditEvent, HistoryUse, InferenceReply, Retrieval
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from fairlane_server.retrieval.store import Collection, NewDocument, NewPassage
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.recorder_kit import Proxy, proxied
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.model]

NAME = "handbook"
TEXTS = {
    "vault.md": "The vault of the north depot is opened by the duty engineer with a brass key.",
    "lunch.md": "Lunch is served in the canteen from noon until two, on Fridays with fish.",
    "bikes.md": "Bicycles stand under the green roof behind the workshop.",
}
QUESTION = "Who opens the vault of the depot?"
ROOMY = {"RETRIEVAL_BUDGET_MS": "2000"}
"""The promise of the default budget is measured elsewhere, on a machine that does nothing else."""


@dataclass
class Kit:
    """A running pipeline whose tenant a has a handbook; b has none."""

    pipeline: Pipeline
    store: PgVectorCollections
    embedder: StaticEmbedder
    proxy: Proxy
    replies: Replies

    def fill(self, texts: dict[str, str]) -> Collection:
        """Put these into the handbook of a."""
        tenant = self.pipeline.tenant("a")
        vectors = self.embedder.embed(list(texts.values()))
        documents = [
            NewDocument(source, f"hash of {text}", source, [NewPassage(text, "", 20)], vectors[index : index + 1])
            for index, (source, text) in enumerate(texts.items())
        ]
        self.store.put(tenant, NAME, documents)
        return self.store.get(tenant, NAME)

    def ask(
        self,
        question: str = QUESTION,
        *,
        tenant: str = "a",
        collection: str = NAME,
        mode: str = "hybrid",
        top_k: int = 1,
        cache: str | None = None,
    ) -> InferenceReply:
        request = self.pipeline.request(prompt=question, retrieval=Retrieval(collection, top_k, mode), cache=cache)
        self.pipeline.publish(tenant, request)
        return self.replies.wait([request.request_id])[request.request_id]

    def say(self, text: str, conversation: str, after: str | None = None, *, tenant: str = "a") -> InferenceReply:
        """The next turn of a conversation."""
        request = self.pipeline.request(prompt=text, conversation_id=conversation, conversation_after=after)
        self.pipeline.publish(tenant, request)
        return self.replies.wait([request.request_id])[request.request_id]


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, unique_name()) as made:
        yield made


@pytest.fixture(scope="module")
def kit(
    broker: str, redis_url: str, database: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kit]:
    embedder = StaticEmbedder(DEFAULT_MODELS_DIR / "all-minilm-l6-v2-static")
    store = PgVectorCollections(database.operator_dsn)
    with proxied(database.dispatcher_dsn) as (proxy, dsn):
        env = {"POSTGRES_DSN": dsn, **ROOMY}
        folder = tmp_path_factory.mktemp("retrieval")
        with Pipeline(broker, folder, unique_name(), redis_url=redis_url, env=env) as pipeline:
            made = Kit(pipeline, store, embedder, proxy, pipeline.replies())
            store.create(pipeline.tenant("a"), NAME, embedder.name, embedder.dimensions)
            made.fill(TEXTS)
            pipeline.recorder(postgres_dsn=database.recorder_dsn)
            pipeline.start()
            yield made
            for process in pipeline.processes.values():
                process.stop()
        embedder.close()
        store.close()


def test_a_request_is_answered_from_its_tenants_documents_and_nobody_elses(kit: Kit) -> None:
    version = kit.store.get(kit.pipeline.tenant("a"), NAME).version
    # The first may come while the embedder is still being loaded.
    eventually(lambda: kit.ask().passages, what="an embedder")
    reply = kit.ask()
    assert (reply.outcome, reply.degradations) == (Outcome.OK, ())
    (passage,) = reply.passages
    assert "vault.md" in passage.passage_id
    assert reply.retrieval_use is not None
    used = reply.retrieval_use
    assert (used.collection, used.mode, used.reason, used.collection_version) == (NAME, "hybrid", None, version)
    # Everything that this one got to read was the question and the passage.
    assert reply.usage.prompt_tokens > len(QUESTION.split())

    theirs = kit.ask(tenant="b")
    assert (theirs.outcome, theirs.code, theirs.field) == (Outcome.REJECTED, Code.INVALID, "retrieval.collection")
    assert theirs.passages == ()
    missing = kit.ask(collection="atlas")
    assert (missing.code, missing.field) == (Code.INVALID, "retrieval.collection")

    vector = kit.ask(mode="vector", top_k=64)
    assert len(vector.passages) == len(TEXTS)
    assert vector.retrieval_use is not None
    assert vector.retrieval_use.mode == RetrievalMode.VECTOR

    kit.store.remove(kit.pipeline.tenant("a"), NAME, ["vault.md"])
    eventually(lambda: all("vault.md" not in one.passage_id for one in kit.ask(top_k=3).passages), what="the change")
    audit = kit.pipeline.reader(LEDGER_AUDIT)
    audit.read_to_end()
    dispatched = [
        event.inputs
        for event in kit.pipeline.decoded(audit, AuditEvent)
        if event.request_id == reply.request_id and event.decision == "dispatched"
    ]
    assert [(inputs["retrieval_mode"], inputs["passages"]) for inputs in dispatched] == [("hybrid", "1")]
    assert all(QUESTION not in str(inputs) for inputs in dispatched)


def test_without_postgres_requests_go_on_and_say_why(kit: Kit) -> None:
    eventually(lambda: kit.ask().passages, what="an embedder")
    kit.proxy.cut()
    away = {RetrievalReason.UNAVAILABLE, RetrievalReason.LATE}
    new = kit.ask("Where do bicycles stand?")
    assert (new.outcome, new.degradations, new.passages) == (Outcome.OK, (Degradation.NO_RETRIEVAL,), ())
    assert new.retrieval_use is not None
    assert new.retrieval_use.reason in away
    # What was found before is used for a while, once it is not certain any more that it is what would be found now.
    eventually(lambda: kit.ask().degradations, what="doubts")
    known = kit.ask()
    assert (known.outcome, known.degradations) == (Outcome.OK, (Degradation.CACHED_ONLY,))
    assert known.passages
    assert known.retrieval_use is not None
    assert (known.retrieval_use.mode, known.retrieval_use.reason in away) == (RetrievalMode.CACHED, True)
    kit.proxy.restore()
    eventually(lambda: kit.ask("Where do bicycles stand?").passages, what="passages again")


def test_an_index_that_is_built_and_a_locked_table_hold_up_nobody(kit: Kit, database: PostgresServer) -> None:
    eventually(lambda: kit.ask().passages, what="an embedder")
    number = kit.store.get(kit.pipeline.tenant("a"), NAME).number
    with psycopg.connect(database.owner_dsn) as connection:
        connection.execute(f"LOCK TABLE passages_{number} IN SHARE MODE".encode())
        # As while an index is built: reading goes on.
        assert kit.ask("When is lunch served?").passages
        connection.execute(f"LOCK TABLE passages_{number} IN ACCESS EXCLUSIVE MODE".encode())
        reply = kit.ask("Which roof is green?")
        assert reply.outcome == Outcome.OK
        assert reply.retrieval_use is not None
        assert (reply.retrieval_use.mode, reply.retrieval_use.reason) == ("none", RetrievalReason.LATE)
        connection.rollback()
    assert kit.ask("Which roof is green?").passages


def test_an_answer_from_documents_is_given_again_until_they_change(kit: Kit) -> None:
    question = "What hangs in the hall?"
    kit.fill({"hall.md": "In the hall hangs a clock."})
    eventually(lambda: kit.ask(question).passages, what="an embedder")
    eventually(lambda: "hall.md" in kit.ask(question).passages[0].passage_id, what="the change")
    first = kit.ask(question, cache="exact")
    assert first.cache_use is None
    eventually(lambda: kit.ask(question, cache="exact").cache_use, what="the same answer")
    again = kit.ask(question, cache="exact")
    assert (again.output, again.passages) == (first.output, first.passages)
    for number in range(2):
        kit.fill({"hall.md": f"In the hall hangs a clock, and under it a map, no. {number}."})
        eventually(lambda: kit.ask(question, cache="exact").cache_use is None, what="another answer")
    kit.store.remove(kit.pipeline.tenant("a"), NAME, ["hall.md"])


def test_what_means_the_same_is_answered_alike(kit: Kit) -> None:
    eventually(lambda: kit.ask().passages, what="an embedder")
    question = "How do I lock the gate at night?"
    first = kit.ask(question, cache="semantic")
    assert first.cache_use is None
    eventually(lambda: kit.ask(question, cache="semantic").cache_use, what="the same answer")
    alike, *others = [
        kit.ask(question, cache="semantic")
        for question in (
            "How can I lock the gate at night?",
            "How do I not lock the gate at night?",
            "How do I lock the gate at 9?",
            "Which fish is served?",
        )
    ]
    assert alike.cache_use is not None
    assert (alike.cache_use.mode, alike.cache_use.request_id) == ("semantic", first.request_id)
    assert 0.95 <= alike.cache_use.similarity < 1
    assert alike.output == first.output
    assert [reply.cache_use for reply in others] == [None] * 3
    kit.store.create(kit.pipeline.tenant("b"), NAME, kit.embedder.name, kit.embedder.dimensions)
    theirs = kit.ask("How can I lock the gate at night?", tenant="b", cache="semantic")
    assert (theirs.outcome, theirs.cache_use) == (Outcome.OK, None)
    kit.store.delete(kit.pipeline.tenant("b"), NAME)


def test_a_conversation_goes_on_from_what_was_said_and_is_nobody_elses(kit: Kit) -> None:
    first = kit.say("My dog is called Bruno.", "c-1")
    assert (first.history_use, first.turn is not None) == (HistoryUse(took_ms=first_ms(first)), True)
    second = kit.say("What is my dog called?", "c-1", first.request_id)
    assert second.history_use is not None
    assert (second.history_use.messages, second.history_use.reason, second.degradations) == (2, None, ())
    alone = kit.say("What is my dog called?", "c-2")
    assert second.usage.prompt_tokens > alone.usage.prompt_tokens + 5
    third = kit.say("And how old is it?", "c-1", second.request_id)
    assert third.history_use is not None
    assert (third.history_use.messages, third.history_use.reason) == (4, None)

    # Another tenant has another conversation of that name, whatever it knows of this one.
    theirs = kit.say("What is my dog called?", "c-1", second.request_id, tenant="b")
    assert theirs.history_use is not None
    assert (theirs.history_use.messages, theirs.history_use.reason) == (0, HistoryReason.BEHIND)
    assert theirs.usage.prompt_tokens == alone.usage.prompt_tokens


def test_without_postgres_a_conversation_goes_on_from_nothing_and_says_so(kit: Kit) -> None:
    first = kit.say("My cat is called Minka.", "c-3")
    kit.say("How old is it?", "c-3", first.request_id)
    kit.proxy.cut()
    away = kit.say("What is my cat called?", "c-3", first.request_id)
    assert (away.outcome, away.degradations) == (Outcome.OK, (Degradation.NO_HISTORY,))
    assert away.history_use is not None
    assert (away.history_use.messages, away.history_use.reason in {HistoryReason.UNAVAILABLE, HistoryReason.LATE}) == (
        0,
        True,
    )
    kit.proxy.restore()
    eventually(lambda: not kit.say("What is my cat called?", "c-3", first.request_id).degradations, what="the turns")


def first_ms(reply: InferenceReply) -> int:
    """How long it took to find that nothing was said yet."""
    return 0 if reply.history_use is None else reply.history_use.took_ms
