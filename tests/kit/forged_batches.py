"""Batches with the producer id of somebody else, which Kafka takes from whoever may write a topic."""

import asyncio
from typing import Any

from deploy.local.layout import KAFKA_LIBS_DIR
from tests.hostile_tenant.connections import Connection
from tests.hostile_tenant.messages import Api, RawRequest, Values, load_messages
from tests.hostile_tenant.topic_operations import records


def producer_ids(broker: str, topic: str) -> set[int]:
    """Of all producers that have written this topic."""
    asked = {"Name": topic, "PartitionIndexes": [0]}
    answer = asyncio.run(_ask(broker, "DescribeProducers", 0, {"Topics": [asked]}))
    return {one["ProducerId"] for one in answer["Topics"][0]["Partitions"][0]["ActiveProducers"]}


def forge(broker: str, topic: str, producer: tuple[int, int, int]) -> int:
    """Write a batch of this producer (its id, epoch and sequence number) to a topic; the error code."""
    partition = {"Index": 0, "Records": records(producer)}
    values = {"Acks": -1, "TimeoutMs": 10_000, "TopicData": [{"Name": topic, "PartitionData": [partition]}]}
    answer = asyncio.run(_ask(broker, "Produce", 9, values))
    return int(answer["Responses"][0]["PartitionResponses"][0]["ErrorCode"])


async def _ask(broker: str, name: str, version: int, values: Values) -> dict[str, Any]:
    async with Connection(broker) as connection:
        return await connection.ask(RawRequest(Api.named(load_messages(KAFKA_LIBS_DIR), name), version, values))
