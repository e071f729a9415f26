"""Calibrations of judges of one tenant in Postgres; they are never changed."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from psycopg.types.json import Jsonb

from fairlane_server.evaluation.calibration import JudgeAgreement
from fairlane_server.evaluation.judge import Rubric
from fairlane_server.evaluation.set_store import (
    StoredSet,
    UnknownEvaluationError,
)
from fairlane_server.evaluation.tenant_store import TenantStore

_COLUMNS = """
calibration_id, judge, judge_version, rubric, rubric_digest, set_name, set_version, set_digest, result, created_at_ms,
created_by
"""
_ADD = f"""
INSERT INTO judge_calibrations (tenant, {_COLUMNS}, is_sufficient)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""  # noqa: S608 - our own names
_LIST = f"""
SELECT {_COLUMNS} FROM judge_calibrations
WHERE tenant = %(tenant)s AND (%(judge)s::text IS NULL OR judge = %(judge)s)
    AND (%(rubric)s::text IS NULL OR rubric_digest = %(rubric)s)
    AND (%(id)s::text IS NULL OR calibration_id = %(id)s)
ORDER BY created_at_ms DESC, calibration_id LIMIT %(most)s
"""  # noqa: S608 - our own names


@dataclass(frozen=True, slots=True)
class JudgeCalibration:
    """A judge beside people, on one version of a set.

    Attributes:
        judge: the model as requests named it; ``judge_version``: what answered.
        rubric, rubric_digest: what the judge was told.
        agreement: how well it agreed, and what its grades are worth.
    """

    calibration_id: str
    judge: str
    judge_version: str
    rubric: str
    rubric_digest: str
    set_name: str
    set_version: int
    set_digest: str
    agreement: JudgeAgreement
    created_at_ms: int
    created_by: str


class JudgeCalibrations(TenantStore):
    """Every call raises StoreError: Postgres cannot be used, and it is unknown whether it was done."""

    def add(
        self, judge: str, version: str, rubric: Rubric, measured_on: StoredSet, agreement: JudgeAgreement, author: str
    ) -> JudgeCalibration:
        """Store a calibration, and return it."""
        made = JudgeCalibration(
            calibration_id=secrets.token_hex(8),
            judge=judge,
            judge_version=version,
            rubric=rubric.text,
            rubric_digest=rubric.digest,
            set_name=measured_on.name,
            set_version=measured_on.version,
            set_digest=measured_on.digest,
            agreement=agreement,
            created_at_ms=self._wall_clock(),
            created_by=author,
        )
        row = (
            *(self._tenant, made.calibration_id, judge, version, made.rubric, made.rubric_digest),
            *(made.set_name, made.set_version, made.set_digest, Jsonb(asdict(agreement))),
            *(made.created_at_ms, author, agreement.refusal is None),
        )
        with self._transaction() as connection:
            connection.execute(_ADD.encode(), row)
        return made

    def list(self, judge: str | None = None, most: int = 100) -> Sequence[JudgeCalibration]:
        """The newest first."""
        return self._read(judge=judge, most=most)

    def find(self, calibration_id: str) -> JudgeCalibration:
        """Raises UnknownEvaluationError."""
        found = self._read(calibration_id=calibration_id, most=1)
        if not found:
            raise UnknownEvaluationError(f"{self._tenant} has no calibration {calibration_id}", "calibration")
        return found[0]

    def latest(self, judge: str, rubric: Rubric) -> JudgeCalibration | None:
        """Of a judge with this rubric."""
        found = self._read(judge=judge, rubric_digest=rubric.digest, most=1)
        return found[0] if found else None

    def _read(
        self,
        *,
        judge: str | None = None,
        rubric_digest: str | None = None,
        calibration_id: str | None = None,
        most: int,
    ) -> Sequence[JudgeCalibration]:
        asked = {
            "tenant": self._tenant,
            "judge": judge,
            "rubric": rubric_digest,
            "id": calibration_id,
            "most": most,
        }
        with self._transaction() as connection:
            rows = connection.execute(_LIST.encode(), asked).fetchall()
        return [
            JudgeCalibration(*[*first, JudgeAgreement(**{**result, "scores": tuple(result["scores"])}), at_ms, author])
            for *first, result, at_ms, author in rows
        ]
