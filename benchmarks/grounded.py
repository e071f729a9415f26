"""grounded: questions about invented facts in one tenant's documents, through the pipeline with the shipped model.

acme asks with its handbook and without it. globex has a collection of the same name with other facts in each place
that is asked about, so that a leak would show. initech names the collection and has none. An answer is right when its
first sentence has the expected fact; of what must not be known, anything in the answer counts. Every answer is printed
to the standard error.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cluster import BenchStack, cluster, shipped_model
from benchmarks.load import REQUEST_TIMEOUT_MS
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import consumer, dispatcher
from deploy.demo.documents import FOLDER, HANDBOOK, HandbookQuestion, ingest, load_questions, replaced, submit
from deploy.demo.workload import LANGUAGE_MODEL, text_of
from fairlane import Client
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from fairlane_server.postgres.rights import PostgresRole

NAME = "grounded"
HOW = "every question once of each tenant; greedy answers are the same each time"
AIM_GROUNDED, AIM_UNGROUNDED = 0.7, 0.1
OWNER, NEIGHBOUR, STRANGER = "acme", "globex", "initech"
_ASKERS = {
    "grounded": (OWNER, HANDBOOK),
    "ungrounded": (OWNER, None),
    "neighbour": (NEIGHBOUR, HANDBOOK),
    "stranger": (STRANGER, HANDBOOK),
}
"""Tenant and collection by the name of the answer."""
_ANSWER_TIMEOUT_S = 300.0
# What counts is what is answered from documents, not how soon they are found beside a model on the same cores.
_ENVIRONMENT = {"RETRIEVAL_BUDGET_MS": "2000"}


def run_of(number: int, question: HandbookQuestion, replies: Mapping[str, InferenceReply]) -> dict[str, float]:
    """Figures of one question from its four replies: ``grounded``, ``ungrounded``, ``neighbour``, ``stranger``.

    Raises RuntimeError if a model did not answer: a missing answer must not count as a secret kept.
    """
    grounded, ungrounded, neighbour, stranger = (replies[name] for name in _ASKERS)
    for reply in (grounded, ungrounded, neighbour):
        if reply.outcome != Outcome.OK:
            raise RuntimeError(f"a question was answered {reply.outcome} {reply.code}: {reply.message}")

    def found(reply: InferenceReply) -> bool:
        return any(question.source in passage.passage_id for passage in reply.passages)

    refused = (stranger.outcome, stranger.code, stranger.field)
    return {
        "question": number,
        "document_found": found(grounded),
        "right": question.is_answered_by(grounded),
        "known_without": question.is_known_to(ungrounded),
        "known_to_another": question.is_known_to(neighbour),
        "document_of_another_found": found(neighbour),
        "right_from_documents_of_another": question.is_answered_elsewhere_by(neighbour),
        "refused_without_collection": refused == (Outcome.REJECTED, Code.INVALID, "retrieval.collection"),
    }


def run(questions: Sequence[HandbookQuestion] | None = None) -> Result:
    """Each of the questions, all of the demo's by default, four times."""
    model = shipped_model(LANGUAGE_MODEL)
    services = (dispatcher(env=_ENVIRONMENT), consumer(pool=model.pool))
    with cluster(services, parts=("kafka", "postgres", "redis"), tenants=(OWNER, NEIGHBOUR, STRANGER)) as running:
        _load(running, load_questions())
        asked = _ask(running, load_questions() if questions is None else questions)
    return result_of([run_of(number, *one) for number, one in enumerate(asked, 1)])


def result_of(runs: Sequence[dict[str, float]]) -> Result:
    """Parts of all questions; ``runs`` has one for each."""

    def part(name: str) -> float:
        return sum(one[name] for one in runs) / len(runs)

    return Result(
        NAME,
        (
            Figure("answered right with retrieval", part("right"), "ratio", "at least", AIM_GROUNDED),
            Figure("known without retrieval", part("known_without"), "ratio", "at most", AIM_UNGROUNDED),
            Figure(
                "known to another tenant with documents of its own", part("known_to_another"), "ratio", "at most", 0
            ),
            Figure("refused to a tenant without it", part("refused_without_collection"), "ratio", "at least", 1),
            Figure("questions whose document was found", part("document_found"), "ratio"),
            Figure("the same of the other tenant", part("document_of_another_found"), "ratio"),
            Figure("answered right to it from its own", part("right_from_documents_of_another"), "ratio"),
        ),
        tuple(runs),
    )


def write_elsewhere(questions: Iterable[HandbookQuestion], folder: Path) -> None:
    """The demo's documents with another answer to each of these questions."""
    folder.mkdir()
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        for one in questions:
            if one.source == file.name:
                text = replaced(text, one.expect, one.elsewhere)
        (folder / file.name).write_text(text, encoding="utf-8")


def _load(running: BenchStack, questions: Sequence[HandbookQuestion]) -> None:
    elsewhere = running.folder / "elsewhere"
    write_elsewhere(questions, elsewhere)
    for tenant, folder in ((OWNER, FOLDER), (NEIGHBOUR, elsewhere)):
        report = ingest(running.stack.endpoints.postgres_dsn(PostgresRole.OPERATOR), tenant, folder)
        if report.failures or not report.passages:
            raise RuntimeError(f"{tenant}'s documents were not loaded: {report}")


def _ask(
    running: BenchStack, questions: Sequence[HandbookQuestion]
) -> list[tuple[HandbookQuestion, dict[str, InferenceReply]]]:
    with ExitStack() as clients:
        client_of = {
            tenant: clients.enter_context(Client(tenant, settings=running.settings))
            for tenant in (OWNER, NEIGHBOUR, STRANGER)
        }
        handles = [
            {
                name: submit(client_of[tenant], one, retrieval, REQUEST_TIMEOUT_MS)
                for name, (tenant, retrieval) in _ASKERS.items()
            }
            for one in questions
        ]
        asked = []
        for question, of_question in zip(questions, handles, strict=True):
            replies = {name: handle.reply(_ANSWER_TIMEOUT_S) for name, handle in of_question.items()}
            asked.append((question, replies))
            _show(question, replies)
        return asked


def _show(question: HandbookQuestion, replies: Mapping[str, InferenceReply]) -> None:
    verdict = "right" if question.is_answered_by(replies["grounded"]) else "wrong"
    print(f"{verdict}: {question.question} ({question.expect}; elsewhere {question.elsewhere})", file=sys.stderr)
    for name, reply in replies.items():
        answer = text_of(reply) if reply.outcome == Outcome.OK else f"{reply.outcome} {reply.code}: {reply.message}"
        print(f"    {name}: {answer}", file=sys.stderr)
