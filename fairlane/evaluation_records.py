"""Evaluation on the wire: the mark of a copy of a request, and the shadow of a model."""

from fairlane.frozen import frozen_dataclass


@frozen_dataclass(frozen=True, slots=True)
class EvaluationMark:
    """Marks work and replies as evaluation: a copy of a request that runs beside it and answers nobody.

    ``kind`` is shadow or replay, ``run`` the id of the shadow or replay, ``arm`` what runs the copy: candidate or
    champion. ``tenant``, ``request_id`` and ``conversation_id`` are those of the original; the ``source`` of the work
    is its source too.
    """

    kind: str
    run: str
    arm: str
    tenant: str
    request_id: str
    conversation_id: str | None = None


@frozen_dataclass(frozen=True, slots=True)
class Shadow:
    """The latest shadow of a model: a candidate that runs copies of a sample of the model's requests.

    ``percent`` of what ``sticky_by`` keeps together is sampled; with ``arm`` of the requests of that arm alone. Bounds,
    of all dispatchers together: ``max_concurrent`` copies at a time, ``max_share`` of the rate of the candidate's pool
    (0 to 1), and ``max_tokens_per_s``, None for no such bound. A copy that waits longer than ``max_age_ms`` is dropped.
    Copies are made from ``from_ms`` until before ``until_ms``, and until the shadow is stopped: ``stopped_at_ms``.
    """

    run: str
    candidate: str
    percent: float
    max_concurrent: int
    max_share: float
    max_age_ms: int
    started_at_ms: int
    sticky_by: str = "conversation"
    arm: str | None = None
    max_tokens_per_s: float | None = None
    from_ms: int | None = None
    until_ms: int | None = None
    stopped_at_ms: int | None = None
