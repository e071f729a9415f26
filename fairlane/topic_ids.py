"""Topic ids from the broker. A topic that is deleted and created again gets another id."""

from collections.abc import Collection, Mapping
from time import monotonic

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicCollection as Topics
from confluent_kafka.admin import AdminClient

from fairlane.kafka_config import connection
from fairlane.settings import KafkaSettings

_CALL_TIMEOUT_S = 5.0
_GRACE_S = 0.5
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The zero id, which brokers before 2.8 return."""


class TopicIds:
    """Looks up topic ids with an admin client that exists only during the call, which is once per assignment."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings

    def __call__(self, topics: Collection[str], timeout_s: float) -> Mapping[str, str]:
        """The id of each of these topics that exists and has one.

        Raises KafkaException when the broker refuses or does not answer in time.
        """
        wanted = sorted(set(topics))
        if not wanted:
            return {}
        timeout_s = max(0.1, min(_CALL_TIMEOUT_S, timeout_s))
        deadline = monotonic() + timeout_s + _GRACE_S
        admin = AdminClient(connection(self._settings))
        found = {}
        for topic, answer in admin.describe_topics(Topics(wanted), request_timeout=timeout_s).items():
            try:
                uuid = answer.result(max(0.0, deadline - monotonic())).topic_id
            except TimeoutError:
                reason = "the ids of the topics were not told in time"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason)) from None
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
            else:
                # URL-safe base64, as in Kafka's tools; librdkafka uses the standard alphabet.
                topic_id = str(uuid).replace("+", "-").replace("/", "_")
                if topic_id != _NO_ID:
                    found[topic] = topic_id
        return found
