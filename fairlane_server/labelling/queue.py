"""The labelling queue of one tenant in Postgres: leases, labels, gold items, statistics, and what was settled.

>>> with LabelQueue(dsn, tenant="acme") as queue:
...     task = queue.lease("anna")
...     queue.submit("anna", task.request_id, "bad", correction="Canberra")
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from fairlane.closing import Closing
from fairlane.names import is_name
from fairlane.outcomes import EvaluationConsent
from fairlane.record_bounds import MAX_CORRECTION_CHARS
from fairlane_server.labelling.decisions import (
    LEASE_MS,
    MOST_LABEL_CHARS,
    MOST_REVIEWER_CHARS,
    GivenLabel,
    ItemOutcome,
    ItemState,
    LabelItem,
    ReviewedLabel,
    ReviewerStatistics,
    choose,
    outcome_of,
    refusal,
    statistics,
)
from fairlane_server.labelling.exports import AgreedItem
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from fairlane_server.store_error import StoreError
from fairlane_server.text import clean_text, without_nul

APPLICATION_NAME = "fairlane-labels"
CALL_TIMEOUT_S = 30.0
MOST_REVIEWED = 250_000
"""Labels that statistics are made of, the latest."""

_NOW = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_CONSENT = "SELECT evaluation FROM tenants WHERE tenant = %s"
_LABELLED = "SELECT count(*) FROM labels WHERE tenant = %s AND reviewer = %s AND label IS NOT NULL"
_ITEM = """
SELECT item.request_id, item.state, item.gold_label IS NOT NULL, ARRAY(
    SELECT reviewer FROM labels WHERE labels.tenant = item.tenant AND labels.request_id = item.request_id
), item.lease_holder, coalesce(item.lease_until_ms, 0)
FROM label_items AS item WHERE item.tenant = %(tenant)s
"""
_TAKEABLE = f"""{_ITEM}
    AND (item.lease_holder IS NULL OR item.lease_until_ms <= %(now_ms)s OR item.lease_holder = %(reviewer)s)
    AND NOT EXISTS (
        SELECT FROM labels WHERE labels.tenant = item.tenant AND labels.request_id = item.request_id
            AND labels.reviewer = %(reviewer)s
    )
"""
# Waits for a row that another reviewer has locked for a moment: it may have looked free to them.
_OWN = f"""{_TAKEABLE}
    AND item.lease_holder = %(reviewer)s AND item.lease_until_ms > %(now_ms)s
ORDER BY item.lease_until_ms LIMIT 1 FOR UPDATE OF item
"""
# One row each, so that reviewers who ask at once do not find everything locked. What lacks one label comes first.
_NEXT = f"""{_TAKEABLE}
    AND item.state = 'open' AND item.gold_label IS NULL
ORDER BY (
    SELECT count(label) FROM labels WHERE labels.tenant = item.tenant AND labels.request_id = item.request_id
) DESC, item.queued_at_ms, item.request_id
LIMIT 1 FOR UPDATE OF item SKIP LOCKED
"""  # noqa: S608 - our own names
_NEXT_GOLD = f"""{_TAKEABLE}
    AND item.gold_label IS NOT NULL
ORDER BY md5(item.request_id || %(reviewer)s) LIMIT 1 FOR UPDATE OF item SKIP LOCKED
"""
_LOCK = f"{_ITEM} AND item.request_id = %(request_id)s FOR UPDATE OF item"
_TAKE = """
UPDATE label_items SET lease_holder = %s, lease_until_ms = %s WHERE tenant = %s AND request_id = %s
RETURNING request_id, task, model, model_version, arm, input, output, correction, lease_until_ms
"""
_LABEL = """
INSERT INTO labels (tenant, request_id, reviewer, label, correction, given_at_ms) VALUES (%s, %s, %s, %s, %s, %s)
"""
_LABELS = "SELECT reviewer, label, correction, given_at_ms FROM labels WHERE tenant = %s AND request_id = %s"
_SETTLE = """
UPDATE label_items SET state = %s, label = %s, closed_at_ms = %s, lease_holder = NULL, lease_until_ms = NULL
WHERE tenant = %s AND request_id = %s
"""
_RELEASE = "UPDATE label_items SET lease_holder = NULL, lease_until_ms = NULL WHERE tenant = %s AND request_id = %s"
_GOLD = "UPDATE label_items SET gold_label = %s WHERE tenant = %s AND request_id = %s"
_REVIEWED = """
SELECT labels.reviewer, labels.label, item.label, item.gold_label
FROM labels JOIN label_items AS item ON item.tenant = labels.tenant AND item.request_id = labels.request_id
WHERE labels.tenant = %s ORDER BY labels.given_at_ms DESC LIMIT %s
"""
_COUNTS = "SELECT state, count(*) FROM label_items WHERE tenant = %s GROUP BY state ORDER BY state"
_AGREED = """
SELECT item.request_id, item.origin, item.model, item.model_version, item.arm, item.task, item.input, item.output,
    item.guardrails, item.correction, item.label, item.answered_at_ms, item.closed_at_ms, ARRAY(
        SELECT jsonb_build_array(reviewer, label, correction, given_at_ms) FROM labels
        WHERE labels.tenant = item.tenant AND labels.request_id = item.request_id
        ORDER BY given_at_ms, reviewer
    )
