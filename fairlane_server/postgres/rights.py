"""What each service may do in Postgres. `fairlane db upgrade` makes the database agree with it (``grants.py``)."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from fairlane_server.postgres.request_history import REPLY_COLUMNS

ROLE_PREFIX = "fairlane"
PASSAGES = "passages"
"""Has a partition for each collection, with the same rights."""


class PostgresRole(StrEnum):
    """The roles, by the service or command that connects as them. The owner of the tables is none of them."""

    DISPATCHER = "dispatcher"
    RECORDER = "recorder"
    GATEWAY = "gateway"
    BACKFILL = "backfill"
    INGEST = "ingest"
    OPERATOR = "operator"
    ADMIN = "admin"

    def name_in(self, prefix: str = ROLE_PREFIX) -> str:
        """The role's name in Postgres."""
        return f"{prefix}_{self.value}"


Privileges = frozenset[tuple[str, str]]
"""What may be done, each with the one column that it may be done to, or "" for the whole object."""


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of one role, all on objects of the schema public.

    Attributes:
        tables: by table, as GRANT takes them.
        functions: what may be called, with the types of the arguments.
        sequences: what numbers may be taken from.
        all_tenants: tables of which the role may see and change the rows of all tenants at once, in a transaction that
            acts for ``ALL_TENANTS``. Of the others it sees those of the one tenant that the transaction acts for.
    """

    tables: Mapping[str, str]
    functions: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    all_tenants: frozenset[str] = frozenset()

    def by_object(self, partitions: Collection[str] = ()) -> dict[str, Privileges]:
        """Every right, by object as it stands in a GRANT. ``partitions``: those of ``passages``."""
        tables = dict(self.tables)
        if PASSAGES in tables:
            tables |= dict.fromkeys(partitions, tables[PASSAGES])
        return {
            **{f"TABLE {name}": privileges(given) for name, given in tables.items()},
            **{f"FUNCTION {function.replace(' ', '')}": privileges("EXECUTE") for function in self.functions},
            **{f"SEQUENCE {name}": privileges("USAGE") for name in self.sequences},
        }


def privileges(given: str) -> Privileges:
    """The single privileges of what GRANT takes, such as ``SELECT, UPDATE (name, size_bytes)``."""
    return frozenset(
        (verb, column.strip())
        for verb, columns in re.findall(r"([A-Z]+)(?:\s*\(([^)]*)\))?", given)
        for column in columns.split(",")
    )


def statements(role: str, held: Mapping[str, Privileges], wanted: Mapping[str, Privileges]) -> list[str]:
    """The statements that turn what a role holds into what it is to hold; ``role`` is quoted where it must be."""
    changes = []
    for name in sorted(held.keys() | wanted.keys()):
        if held.get(name) == wanted.get(name):
            continue
        if name in held:
            changes.append(f"REVOKE ALL ON {name} FROM {role} CASCADE")
        if name in wanted:
            parts = (f'{verb} ("{column}")' if column else verb for verb, column in sorted(wanted[name]))
            changes.append(f"GRANT {', '.join(parts)} ON {name} TO {role}")
    return changes


_TURN = "tenant, conversation_id, request_id, source_offset, submitted_at_ms, replied_at_ms, messages, answer, tokens"
_KEY = (
    "key_id, tenant, name, role, scopes, grants, subject, rotated_from, "
    "created_at, expires_at, revoked_at, last_used_at"
)
_COPY = (
    "run, tenant, request_id, arm, kind, ended, outcome, code, model, model_version, task, prompt_tokens, "
    "completion_tokens, engine_ms, cost_nanos, currency, copied_at_ms, finished_at_ms, replies_seen"
)
_PAIRS = "evaluation_pairs(text, text, text, text, integer)"
_REPLAY_LABELS = "log_replay_labels(text, integer)"
_REPLAY = (
    "replay, name, model, candidate, against, tenants, from_ms, until_ms, sample, most_requests, most_outstanding, "
    "created_by, reason, created_at_ms"
)
_RUN = (
    "tenant, run_id, set_name, set_version, reference, model, scorer, is_scheduled, state, started_at_ms, "
    "finished_at_ms, result, baseline_run, fall"
)
_EVENT = "tenant, event, key_id, subject, author, details, outcome, of_event"
_STEERED = "wanted, max_cost_tokens, reason, status, ended_at_ms, cancelling_at_ms, finalizing_at_ms, reserved_nanos"
# For the roles that fill collections.
_FILLED = {
    "collections": "SELECT, UPDATE (version, documents, passages, updated_at)",
    "documents": "SELECT, INSERT, DELETE",
    PASSAGES: "SELECT (collection_id, source), INSERT, DELETE",
}
_LABELLING = {
    "label_items": "SELECT, UPDATE (state, label, gold_label, closed_at_ms, lease_holder, lease_until_ms)",
    "labels": "SELECT, INSERT",
}
# What was measured is only added; a run is changed while it is under way, and goes when it is old.
_EVALUATING = {
    "evaluation_sets": "SELECT, INSERT, UPDATE (removed_at_ms)",
    "evaluation_examples": "SELECT, INSERT, DELETE",
    "evaluation_runs": "SELECT, INSERT, UPDATE (state, runner, lease_until_ms, finished_at_ms, result, fall, "
    "model_requests), DELETE",
    "evaluation_scores": "SELECT, INSERT",
    "evaluation_schedules": "SELECT, INSERT, UPDATE (set_name, scorer, parameters, judge, every_hours, "
    "every_requests, baseline_run, created_at_ms, created_by), DELETE",
    "judge_calibrations": "SELECT, INSERT",
}
_NUMBERS = ("collection_versions", "passage_numbers")
_ERASING = ("request_erasure(text, text, text[], text, bigint, bigint, bigint)", "erase_some(text, integer)")

RIGHTS: Mapping[PostgresRole, Rights] = {
    # Passages and turns of the request that waits, and where the reply to a repeated id stands in the log.
    PostgresRole.DISPATCHER: Rights(
        tables={
            "results": "SELECT (request_id, tenant, source_topic, source_partition, source_offset, reply_topic, "
            "reply_partition, reply_offset, outcome, code, message)",
            "conversation_turns": f"SELECT ({_TURN})",
            "collections": "SELECT",
            PASSAGES: "SELECT",
            # What a tenant with budgets has spent, and how much of the log is in that sum.
            "usage_daily": "SELECT (tenant, day, currency, cost_nanos)",
            "usage_daily_callers": "SELECT (tenant, day, requested_by, currency, cost_nanos)",
            "source_offsets": "SELECT (topic, partition, next_offset)",
            # What its jobs have reserved.
            "backfill_jobs": "SELECT (tenant, status, total_rows, ok_rows, failed_rows, expired_rows, cancelled_rows, "
            "answered_rows, reserved_nanos, reserved_currency, reserved_for)",
        },
        functions=("match_passages(bigint, text, integer)",),
    ),
    # Writes what happened, for all tenants. It reads keys and counters, to write each record once, and merges results.
    PostgresRole.RECORDER: Rights(
        tables={
            "results": "SELECT, INSERT, UPDATE",
            "usage": "SELECT (work_topic, work_partition, work_offset, log_topic, log_partition, log_offset, "
            "events_seen, tenant, request_id, occurred_at_ms), INSERT, UPDATE (events_seen)",
            "audit_logs": "SELECT (log_topic, log_partition, log_offset), INSERT",
            "conversation_turns": "SELECT (tenant, conversation_id, request_id), INSERT",
            # The model version is added; what an erasure of its conversation covers is deleted.
            "feedback": "SELECT, INSERT, UPDATE, DELETE",
            # Items are made of results, and go with the consent of their tenant, as results of copies do.
            "label_items": "SELECT (tenant, request_id, state, gold_label), INSERT, DELETE",
            "evaluation_results": "SELECT (run, tenant, request_id, arm, source_topic, source_partition, "
            "source_offset, log_topic, log_partition, log_offset, replies_seen), INSERT, UPDATE (replies_seen), DELETE",
            # Of the drift watch.
            "drift_looks": "SELECT, INSERT, UPDATE (looked_to_ms, looks)",
            "drift_streams": "SELECT, INSERT, UPDATE, DELETE",
            "drift_findings": "SELECT (tenant, finding_id, model, statistic, needs_consent, found_at_ms), INSERT, "
            "DELETE",
            "drift_samples": "SELECT (tenant, finding_id, request_id, found_at_ms), INSERT",
            # Examples that were made of requests go with the consent, too.
            "evaluation_examples": "SELECT (tenant, request_id), DELETE",
            # Scores and falls of scheduled runs, as metrics.
            "evaluation_runs": f"SELECT ({_RUN})",
            "evaluation_schedules": "SELECT (tenant, model, every_hours, created_at_ms)",
            "tenants": "SELECT, INSERT, UPDATE, DELETE",
            "model_versions": "SELECT, INSERT, UPDATE, DELETE",
            # Of a recorder of an older version.
            "models": "SELECT, INSERT, UPDATE, DELETE",
            "model_routes": "SELECT (model, aliases, rollout, log_topic, log_partition, log_offset), INSERT",
            "source_offsets": "SELECT, INSERT, UPDATE (next_offset, topic_id, updated_at)",
            # Requests that an erasure of their conversation covers get tombstones of their own.
            "erased": "SELECT, INSERT",
            # Compared with what a tenant spends now.
            "usage_hourly": "SELECT",
        },
        functions=("remove_old_rows(text, bigint, integer)",),
        all_tenants=frozenset(
            {
                *("results", "usage", "usage_hourly", "audit_logs", "conversation_turns", "tenants", "erased"),
                *("feedback", "label_items", "evaluation_results", "evaluation_examples"),
                *("evaluation_runs", "evaluation_schedules"),
                *("drift_streams", "drift_findings", "drift_samples"),
            }
        ),
    ),
    # Answers callers of every tenant, one at a time; it finds a key by its id, and lists none.
    PostgresRole.GATEWAY: Rights(
        tables={
            "results": "SELECT",
            "usage": "SELECT",
            "usage_daily": "SELECT",
            "usage_daily_callers": "SELECT",
            "audit_logs": "SELECT",
            "files": "SELECT, INSERT, UPDATE (purpose, filename, size_bytes, expires_at_ms), DELETE",
            "batches": "SELECT, INSERT",
            "backfill_jobs": f"SELECT, INSERT, UPDATE ({_STEERED})",
            # Tenants' documents on their way; passages are written by the service that ingests them.
            "collections": "SELECT",
            "documents": "SELECT (collection_id, tenant, source, title, passages, stored_at, document_id, size_bytes)",
            "document_uploads": "SELECT, INSERT, UPDATE (state, source, format, size_bytes, reason, lease_until)",
            "embedders": "SELECT",
            # What is erased leaves a row that the gateway cannot change.
            "conversation_turns": f"SELECT ({_TURN})",
            "erasures": "SELECT",
        },
        functions=(
            "find_api_key(text, bytea)",
            "find_user(text, text)",
            "create_collection(text, text, integer)",
            "delete_collection(text)",
            "remove_document(text, text)",
            "document_id_of(bigint, text)",
            *_ERASING,
            "unfinished_erasures(integer, integer)",
            "request_is_erased(text)",
        ),
    ),
    # The runner, its removal of expired files, and the commands of `python -m producers.backfill`.
    PostgresRole.BACKFILL: Rights(
        tables={
            "backfill_jobs": "SELECT, INSERT, "
            f"UPDATE ({_STEERED}, total_rows, estimated_row_cost, ok_rows, failed_rows, expired_rows, cancelled_rows, "
            "prompt_tokens, completion_tokens, cost_tokens, planned_rows, next_chunk, next_group, next_offset, "
            "started_at_ms, runner, token, lease_until, answered_rows, reserved_currency, reserved_for)",
            "backfill_chunks": "SELECT, INSERT, UPDATE (part, done_number)",
            "files": "SELECT, UPDATE (expires_at_ms), DELETE",
            "batches": "SELECT",
            # What the tenant of a job has spent of its budgets.
            "usage_daily": "SELECT (tenant, day, currency, cost_nanos)",
            "usage_daily_callers": "SELECT (tenant, day, requested_by, currency, cost_nanos)",
        },
        all_tenants=frozenset({"backfill_jobs", "backfill_chunks", "files", "batches"}),
    ),
    # Parses what tenants uploaded, and stores the passages, for one tenant at a time; the queue is that of all.
    PostgresRole.INGEST: Rights(
        tables={
            "document_uploads": "SELECT, UPDATE (state, source, reason, has_content, attempts, retries, token, "
            "lease_until, ended_at_ms), DELETE",
            "embedders": "SELECT, INSERT, UPDATE (name, dimensions, recorded_at)",
            **_FILLED,
        },
        functions=("index_collection(text, bigint)", "document_id_of(bigint, text)"),
        sequences=_NUMBERS,
        all_tenants=frozenset({"document_uploads"}),
    ),
    # `fairlane anomalies`, `budgets`, `collections`, `conversations`, `costs`, `drift`, `evaluation`, `explain`,
    # `rollout`, `models history` and `db status`. Of results all columns but the output.
    PostgresRole.OPERATOR: Rights(
        tables={
            "results": f"SELECT ({REPLY_COLUMNS}, arm, reply_topic, reply_partition, reply_offset, recorded_at)",
            "usage": "SELECT",
            "usage_daily": "SELECT",
            "usage_daily_callers": "SELECT",
            "usage_hourly": "SELECT",
            "audit_logs": "SELECT",
            "model_routes": "SELECT",
            # Ratings of all tenants, by model version; the corrections are those of items to be labelled.
            "feedback": "SELECT (tenant, request_id, thumb, rating, given_at_ms, model, model_version, arm, "
            "correction)",
            # How copies ended; outputs of tenants that allow evaluation come from a function, to be compared.
            "evaluation_results": f"SELECT ({_COPY})",
            # `fairlane replay`, which the process of the admin API carries out.
            "log_replays": f"SELECT, INSERT ({_REPLAY}), UPDATE (state, trouble, ended_at_ms)",
            # What was found, and how far the statistics are; no figure of a request.
            "drift_findings": "SELECT",
            "drift_samples": "SELECT",
            "drift_streams": "SELECT (tenant, model, task, version, statistics, seen_at_ms)",
            # `fairlane labels`, for one tenant at a time.
            "tenants": "SELECT (tenant, evaluation)",
            **_LABELLING,
            # `fairlane evaluation`, for one tenant at a time.
            **_EVALUATING,
            "conversation_turns": f"SELECT ({_TURN})",
            "erasures": "SELECT",
            # What `fairlane tenants apply` changes. It reads no event, and cannot say who it is in Postgres.
            "admin_events": f"SELECT (event_id), INSERT ({_EVENT})",
            **_FILLED,
            "alembic_version": "SELECT",
        },
        functions=(
            "create_collection(text, text, integer)",
            "delete_collection(text)",
            "index_collection(text, bigint)",
            "document_id_of(bigint, text)",
            *(_PAIRS, _REPLAY_LABELS),
            *_ERASING,
            "request_is_erased(text)",
        ),
        sequences=_NUMBERS,
        all_tenants=frozenset(
            {
                *("results", "usage", "usage_daily", "usage_daily_callers", "usage_hourly", "audit_logs"),
                *("admin_events", "feedback", "evaluation_results", "evaluation_runs"),
                *("drift_findings", "drift_samples", "drift_streams"),
            }
        ),
    ),
    # The admin API: keys without their hashes, users, barred tenants, and an audit to which it can only add. Of what is
    # left of a removed tenant it gets the names of tables. It judges rollouts by counts of results and ratings,
    # without what was asked and answered. It carries out replays of the log: it knows which requests were answered,
    # erased, or belong to a tenant that denies evaluation.
    PostgresRole.ADMIN: Rights(
        tables={
            "api_keys": f"SELECT ({_KEY}), INSERT, UPDATE (expires_at, revoked_at)",
            "users": "SELECT, INSERT, UPDATE (role, disabled, grants, updated_at)",
            "barred_tenants": "SELECT, INSERT, DELETE",
            "admin_events": f"SELECT, INSERT ({_EVENT})",
            "model_routes": "SELECT",
            "results": "SELECT (request_id, tenant, source_topic, model, model_version, arm, outcome, code, "
            "submitted_at_ms, admitted_at_ms, dispatched_at_ms, received_at_ms, engine_finished_at_ms, replied_at_ms, "
            "cost_nanos, currency, cache_use, replies_seen)",
            "audit_logs": "SELECT (request_id, tenant, source_topic, occurred_at_ms, inputs)",
            # The corrections are those of items to be labelled.
            "feedback": "SELECT (request_id, tenant, rating, given_at_ms, model, model_version, arm, correction)",
            "evaluation_results": f"SELECT ({_COPY})",
            "log_replays": f"SELECT, INSERT ({_REPLAY}), "
            "UPDATE (state, trouble, ranges, started_at_ms, ended_at_ms, progress, report), DELETE",
            "log_replay_requests": "SELECT, INSERT (replay, tenant, request_id, work_topic, work_partition, "
            "work_offset), DELETE",
            "usage": "SELECT (work_topic, work_partition, work_offset, tenant, request_id, outcome)",
            "tenants": "SELECT (tenant, evaluation)",
            "erased": "SELECT (tenant, kind, digest, before_ms)",
            # What was found, and how far the statistics are; no figure of a request.
            "drift_findings": "SELECT",
            "drift_samples": "SELECT",
            "drift_streams": "SELECT (tenant, model, task, version, statistics, seen_at_ms)",
            # Labels and evaluation sets, of one tenant at a time; runs are made by commands.
            **_LABELLING,
            **{table: _EVALUATING[table] for table in ("evaluation_sets", "evaluation_examples")},
            **dict.fromkeys(("evaluation_runs", "evaluation_scores", "judge_calibrations"), "SELECT"),
            "evaluation_schedules": _EVALUATING["evaluation_schedules"],
        },
        functions=(
            *("find_api_key(text, bytea)", "find_user(text, text)", "tenant_remains(text)"),
            *(_PAIRS, _REPLAY_LABELS, "request_is_erased(text)"),
        ),
        all_tenants=frozenset(
            {
                *("api_keys", "users", "barred_tenants", "admin_events"),
                *("results", "audit_logs", "feedback", "evaluation_results"),
                *("log_replay_requests", "usage", "tenants", "erased"),
                *("drift_findings", "drift_samples", "drift_streams"),
            }
        ),
    ),
}
