"""The queues of refused topics lose nothing, repeat nothing and count what they hold."""

from hypothesis import given
from hypothesis import strategies as st

from fairlane.ownership import Claim, PartitionId
from fairlane_server.kafka.blocked_topics import BlockedTopics
from fairlane_server.kafka.settlement import OutputRecord, Settlement
from fairlane_server.kafka.transactional_producer import TopicRefusal

TOPICS = ("a", "b", "c")
REASONS = (TopicRefusal("MISSING", True, True), TopicRefusal("LARGE", True, False), TopicRefusal("AWAY", False, True))


def settlement(number: int, topics: tuple[str, ...]) -> Settlement:
    return Settlement(Claim(PartitionId(f"source-{number % 3}", 0), number, 1), tuple(_record(one) for one in topics))


def _record(topic: str) -> OutputRecord:
    return OutputRecord(topic, None, b"123")


@given(st.data())
def test_whatever_is_handed_over_is_parked_or_taken_once(data: st.DataObject) -> None:
    def dead(one: Settlement, _reason: str) -> Settlement:
        return Settlement(one.claim, (_record("c"),)) if one.outputs[0].topic == "b" else one

    blocked = BlockedTopics(10, 100, 0.0, 8, 1_000, dead)
    outside: dict[Claim, Settlement] = {}
    """What a caller would have as pending."""
    done: set[Claim] = set()
    void: set[Claim] = set()
    made = 0
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from((0.0, 0.5, 20.0)))
        step = data.draw(st.sampled_from(("new", "new", "refuse", "probe", "probe", "revoke")))
        if step == "new":
            topics = data.draw(st.lists(st.sampled_from(TOPICS), max_size=2, unique=True))
            one = settlement(made, tuple(topics))
            made += 1
            passed = blocked.divert(one, now)
            if passed is not None:
                outside[passed.claim] = passed
        elif step == "refuse":
            topic, reason = data.draw(st.sampled_from(TOPICS)), data.draw(st.sampled_from(REASONS))
            tried = [outside.pop(one.claim) for one in list(outside.values()) if one.goes_to(topic)]
            for one in blocked.refused(topic, reason, (), tried, now, 0.0):
                outside[one.claim] = one
        elif step == "probe":
            topic, notes, tried = blocked.probe(now, lambda claim: claim not in done)
            assert not notes
            if not topic:
                continue
            assert tried
            outcome = data.draw(st.sampled_from(("passed", "refused", "put back")))
            if outcome == "passed":
                done.update(one.claim for one in tried)
                blocked.passed(topic, now)
                blocked.committed(tried)
            elif outcome == "refused":
                for one in blocked.refused(topic, data.draw(st.sampled_from(REASONS)), (), tried, now, 0.0):
                    outside[one.claim] = one
            else:
                blocked.put_back(topic, (), tried)
        else:
            gone = data.draw(st.integers(0, 2))
            waiting = {one.claim for queue in blocked._queues.values() for one in queue.settlements()}
            of_gone = {claim for claim in waiting if claim.partition.topic == f"source-{gone}"}
            assert blocked.keep(lambda claim, of_gone=of_gone: claim not in of_gone, now) == len(of_gone)  # type: ignore[misc]
            void |= of_gone
        held = [one.claim for queue in blocked._queues.values() for one in queue.settlements()]
        assert len(held) == len(set(held)) == blocked.count
        assert blocked.size_bytes == sum(
            one.size_bytes for queue in blocked._queues.values() for one in queue.settlements()
        )
        everything = [*held, *outside, *done, *void]
        assert sorted(claim.offset for claim in everything) == list(range(made))
        assert sum(blocked._sources.values()) == blocked.count
        assert all(topic in TOPICS for topic in blocked._queues)
