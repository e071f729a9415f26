"""One run of an evaluation set: the requests that it makes, and the scores of their answers. Pure."""

import base64
import binascii
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlane.outcomes import Outcome, Task
from fairlane.records import InferenceReply, Output, RequestInput
from fairlane_server.evaluation.comparison import MeanScore, mean_score
from fairlane_server.evaluation.evaluation_set import EvaluationExample
from fairlane_server.evaluation.scorers import AnswerScore, ScorerName, score

TASK_OF: Mapping[ScorerName, Task] = {
    ScorerName.ACCURACY: Task.CLASSIFY,
    ScorerName.NDCG: Task.RANK,
    ScorerName.SIMILARITY: Task.EMBED,
}
"""The task of an example that names none; generate for other scorers."""


_INPUTS = frozenset(entry.name for entry in dataclasses.fields(RequestInput))


class ExampleError(ValueError):
    """An example of a set that makes no request. The message begins with its id and the field."""


@dataclass(slots=True)
class EvaluationRun:
    """Scores of one model, in the order of the examples.

    Attributes:
        model: the reference that requests named.
        scores: of each example; without a value where there is no answer, or nothing to compare it with.
        versions: how many answers each version gave.
        failed: how many examples have no answer, by code or outcome.
    """

    model: str
    scores: list[AnswerScore] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def answered(self, scorer: ScorerName, example: EvaluationExample, reply: InferenceReply, top: int | None) -> None:
        """Score the next example's reply."""
        if reply.outcome != Outcome.OK:
            self.failed[reply.code or reply.outcome] += 1
            self.scores.append(score_without_answer(reply))
            return
        self.versions[reply.model_version or ""] += 1
        self.scores.append(score(scorer, example.expected, answer_of(reply), top=top))

    @property
    def values(self) -> list[float | None]:
        return [one.value for one in self.scores]

    @property
    def mean(self) -> MeanScore:
        return mean_score(self.values)


def request_fields(example: EvaluationExample, scorer: ScorerName) -> dict[str, Any]:
    """The task and the input of an example, as fields of ``Client.submit``. An image is base64. Raises ExampleError."""
    fields = dict(example.input)
    image = fields.get("image")
    if image is not None:
        try:
            fields["image"] = base64.b64decode(image, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise ExampleError(f"{example.example_id}: input.image: must be base64") from None
    # What was found and said before is part of an exported input, and no field of a request.
    for name in ("passages", "history"):
        if fields.pop(name, None):
            raise ExampleError(f"{example.example_id}: input.{name}: its answer depended on it; leave the example out")
    if unknown := sorted(fields.keys() - _INPUTS):
        raise ExampleError(f"{example.example_id}: input.{unknown[0]}: no input has this field")
    return {"task": example.task or TASK_OF.get(scorer, Task.GENERATE), **fields}


def score_without_answer(reply: InferenceReply) -> AnswerScore:
    """The score of a reply that is no answer: 0 if the request failed, since a model that fails is no better than one
    that is wrong; none if it was refused, expired or was cancelled, which says nothing of the model."""
    value = 0.0 if reply.outcome == Outcome.FAILED else None
    return AnswerScore(value, f"no answer: {reply.code or reply.outcome}")


def answer_of(reply: InferenceReply) -> Any:
    """What is scored of a reply; None if it has no answer."""
    return None if reply.output is None else answer_in(reply.output)


def answer_in(output: Output) -> Any:
    """What is scored of an answer: the text, the first label, the scores of documents, or the first vector; None if it
    has none of them."""
    if output.labels:
        return output.labels[0].label
    if output.scores is not None:
        return list(output.scores)
    if output.embeddings:
        return list(output.embeddings[0])
    return output.text
