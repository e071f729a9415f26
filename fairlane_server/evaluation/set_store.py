"""Evaluation sets of one tenant in Postgres: immutable versions, each with the digest of its content.

>>> with EvaluationSets(dsn, tenant="acme") as sets:
...     stored = sets.add("digits", read_evaluation_set(lines), author="ops@desk")
...     examples = sets.examples(stored.name, stored.version)
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from fairlane.outcomes import EvaluationConsent
from fairlane_server.erasure.erasures import SHARE_ERASURE_LOCK
from fairlane_server.evaluation.evaluation_set import (
    MOST_EXAMPLES,
    EvaluationExample,
    EvaluationSet,
    example_of,
    line_of,
)
from fairlane_server.evaluation.tenant_store import TenantStore
from fairlane_server.store_error import StoreError

SET_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_SET_BYTES = 64 * 1024 * 1024
MOST_TENANT_BYTES = 1024 * 1024 * 1024
"""Of all sets of a tenant that are stored and not removed."""
MOST_VERSIONS = 1_000
"""Of one set, with those that were removed."""

_AT_ONCE = 1_000

_LOCK_SETS = "SELECT pg_advisory_xact_lock(hashtextextended('fairlane.evaluation_sets.' || %s, 0))"
_CONSENT = "SELECT evaluation FROM tenants WHERE tenant = %s"
_ERASED = "SELECT id FROM unnest(%s::text[]) AS given (id) WHERE request_is_erased(id) LIMIT 1"
_COLUMNS = """
name, version, digest, examples, size_bytes, created_at_ms, created_by, removed_at_ms, (
    SELECT count(*) FROM evaluation_examples AS example
    WHERE example.tenant = one.tenant AND example.name = one.name AND example.version = one.version
), (
    SELECT count(example.request_id) FROM evaluation_examples AS example
    WHERE example.tenant = one.tenant AND example.name = one.name AND example.version = one.version
)
"""
_SAME = f"""
SELECT {_COLUMNS} FROM evaluation_sets AS one
WHERE tenant = %s AND name = %s AND digest = %s AND removed_at_ms IS NULL
"""  # noqa: S608 - our own names
_TAKEN = """
SELECT coalesce(max(version) FILTER (WHERE name = %s), 0), count(*) FILTER (WHERE name = %s),
    coalesce(sum(size_bytes) FILTER (WHERE removed_at_ms IS NULL), 0)
FROM evaluation_sets WHERE tenant = %s
"""
_ADD = """
INSERT INTO evaluation_sets (tenant, name, version, digest, examples, size_bytes, created_at_ms, created_by)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
"""
# COPY does not know row-level security.
_ADD_EXAMPLES = """
INSERT INTO evaluation_examples (tenant, name, version, place, request_id, content)
SELECT %s, %s, %s, * FROM unnest(%s::bigint[], %s::text[], %s::text[])
"""
_LIST = f"""
SELECT {_COLUMNS} FROM evaluation_sets AS one
WHERE tenant = %(tenant)s AND (%(name)s::text IS NULL OR name = %(name)s) AND removed_at_ms IS NULL
    AND (name, version) > (%(after_name)s, %(after_version)s)
ORDER BY name, version LIMIT %(most)s
"""  # noqa: S608 - our own names
_FIND = f"""
SELECT {_COLUMNS} FROM evaluation_sets AS one
WHERE tenant = %s AND name = %s AND (%s::bigint IS NULL OR version = %s) AND removed_at_ms IS NULL
ORDER BY version DESC LIMIT 1
"""  # noqa: S608 - our own names
_EXAMPLES = """
SELECT place, content FROM evaluation_examples
WHERE tenant = %s AND name = %s AND version = %s AND place > %s ORDER BY place LIMIT %s
"""
_REMOVE = "UPDATE evaluation_sets SET removed_at_ms = %s WHERE tenant = %s AND name = %s AND version = %s"
_REMOVE_EXAMPLES = "DELETE FROM evaluation_examples WHERE tenant = %s AND name = %s AND version = %s"


class EvaluationStoreError(StoreError):
    """What was asked for cannot be done, and the message says why. Nothing was changed. ``field`` is at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownEvaluationError(EvaluationStoreError):
    """There is no such set, run, schedule or calibration."""


@dataclass(frozen=True, slots=True)
class StoredSet:
    """A version of a set.

    Attributes:
        version: from 1; the number of a removed one is not used again.
        examples: what it was made with; ``present``: what erasures have left.
        labelled: how many of the present ones were made of requests, and go with them.
    """

    name: str
    version: int
    digest: str
    examples: int
    size_bytes: int
    created_at_ms: int
    created_by: str
    removed_at_ms: int | None
    present: int
    labelled: int


