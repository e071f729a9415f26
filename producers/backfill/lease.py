"""Holds the lease of a running job and reads its owner's commands, on a thread of its own.

The loop may wait for Kafka for half a minute; the lease must not end meanwhile.
"""

import threading
from time import monotonic

from fairlane.logs import get_logger
from fairlane_server.processes.service import StopSignal
from producers.backfill.job import Wanted
from producers.backfill.job_log import PostgresJobLog
from producers.backfill.ports import AwayError, JobFailedError, LeaseLostError

log = get_logger(__name__)

LEASE_S = 20.0
_LOOK_S = 1.0
_JOIN_TIMEOUT_S = 15.0


class LeaseKeeper:
    """See :class:`producers.backfill.ports.Control`.

    with LeaseKeeper(...) as control:
        Runner(..., control, ...).run()
    """

    def __init__(
        self,
        job_log: PostgresJobLog,
        stop: StopSignal,
        max_cost_tokens: int | None,
        lease_s: float = LEASE_S,
        give_way: threading.Event | None = None,
    ) -> None:
        """``job_log`` is for this thread alone. ``give_way`` is set when another job is to have this one's place."""
        self._log = job_log
        self._stop = stop
        self._give_way = give_way or threading.Event()
        self._lease_s = lease_s
        self._wanted = Wanted.RUN
        self._max_cost_tokens = max_cost_tokens
        self._lost = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name="lease", daemon=True)

    def __enter__(self) -> "LeaseKeeper":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        # Twice: the connection may have broken while it rested.
        for tries_left in (1, 0):
            try:
                self._log.release()
                break
            except AwayError as error:
                if not tries_left:
                    log.warning("lease_not_released", reason=str(error), lease_s=self._lease_s)
        self._log.close()

    @property
    def wanted(self) -> Wanted:
        return self._wanted

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def stopping(self) -> bool:
        return self._stop.stopping

    @property
    def gives_way(self) -> bool:
        return self._give_way.is_set()

    @property
    def max_cost_tokens(self) -> int | None:
        return self._max_cost_tokens

    def wait(self, timeout_s: float) -> None:
        self._stop.wait(timeout_s)

    def _guarded(self) -> None:
        kept_at = monotonic()
        try:
            while not self._over.wait(min(_LOOK_S, self._lease_s / 4)):
                try:
                    self._look()
                    kept_at = monotonic()
                except (AwayError, JobFailedError) as error:
                    log.warning("lease_not_kept", reason=str(error), since_s=round(monotonic() - kept_at, 1))
        except LeaseLostError:
            self._lost = True
        except Exception:
            log.exception("lease_thread_died")
            self._lost = True

    def _look(self) -> None:
        wanted, self._max_cost_tokens = self._log.keep(self._lease_s)
        self._wanted = Wanted(wanted)
