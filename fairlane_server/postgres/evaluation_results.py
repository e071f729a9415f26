"""Results of copies that ran for evaluation, each beside its original, from the tables that the recorder fills."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fairlane_server.evaluation.pairs import Answer, Pair

if TYPE_CHECKING:
    import psycopg

_PAGE = 500
_PAIRS = """
SELECT tenant, request_id, arm, task, ended, outcome, output, code, model_version, prompt_tokens, completion_tokens,
    engine_ms, original_outcome, original_output, original_code, original_model_version, original_prompt_tokens,
    original_completion_tokens, original_engine_ms
FROM evaluation_pairs(%s, %s, %s, %s, %s)
"""
_ENDS = "SELECT arm, ended, count(*) FROM evaluation_results WHERE run = %s GROUP BY 1, 2"
_SAMPLED = """
SELECT inputs ->> 'shadow', count(*) FROM audit_logs
WHERE inputs ->> 'shadow_run' = %s AND inputs ? 'shadow_run' GROUP BY 1
"""


class ArmPair(NamedTuple):
    """A pair, and the arm whose copy is in it."""

    arm: str
    pair: Pair


def read_pairs(
    connection: "psycopg.Connection", run: str, most: int, behind: tuple[str, str, str] = ("", "", "")
) -> Iterator[ArmPair]:
    """At most so many pairs of a run, those of one request together, in the order of tenants and request ids: as good
    as any, since ids are random. ``behind``: the tenant, request and arm of the last one before. Of tenants that allow
    evaluation now. Read in pages. Raises psycopg.Error."""
    left = most
    while left > 0:
        page = connection.execute(_PAIRS, (run, *behind, min(left, _PAGE))).fetchall()
        for tenant, request_id, arm, task, ended, *answers in page:
            original = None if answers[7] is None else Answer(*answers[7:])
            yield ArmPair(arm, Pair(tenant, request_id, task, original, Answer(*answers[:7]), ended))
            behind = (tenant, request_id, arm)
        if len(page) < min(left, _PAGE):
            return
        left -= len(page)


def read_ends(connection: "psycopg.Connection", run: str) -> dict[tuple[str, str], int]:
    """How many copies of a run have ended, by arm and how. Raises psycopg.Error."""
    return {(arm, ended): count for arm, ended, count in connection.execute(_ENDS, (run,))}


def read_sampled(connection: "psycopg.Connection", run: str) -> dict[str, int]:
    """How many requests a shadow sampled, by ``copied`` or the reason why none was made. Raises psycopg.Error."""
    return dict(connection.execute(_SAMPLED, (run,)).fetchall())
