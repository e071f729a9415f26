"""The baseline of hop-latency: one transactional hop in confluent-kafka and nothing else, as a process of its own.

``python -m benchmarks.bare_chain IN OUT GROUP`` copies records from IN to OUT, one transaction per poll, with
the same client settings as the project's own hops.
"""

import sys

from confluent_kafka import Consumer, Producer, TopicPartition

from fairlane.kafka_config import read_committed_consumer, transactional_producer
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal


def main(source: str, target: str, group: str) -> None:
    settings = Settings()
    stop = StopSignal()
    stop.install()
    readiness = Readiness("assignment")
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    consumer = Consumer(read_committed_consumer(settings, group) | {"auto.offset.reset": "earliest"})
    producer = Producer(transactional_producer(settings, f"{group}-producer", settings.transaction_timeout_ms))
    producer.init_transactions(30.0)
    consumer.subscribe([source], on_assign=lambda _consumer, _partitions: readiness.set("assignment"))
    while not stop.stopping:
        first = consumer.poll(0.1)
        if first is None:
            continue
        messages = [message for message in (first, *consumer.consume(256, 0)) if message.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            producer.produce(target, value=message.value(), key=message.key())
        offsets = consumer.position(consumer.assignment())
        moved = [TopicPartition(one.topic, one.partition, one.offset) for one in offsets if one.offset >= 0]
        producer.send_offsets_to_transaction(moved, consumer.consumer_group_metadata(), 10.0)
        producer.commit_transaction(10.0)
    consumer.close()
    health.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4])
