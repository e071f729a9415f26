"""Progress of running jobs: bars on a terminal, otherwise periodic log lines."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

from fairlane.logs import get_logger
from fairlane_server.cli.pace import Pace
from fairlane_server.cli.progress import Bars
from producers.backfill.app import OnProgress
from producers.backfill.job import Job, Tally
from producers.backfill.job_pace import rounded

log = get_logger(__name__)

LINE_S = 60.0
"""At least so long between two lines of a job."""

Show = Callable[[Tally], None]


class JobWatch:
    """May be used from several threads.

    Args:
        bars: None where nobody watches.
        clock: seconds, for the lines.
    """

    def __init__(self, bars: Bars | None, clock: Callable[[], float] = monotonic) -> None:
        self._bars = bars
        self._clock = clock

    @contextmanager
    def job(self) -> Iterator[OnProgress]:
        """Yields what is told how far one job is, for the first time when its runner begins; until the context ends."""
        with ExitStack() as shown:
            show: Show | None = None

            def heard(job: Job, done: Tally) -> None:
                nonlocal show
                show = show or self._begun(job, done, shown)
                show(done)

            yield heard

    def _begun(self, job: Job, done: Tally, shown: ExitStack) -> Show:
        if self._bars is None:
            return self._lines(job, done)
        tell = shown.enter_context(self._bars.bar(job.job_id, job.total_rows, done.rows))
        return lambda done: tell(done.rows, f"{done.cost_tokens:,} cost tokens")

    def _lines(self, job: Job, done: Tally) -> Show:
        said_s = self._clock()
        pace = Pace(job.total_rows, done.rows, said_s)

        def show(done: Tally) -> None:
            nonlocal said_s
            now_s = self._clock()
            pace.step(done.rows, now_s)
            if now_s - said_s < LINE_S:
                return
            said_s = now_s
            log.info(
                "job_progress",
                job_id=job.job_id,
                tenant=job.tenant,
                rows=done.rows,
                of_rows=job.total_rows,
                rows_per_s=rounded(pace.per_s(now_s)),
                remaining_s=rounded(pace.remaining_s(now_s)),
                cost_tokens=done.cost_tokens,
            )

        return show
