"""Where a reply stands is known from its id: librdkafka's default partitioner against ours, both ways we produce."""

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from fairlane.kafka_config import connection, idempotent_producer, transactional_producer
from fairlane.settings import Settings
from fairlane_server.kafka.reply_partition import new_request_id, partition_of
from tests.kit.log_reader import LogReader

pytestmark = pytest.mark.broker

PARTITIONS = 12


def test_replies_come_to_the_partition_their_id_was_made_for(broker: str, unique: str) -> None:
    settings = Settings(kafka_bootstrap_servers=broker)
    admin = AdminClient(connection(settings))
    admin.create_topics([NewTopic(unique, PARTITIONS, 1)])[unique].result(20)
    ids = [new_request_id({number % PARTITIONS}, PARTITIONS) for number in range(240)]
    plain = Producer(idempotent_producer(settings))
    transactional = Producer(transactional_producer(settings, unique, 20_000))
    transactional.init_transactions(20)
    transactional.begin_transaction()
    for number, request_id in enumerate(ids):
        # As the transaction loop does it: -1 leaves the partition to the key.
        (transactional if number % 2 else plain).produce(unique, key=request_id.encode(), value=b"", partition=-1)
    assert plain.flush(20) == 0
    transactional.commit_transaction(20)
    reader = LogReader(settings, [unique])
    try:
        reader.read_to_end()
        stands = {(record.key() or b"").decode(): record.partition() for record in reader.records}
    finally:
        reader.close()
    assert stands == {request_id: partition_of(request_id, PARTITIONS) for request_id in ids}
