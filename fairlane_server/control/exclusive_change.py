"""A change of a control topic that is decided on its present records, with no other change in between."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import transactional_producer
from fairlane.settings import KafkaSettings
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.transactional_producer import backoff_s, close_producer, while_retriable

RecordT = TypeVar("RecordT")

_TIMEOUT_MS = 10_000
_CALL_TIMEOUT_S = 20.0
_TRIES = 5
_OVERTAKEN = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}


class ExclusiveChange:
    """Changes by one transactional id. Of two that run at once, the one that began later fences the other, which then
    begins again with the records of the first."""

    def __init__(self, settings: KafkaSettings, transactional_id: str) -> None:
        self._settings = settings
        self._id = transactional_id

    def make(
        self,
        control: ControlTopic[RecordT],
        decide: Callable[[Mapping[str, RecordT | None]], tuple[Iterable[RecordT], Iterable[str]]],
    ) -> None:
        """Read the topic, and publish the records that ``decide`` makes of them and empty ones for the keys that it
        withdraws: all or none.

        ``decide`` may be called several times; what it raises is passed on. Raises ClusterError.
        """
        for attempt in range(1, _TRIES + 1):
            errors = LastConnectionError()
            producer = KafkaProducer(
                quiet_config(transactional_producer(self._settings, self._id, _TIMEOUT_MS), errors)
            )
            try:
                # Ends the transactions of others: what they have published is read, and no more of theirs follows.
                while_retriable(partial(producer.init_transactions, _CALL_TIMEOUT_S), _TRIES)
                values = control.values_of(*decide(control.read()))
                if values:
                    self._publish(producer, control.topic, values)
            except KafkaException as error:
                if error.args[0].code() not in _OVERTAKEN or attempt == _TRIES:
                    raise ClusterError(f"{control.topic}: {errors.text or reason_of(error)}") from None
                time.sleep(backoff_s(attempt))
            else:
                return
            finally:
                close_producer(producer)

    @staticmethod
    def _publish(producer: Producer, topic: str, values: Mapping[str, bytes | None]) -> None:
        producer.begin_transaction()
        for key, value in values.items():
            producer.produce(topic, key=key.encode(), value=value)
        while_retriable(partial(producer.commit_transaction, _CALL_TIMEOUT_S), _TRIES)
