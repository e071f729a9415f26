"""Catches errors of one job, so that the process and its other jobs go on."""

from collections.abc import Callable
from traceback import extract_tb

from confluent_kafka import KafkaException

from fairlane.logs import get_logger
from producers.backfill.job import Job, Status
from producers.backfill.ports import AwayError, JobFailedError, JobLog, LeaseLostError

log = get_logger(__name__)

_FRAMES = 4


def guarded(job: Job, job_log: JobLog, work: Callable[[], Status]) -> Status:
    """What ``work`` on a job returns; FAILED, with a reason in its log, if it cannot go on.

    Raises AwayError and LeaseLostError, and KafkaException for settings that no job could be run with.
    """
    try:
        return work()
    except (AwayError, LeaseLostError, KafkaException):
        raise
    except JobFailedError as error:
        reason = str(error)
        log.error("job_failed", job_id=job.job_id, tenant=job.tenant, reason=reason)
    except Exception as error:  # noqa: BLE001 - a row that nobody foresaw fails its job alone
        # Not its text, which may quote a row.
        reason = f"the runner met what it cannot handle: {type(error).__name__}"
        frames = [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)[-_FRAMES:]]
        log.error("job_broke", job_id=job.job_id, tenant=job.tenant, error=type(error).__name__, frames=frames)
    job_log.move(Status.FAILED, reason)
    return Status.FAILED
