"""Shadows of a pipeline: started and stopped as a command does, and what their copies came to."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fairlane.clock import now_ms
from fairlane.evaluation_records import Shadow
from fairlane.names import EVALUATION_REPLIES, EVALUATION_WORK
from fairlane.records import InferenceReply, WorkItem
from fairlane_server.control.route_change import change_route
from fairlane_server.evaluation.shadows import ShadowPlan, with_shadow, without_shadow
from fairlane_server.models.changes import Author
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually


def start_shadow(pipeline: Pipeline, candidate: str, **plan: Any) -> Shadow:
    """Copy every request of the first model, as far as the bounds in ``plan`` allow; by default they allow all."""
    wanted = ShadowPlan(candidate, **{"percent": 100.0, "max_concurrent": 1_000, "max_share": 1.0} | plan)
    route = change_route(
        *(pipeline.settings, pipeline.codec, pipeline.models[0].model),
        lambda published: with_shadow(published, pipeline.models[0].model, wanted, Author("a test", now_ms())),
    )
    assert route.shadow is not None
    return route.shadow


def stop_shadow(pipeline: Pipeline) -> None:
    change_route(
        *(pipeline.settings, pipeline.codec, pipeline.models[0].model),
        lambda published: without_shadow(published, pipeline.models[0].model, Author("a test", now_ms())),
    )


class Copies:
    """The copies of a run in the log, and their replies, read with ``read_committed``."""

    def __init__(self, pipeline: Pipeline, run: str) -> None:
        self._codec = pipeline.codec
        self._run = run
        self._work: LogReader = pipeline.reader(EVALUATION_WORK)
        self._replies: LogReader = pipeline.reader(EVALUATION_REPLIES)

    def made(self) -> list[WorkItem]:
        """All that were made until now."""
        self._work.read_to_end()
        found = (self._codec.decode_as(WorkItem, record.value()) for record in self._work.records)
        return [item for item in found if item.evaluation is not None and item.evaluation.run == self._run]

    def ends(self) -> Mapping[str, Sequence[InferenceReply]]:
        """The replies until now, by the id of the copy."""
        self._replies.read_to_end()
        found: dict[str, list[InferenceReply]] = defaultdict(list)
        for record in self._replies.records:
            reply = self._codec.decode_as(InferenceReply, record.value())
            if reply.evaluation is not None and reply.evaluation.run == self._run:
                found[reply.request_id].append(reply)
        return found

    def wait_all_ended(self, timeout_s: float = 60.0) -> Mapping[str, InferenceReply]:
        """The one reply to each copy. Raises AssertionError when one is missing or came twice."""
        made = Counter(item.request.request_id for item in self.made())
        eventually(lambda: self.ends().keys() >= made.keys(), timeout_s, "an end of every copy")
        ends = self.ends()
        assert Counter({copy: len(replies) for copy, replies in ends.items()}) == Counter(dict.fromkeys(made, 1))
        assert set(made.values()) <= {1}, "one copy of each request"
        return {copy: replies[0] for copy, replies in ends.items()}


def recorded(dsn: str, run: str) -> list[dict[str, Any]]:
    """The rows of a run, as the owner of the tables sees them."""
    with connect(dsn, "tests") as connection:
        act_for(connection, ALL_TENANTS)
        cursor = connection.execute("SELECT * FROM evaluation_results WHERE run = %s", (run,))
        columns = [column.name for column in cursor.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
