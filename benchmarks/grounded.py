"""grounded: questions about invented facts in one tenant's documents, through the pipeline with the shipped model.

acme asks with its handbook and without it. globex has a collection of the same name with other facts in each place
that is asked about, so that a leak would show. initech names the collection and has none. An answer is right when its
first sentence has the expected fact; of what must not be known, anything in the answer counts. Every answer is printed
to the standard error.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import Cluster, cluster
from benchmarks.observed import REQUEST_TIMEOUT_MS
from benchmarks.result import Figure, Result
from deploy.demo.documents import FOLDER, HANDBOOK, HandbookQuestion, ingest, load_questions, replaced, submit
from deploy.demo.workload import LANGUAGE_MODEL, text_of
from deploy.local.services import MODELS_FILE, Service
from fairlane import Client
from fairlane.models import load_models
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply

NAME = "grounded"
HOW = "every question once of each tenant; greedy answers are the same each time"
AIM_GROUNDED, AIM_UNGROUNDED = 0.7, 0.1
OWNER, NEIGHBOUR, STRANGER = "acme", "globex", "initech"
_ANSWER_TIMEOUT_S = 300.0
# What counts is what is answered from documents, not how soon they are found beside a model on the same cores.
_ENVIRONMENT = {"RETRIEVAL_BUDGET_MS": "2000"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a question was answered to each who asked it.

    Raises RuntimeError where a model should have answered and did not.
    """

    question: HandbookQuestion
    grounded: InferenceReply
    ungrounded: InferenceReply
    neighbour: InferenceReply
    stranger: InferenceReply

    def __post_init__(self) -> None:
        # Who is not answered knows nothing, and that must not count as a secret kept.
        for reply in (self.grounded, self.ungrounded, self.neighbour):
            if reply.outcome != Outcome.OK:
                raise RuntimeError(f"a question was answered {reply.outcome} {reply.code}: {reply.message}")

    @property
    def is_refused_to_the_stranger(self) -> bool:
        reply = self.stranger
        return (reply.outcome, reply.code, reply.field) == (Outcome.REJECTED, Code.INVALID, "retrieval.collection")

    def as_run(self, number: int) -> dict[str, float]:
        return {
            "question": float(number),
            "document_found": self._found(self.grounded),
            "right": float(self.question.is_answered_by(self.grounded)),
            "known_without": float(self.question.is_known_to(self.ungrounded)),
            "known_to_another": float(self.question.is_known_to(self.neighbour)),
            "document_of_another_found": self._found(self.neighbour),
            "right_from_documents_of_another": float(self.question.is_answered_elsewhere_by(self.neighbour)),
            "refused_without_collection": float(self.is_refused_to_the_stranger),
        }

    def _found(self, reply: InferenceReply) -> float:
        return float(any(self.question.source in passage.passage_id for passage in reply.passages))


def run(questions: Sequence[HandbookQuestion] | None = None) -> Result:
    """Each of the questions, all of the demo's by default, four times."""
    model = next(one for one in load_models(MODELS_FILE) if one.model == LANGUAGE_MODEL)
    services = (
        Service("dispatcher-1", ("-m", "stream_processors.dispatcher"), _ENVIRONMENT),
        Service("consumer-1", ("-m", "inference_consumers", "--pool", model.pool)),
    )
    with cluster(services, parts=("kafka", "postgres", "redis"), tenants=(OWNER, NEIGHBOUR, STRANGER)) as running:
        _load(running, load_questions())
        asked = _ask(running, load_questions() if questions is None else questions)
    for one in asked:
        _show(one)
    return result_of([one.as_run(number) for number, one in enumerate(asked, 1)])


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


def _load(running: Cluster, questions: Sequence[HandbookQuestion]) -> None:
    elsewhere = running.folder / "elsewhere"
    write_elsewhere(questions, elsewhere)
    for tenant, folder in ((OWNER, FOLDER), (NEIGHBOUR, elsewhere)):
        report = ingest(running.stack.endpoints.postgres_dsn, tenant, folder)
        if report.failures or not report.passages:
            raise RuntimeError(f"{tenant}'s documents were not loaded: {report}")


def _ask(running: Cluster, questions: Sequence[HandbookQuestion]) -> list[Asked]:
    with ExitStack() as clients:
        owner, neighbour, stranger = (
            clients.enter_context(Client(tenant, settings=running.settings)) for tenant in (OWNER, NEIGHBOUR, STRANGER)
        )
        askers = ((owner, HANDBOOK), (owner, None), (neighbour, HANDBOOK), (stranger, HANDBOOK))
        handles = [
            (one, [submit(client, one, retrieval, REQUEST_TIMEOUT_MS) for client, retrieval in askers])
            for one in questions
        ]
        return [Asked(one, *(handle.reply(_ANSWER_TIMEOUT_S) for handle in asked)) for one, asked in handles]


def _show(asked: Asked) -> None:
    question = asked.question
    verdict = "right" if question.is_answered_by(asked.grounded) else "wrong"
    lines = (
        f"{verdict}: {question.question} ({question.expect})",
        f"    with it:    {_told(asked.grounded)}",
        f"    without:    {_told(asked.ungrounded)}",
        f"    {NEIGHBOUR}:     {_told(asked.neighbour)} ({question.elsewhere})",
        f"    {STRANGER}:    {_told(asked.stranger)}",
    )
    print("\n".join(lines), file=sys.stderr)


def _told(reply: InferenceReply) -> str:
    return text_of(reply) if reply.outcome == Outcome.OK else f"{reply.outcome} {reply.code}: {reply.message}"
