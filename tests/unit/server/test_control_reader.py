"""Where the reader of a control topic begins."""

from typing import cast

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from fairlane_server.control.publisher import _first_offset


class Answers:
    """A consumer that answers one question."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        if self._code is not None:
            raise KafkaException(KafkaError(self._code))
        return 7, 9


@pytest.mark.parametrize(
    ("code", "offset"),
    [
        (None, 7),
        (KafkaError.NOT_LEADER_FOR_PARTITION, OFFSET_BEGINNING),
        (KafkaError.LEADER_NOT_AVAILABLE, OFFSET_BEGINNING),
    ],
)
def test_a_topic_whose_leader_was_just_chosen_is_read_all_the_same(code: int | None, offset: int) -> None:
    assert _first_offset(cast(Consumer, Answers(code)), "topic", 0).offset == offset


def test_another_error_is_one() -> None:
    with pytest.raises(KafkaException):
        _first_offset(cast(Consumer, Answers(KafkaError.TOPIC_AUTHORIZATION_FAILED)), "topic", 0)
