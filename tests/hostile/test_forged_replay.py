"""A tenant writes batches with the producer id of a replay to its own topic: replays for other tenants go on."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from fairlane.clock import now_ms
from fairlane.names import requests_topic
from fairlane.records import SourceCoordinate
from fairlane_server.dead_letters.log import DeadLetterReader
from fairlane_server.dead_letters.replay import NotReplayedError, Replay, Replayer, make_replay
from tests.kit.dead_letters_bench import DeadLettersBench, dead_letters
from tests.kit.forged_batches import forge, producer_ids

pytestmark = [pytest.mark.full, pytest.mark.broker]

HOSTILE, HONEST = "a", "b"
_LATER_EPOCH = 32_767


@pytest.fixture
def bench(
    broker: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[DeadLettersBench]:
    with dead_letters(broker, unique, tmp_path, monkeypatch, capsys) as bench:
        yield bench


def test_replays_for_other_tenants_go_on_and_no_letter_is_lost_or_sent_twice(
    broker: str, bench: DeadLettersBench
) -> None:
    hostile, honest = (bench.pipeline.tenant(tenant) for tenant in (HOSTILE, HONEST))
    letters = {tenant: [bench.bury(bench.pipeline.request(), tenant) for _ in range(3)] for tenant in (HOSTILE, HONEST)}
    topic = requests_topic(hostile)
    with (
        DeadLetterReader(bench.pipeline.settings, bench.pipeline.codec) as log,
        Replayer(bench.pipeline.settings, bench.pipeline.codec, "dlq:test", now_ms) as replayer,
    ):
        replayer.fence([hostile, honest])
        before = producer_ids(broker, topic)
        for tenant in letters:
            replayer.send(replay_of(log, letters[tenant][0]))
        (producer_id,) = producer_ids(broker, topic) - before
        assert forge(broker, topic, (producer_id, _LATER_EPOCH, 0)) == 0, "Kafka takes it"
        with pytest.raises(NotReplayedError, match="its topic refuses this one"):
            replayer.send(replay_of(log, letters[HOSTILE][1]))
        replayer.send(replay_of(log, letters[HONEST][1]))

    # The next run, too, and the letters that it cannot send are named.
    code, text, complaint = bench.run("replay", "--topic", "work", "--tenant", honest)
    assert (code, complaint) == (0, "")
    assert "1 replayed, 2 replayed before" in text
    code, text, complaint = bench.run("replay", "--all")
    listed = bench.json("list")["letters"]
    sent = {
        tenant: [len(one["replayed_as"]) for one in listed if one["tenant"] == tenant] for tenant in (hostile, honest)
    }
    assert sent[honest] == [1, 1, 1]
    assert sent[hostile][0] == 1
    assert max(sent[hostile]) == 1
    assert (code == 0) is (sent[hostile] == [1, 1, 1]), complaint
    reader = bench.pipeline.reader(requests_topic(honest))
    reader.read_to_end()
    assert len(reader.records) == 3


def replay_of(log: DeadLetterReader, place: SourceCoordinate) -> Replay:
    letter = log.find(place)
    assert letter is not None
    return make_replay(letter, str(uuid4()))