FROM label_items AS item
WHERE item.tenant = %(tenant)s AND item.state = 'agreed' AND (%(model)s::text IS NULL OR item.model = %(model)s)
    AND (item.closed_at_ms, item.request_id) > (%(after_ms)s, %(after_id)s)
ORDER BY item.closed_at_ms, item.request_id
"""
_PAGE = 500


class LabelError(StoreError):
    """What was asked for cannot be done, and the message says why. Nothing was changed."""


class UnknownLabelItemError(LabelError):
    """The queue of this tenant has no such item."""


@dataclass(frozen=True, slots=True)
class LabelTask:
    """An item to be judged. It does not say whether its answer is known, or what others said.

    Attributes:
        input: the fields of the request's input, with the messages before it in its conversation, and passages.
        output: as in ``results``.
        correction: what the output should have been, by the feedback.
    """

    request_id: str
    task: str
    model: str
    model_version: str
    arm: str | None
    input: dict[str, Any]
    output: dict[str, Any]
    correction: str | None
    lease_until_ms: int


class LabelQueue(Closing):
    """Every call raises StoreError: Postgres cannot be used; it is then unknown whether it was done. LabelError: the
    tenant does not allow evaluation, an argument is invalid, or as each call says."""

    def __init__(self, dsn: str, tenant: str) -> None:
        """Raises ValueError for what cannot be a tenant's name."""
        if not is_name(tenant):
            raise ValueError(f"no tenant can have the name {tenant!r}")
        self._tenant = tenant
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def lease(self, reviewer: str) -> LabelTask | None:
        """The next item for this reviewer, for ``LEASE_MS``; None if there is none now. What was leased and not judged
        comes again, to the same reviewer at once, to another after the lease."""
        checked_reviewer(reviewer)
        with self._transaction() as connection:
            now_ms = _one(connection, _NOW)
            asked = {"tenant": self._tenant, "reviewer": reviewer, "now_ms": now_ms}
            rows = [row for query in (_OWN, _NEXT, _NEXT_GOLD) for row in connection.execute(query.encode(), asked)]
            labelled = _one(connection, _LABELLED, self._tenant, reviewer)
            chosen = choose([_item(row) for row in rows], reviewer, labelled, now_ms)
            if chosen is None:
                return None
            taken = connection.execute(_TAKE, (reviewer, now_ms + LEASE_MS, self._tenant, chosen.request_id)).fetchone()
        return None if taken is None else LabelTask(*taken)

    def submit(self, reviewer: str, request_id: str, label: str, correction: str | None = None) -> ItemOutcome:
        """Judge an item that is leased to the reviewer. Returns what became of it. The same label again changes
        nothing. Raises LabelError for an item without such a lease."""
        if not 1 <= len(label) <= MOST_LABEL_CHARS:
            raise LabelError(f"label: must have from 1 to {MOST_LABEL_CHARS} characters")
        if correction is not None and not 1 <= len(correction) <= MAX_CORRECTION_CHARS:
            raise LabelError(f"correction: must have from 1 to {MAX_CORRECTION_CHARS} characters")
        return self._judge(reviewer, request_id, _storable(label), correction and _storable(correction))

    def skip(self, reviewer: str, request_id: str) -> ItemOutcome:
        """Leave an item that is leased to the reviewer to others. As ``submit``."""
        return self._judge(reviewer, request_id, None, None)

    def set_gold(self, request_id: str, label: str | None) -> None:
        """Make the answer of an item known, or unknown again with None. Raises LabelError for an unknown item."""
        if label is not None and not 1 <= len(label) <= MOST_LABEL_CHARS:
            raise LabelError(f"label: must have from 1 to {MOST_LABEL_CHARS} characters")
        stored = None if label is None else _storable(label)
        with self._transaction() as connection:
            if connection.execute(_GOLD, (stored, self._tenant, request_id)).rowcount != 1:
                raise _unknown_item()

    def counts(self) -> dict[str, int]:
        """Items by state."""
        with self._transaction() as connection:
            return {str(state): int(count) for state, count in connection.execute(_COUNTS, (self._tenant,))}

    def reviewers(self) -> list[ReviewerStatistics]:
        """Statistics of every reviewer, of the latest ``MOST_REVIEWED`` labels."""
        with self._transaction() as connection:
            rows = connection.execute(_REVIEWED, (self._tenant, MOST_REVIEWED))
            return statistics(ReviewedLabel(*row) for row in rows)

    def agreed(
        self, model: str | None = None, after: tuple[int, str] = (0, ""), at_once: int = _PAGE
    ) -> Generator[AgreedItem]:
        """What two reviewers agreed on, the first first, of one snapshot; all models, or one; behind the item that was
        closed then and has this id. So many are in memory ``at_once``. Ends early with StoreError; whoever writes a
        file must not keep it then."""
        asked = {"tenant": self._tenant, "model": model, "after_ms": after[0], "after_id": after[1]}
        with self._transaction() as connection, connection.cursor(name="agreed") as rows:
            rows.itersize = at_once
            rows.execute(_AGREED, asked)
            for *fields, labels in rows:
                yield AgreedItem(*[*fields, tuple(GivenLabel(*one) for one in labels)])

    def _judge(self, reviewer: str, request_id: str, label: str | None, correction: str | None) -> ItemOutcome:
        checked_reviewer(reviewer)
        with self._transaction() as connection:
            now_ms = _one(connection, _NOW)
            row = connection.execute(_LOCK.encode(), {"tenant": self._tenant, "request_id": request_id}).fetchone()
            if row is None:
                raise _unknown_item()
            item, given = _item(row), self._labels(connection, request_id)
            if any((one.reviewer, one.label, one.correction) == (reviewer, label, correction) for one in given):
                return ItemOutcome(item.state) if item.is_gold else outcome_of(given)
            if (why := refusal(item, reviewer, now_ms)) is not None:
                raise LabelError(f"{request_id}: {why}")
            connection.execute(_LABEL, (self._tenant, request_id, reviewer, label, correction, now_ms))
            if item.is_gold:
                # Its answer is known: a label of it measures the reviewer.
                connection.execute(_RELEASE, (self._tenant, request_id))
                return ItemOutcome(item.state)
            outcome = outcome_of([*given, GivenLabel(reviewer, label, correction, now_ms)])
            closed_at_ms = None if outcome.state is ItemState.OPEN else now_ms
            connection.execute(_SETTLE, (outcome.state.value, outcome.label, closed_at_ms, self._tenant, request_id))
        return outcome

    def _labels(self, connection: psycopg.Connection, request_id: str) -> Sequence[GivenLabel]:
        return [GivenLabel(*row) for row in connection.execute(_LABELS, (self._tenant, request_id))]

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(self._tenant) as connection:
                row = connection.execute(_CONSENT, (self._tenant,)).fetchone()
                if row is None or row[0] != EvaluationConsent.ALLOWED:
                    raise LabelError(f"{self._tenant} does not allow evaluation (`evaluation` of the tenant)")
                yield connection
        except psycopg.Error as error:
            raise StoreError(reason(error)) from None


def checked_reviewer(reviewer: str) -> str:
    """The name, if a reviewer can have it. Raises LabelError."""
    if not (1 <= len(reviewer) <= MOST_REVIEWER_CHARS and reviewer.isprintable()):
        raise LabelError(f"reviewer: must have from 1 to {MOST_REVIEWER_CHARS} characters that print")
    return reviewer


def _storable(text: str) -> str:
    return without_nul(clean_text(text))


def _unknown_item() -> UnknownLabelItemError:
    return UnknownLabelItemError("the queue of this tenant has no item of this request")


def _item(row: tuple[Any, ...]) -> LabelItem:
    request_id, state, is_gold, judged_by, lease_holder, lease_until_ms = row
    return LabelItem(request_id, ItemState(state), is_gold, frozenset(judged_by), lease_holder, lease_until_ms)


def _one(connection: psycopg.Connection, query: str, *parameters: object) -> int:
    row = connection.execute(query.encode(), parameters).fetchone()
    assert row is not None  # noqa: S101 - an aggregate, or an expression
    return int(row[0])
