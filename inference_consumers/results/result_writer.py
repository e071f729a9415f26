"""Result writer: from an item's outcome to its settlement, with counts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import Counter

from fairlane import metrics, names
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane.ownership import Claim
from fairlane.records import InferenceReply, WorkItem
from fairlane_server.kafka.transactions import Settlement
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import Failure
from inference_consumers.results.records import AnswerWriter, outcome_of
from inference_consumers.results.retries import requeued_item
from inference_consumers.results.settled import EngineRun, SettledOutcome, Withheld

log = get_logger(__name__)

Keep = Callable[[WorkItem, InferenceReply], None]
"""Told every answer that is about to be committed. Does not wait and does not raise."""


# Looking a labelled counter up takes 3 us, three times for each item.
_COUNTERS_KEPT = 4_096


@lru_cache(_COUNTERS_KEPT)
def _tokens(tenant: str, model: str, kind: str) -> Counter:
    return metrics.TOKENS.labels(tenant=tenant, model=model, kind=kind)


@lru_cache(_COUNTERS_KEPT)
def _replies(tenant: str, outcome: str, code: str) -> Counter:
    return metrics.REPLIES.labels(tenant=tenant, outcome=outcome, code=code)


@lru_cache(_COUNTERS_KEPT)
def _verdicts(tenant: str, stage: str, check: str, verdict: str) -> Counter:
    return metrics.GUARDRAIL_VERDICTS.labels(tenant=tenant, stage=stage, check=check, verdict=verdict)


@dataclass(slots=True)
class ResultWriter:
    """Makes settlements of outcomes. Any thread: what it keeps are counters."""

    answers: AnswerWriter
    keep: Keep | None = None

    def unreadable(
        self,
        claim: Claim,
        key: bytes | None,
        value: bytes | None,
        appended_at_ms: int | None,
        *,
        problem: str,
        why: str,
    ) -> Settlement:
        """A record that is no work item, or a batch of them that cannot be read."""
        metrics.DEAD_LETTERS.labels(topic=names.DEAD_LETTER_WORK, problem=problem).inc()
        return self.answers.unreadable(claim, key, value, appended_at_ms, why)

    def unpublishable(self, settlement: Settlement, reason: str) -> Settlement:
        """Replacement of a settlement whose reply Kafka refuses."""
        kept = self.answers.unpublishable(settlement, reason)
        if kept.outputs[0].topic == names.DEAD_LETTER_WORK:
            metrics.DEAD_LETTERS.labels(topic=names.DEAD_LETTER_WORK, problem="unpublishable").inc()
        return kept

    def expired(self, work: ReceivedWork, now_ms: int) -> Settlement:
        """Work whose deadline passed before it ran."""
        metrics.REPLIES.labels(tenant=work.item.tenant, outcome="expired", code="").inc()
        return self.answers.expired(work, now_ms)

    def settle(self, work: ReceivedWork, outcome: SettledOutcome, run: EngineRun) -> Settlement:
        """The answer to an item, or its way back to the dispatchers."""
        try:
            return self._settle(work, outcome, run)
        except Exception as error:  # noqa: BLE001 - an answer that cannot be written must not take its batch along
            log.error("answer_unwritable", request_id=work.request_id, error=type(error).__name__)
            unwritable = Failure(Code.POISON, f"the answer cannot be written: {type(error).__name__}")
            return self._settle(work, unwritable, run)

    def _settle(self, work: ReceivedWork, outcome: SettledOutcome, run: EngineRun) -> Settlement:
        tenant, model = work.item.tenant, work.item.request.model
        if isinstance(outcome, Failure):
            # With the texts as they came: it is checked once more.
            returned = requeued_item(work.given or work.item, outcome.code)
            if returned is not None:
                settlement = self.answers.handed_back(work, returned, outcome, run)
                metrics.HANDED_BACK.labels(tenant=tenant, model=model).inc()
                log.warning("handed_back", request_id=work.request_id, tenant=tenant, reason=outcome.message)
                return settlement
        answered = self.answers.answered(work, outcome, run)
        if answered.turn_left_out:
            log.warning("turn_left_out", request_id=work.request_id, tenant=tenant)
        code = ""
        if isinstance(outcome, Failure):
            code = outcome.code
            if code == Code.POISON:
                if not work.is_copy:
                    metrics.DEAD_LETTERS.labels(topic=names.DEAD_LETTER_WORK, problem="poison").inc()
                log.error("poison", request_id=work.request_id, tenant=tenant, model=model, reason=outcome.message)
        else:
            code = outcome.code if isinstance(outcome, Withheld) else ""
            _tokens(tenant, model, "prompt").inc(outcome.usage.prompt_tokens)
            _tokens(tenant, model, "completion").inc(outcome.usage.completion_tokens)
        _replies(tenant, outcome_of(outcome), code).inc()
        for one in work.verdicts:
            _verdicts(tenant, one.stage, one.check, one.verdict).inc()
        metrics.count_cost(tenant, model, answered.reply.cost)
        if self.keep is not None:
            # Under the key of the request as it was asked.
            self.keep(work.given or work.item, answered.reply)
        return answered.settlement