class EvaluationSets(TenantStore):
    """Every call raises StoreError: Postgres cannot be used, and it is unknown whether it was done;
    EvaluationStoreError: as each call says."""

    def add(self, name: str, examples: EvaluationSet, author: str) -> tuple[StoredSet, bool]:
        """Store a set as the next version, and return it; whether it is new. One with the same content is returned as
        it is. Raises EvaluationStoreError for a set that is too large, that was made of requests of another tenant, of
        one that does not allow evaluation, or of an erased request."""
        if not SET_NAME_PATTERN.fullmatch(name):
            raise EvaluationStoreError(
                "name: must be letters, digits, dots, hyphens and underscores, at most 64", "name"
            )
        lines = [line_of(one) for one in examples.examples]
        size_bytes = sum(map(len, lines))
        if size_bytes > MOST_SET_BYTES:
            raise EvaluationStoreError(f"the set has {size_bytes} bytes; at most {MOST_SET_BYTES} are stored", "body")
        with self._transaction() as connection:
            connection.execute(_LOCK_SETS, (self._tenant,))
            self._check_origins(connection, examples.examples)
            same = connection.execute(_SAME.encode(), (self._tenant, name, examples.digest)).fetchone()
            if same is not None:
                return StoredSet(*same), False
            version = self._next_version(connection, name, size_bytes)
            made = (self._tenant, name, version, examples.digest, len(lines), size_bytes, self._wall_clock(), author)
            connection.execute(_ADD, made)
            for start in range(0, len(lines), _AT_ONCE):
                part = range(start, min(start + _AT_ONCE, len(lines)))
                request_ids = [examples.examples[place].request_id for place in part]
                texts = [lines[place] for place in part]
                connection.execute(_ADD_EXAMPLES, (self._tenant, name, version, list(part), request_ids, texts))
            return self._found(connection, name, version), True

    def list(
        self, name: str | None = None, after: tuple[str, int] = ("", 0), most: int = 10_000
    ) -> Sequence[StoredSet]:
        """The versions that are not removed, by name and version, behind ``after``; of one set or of all."""
        asked = {"tenant": self._tenant, "name": name, "most": most, "after_name": after[0], "after_version": after[1]}
        with self._transaction() as connection:
            return [StoredSet(*row) for row in connection.execute(_LIST.encode(), asked)]

    def find(self, name: str, version: int | None = None) -> StoredSet:
        """One version; the latest without a number. Raises UnknownEvaluationError."""
        with self._transaction() as connection:
            return self._found(connection, name, version)

    def examples(self, name: str, version: int) -> dict[int, EvaluationExample]:
        """The examples by their place, those that erasures have left."""
        return {place: example_of(place + 1, found) for place, found in self.lines(name, version)}

    def lines(
        self, name: str, version: int, after: int = -1, most: int = MOST_EXAMPLES
    ) -> Sequence[tuple[int, dict[str, Any]]]:
        """The examples behind a place as objects of the lines of the set, each with its place."""
        with self._transaction() as connection:
            rows = connection.execute(_EXAMPLES, (self._tenant, name, version, after, most)).fetchall()
        return [(int(place), json.loads(content)) for place, content in rows]

    def remove(self, name: str, version: int) -> None:
        """Delete the examples of a version. Runs on it keep their scores. Raises UnknownEvaluationError."""
        with self._transaction() as connection:
            self._found(connection, name, version)
            connection.execute(_REMOVE, (self._wall_clock(), self._tenant, name, version))
            connection.execute(_REMOVE_EXAMPLES, (self._tenant, name, version))

    def _next_version(self, connection: psycopg.Connection, name: str, size_bytes: int) -> int:
        latest, count, held_bytes = connection.execute(_TAKEN, (name, name, self._tenant)).fetchone() or (0, 0, 0)
        if count >= MOST_VERSIONS:
            raise EvaluationStoreError(f"{name} has had {MOST_VERSIONS} versions, which is the most", "name")
        if held_bytes + size_bytes > MOST_TENANT_BYTES:
            raise EvaluationStoreError(
                f"the sets of {self._tenant} would have more than {MOST_TENANT_BYTES} bytes", "body"
            )
        return int(latest) + 1

    def _check_origins(self, connection: psycopg.Connection, examples: Sequence[EvaluationExample]) -> None:
        """Examples made of requests are a use of a tenant's traffic: its own, and if it allows that."""
        made = [one for one in examples if one.request_id is not None]
        if not made:
            return
        for one in made:
            if one.tenant != self._tenant:
                raise EvaluationStoreError(f"{one.example_id}: provenance: made of a request of another tenant", "body")
        row = connection.execute(_CONSENT, (self._tenant,)).fetchone()
        if row is None or row[0] != EvaluationConsent.ALLOWED:
            raise EvaluationStoreError(
                f"the set is made of requests, and {self._tenant} does not allow evaluation (`evaluation`)"
            )
        # Erasures that begin wait for this transaction, and then find the examples.
        connection.execute(SHARE_ERASURE_LOCK)
        erased = connection.execute(_ERASED, ([one.request_id for one in made],)).fetchone()
        if erased is not None:
            raise EvaluationStoreError(f"{erased[0]}: the request was erased; export the set again", "body")

    def _found(self, connection: psycopg.Connection, name: str, version: int | None) -> StoredSet:
        row = connection.execute(_FIND.encode(), (self._tenant, name, version, version)).fetchone()
        if row is None:
            which = name if version is None else f"{name}:{version}"
            raise UnknownEvaluationError(f"{self._tenant} has no evaluation set {which}", "set")
        return StoredSet(*row)


def set_reference(text: str) -> tuple[str, int | None]:
    """``name`` or ``name:version``. Raises ValueError."""
    name, colon, version = text.partition(":")
    if not SET_NAME_PATTERN.fullmatch(name) or (colon and not re.fullmatch(r"[1-9]\d{0,9}", version)):
        raise ValueError(f"set: {text!r} is no name of a set, and no name:version")
    return name, int(version) if colon else None
