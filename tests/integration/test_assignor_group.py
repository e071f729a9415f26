"""Two dispatchers' members of one group on the real broker: each tenant is whole on one of them."""

import asyncio

import pytest

from fairlane.names import backfill_topic, requests_topic, returned_topic
from fairlane.settings import Settings
from tests.kit.stream_member import StreamMember, create_topics, joined
from tests.kit.waiting import eventually_async

pytestmark = pytest.mark.broker

TENANTS = 5


@pytest.fixture
def settings(broker: str, unique: str) -> Settings:
    return Settings(kafka_bootstrap_servers=broker, group_prefix=unique, instance_id=f"{unique}-1")


@pytest.fixture
def tenants(settings: Settings) -> list[str]:
    return [f"{settings.group_prefix}-{number}" for number in range(TENANTS)]


@pytest.fixture
def topics(settings: Settings, tenants: list[str]) -> list[str]:
    """An odd number of tenants, so that taking turns by topic would part them."""
    made = [topic(tenant) for tenant in tenants for topic in (requests_topic, backfill_topic)]
    made.append(returned_topic(f"{settings.group_prefix}-pool"))
    create_topics(settings, *made)
    return made


def slot(settings: Settings, number: int) -> Settings:
    return settings.model_copy(update={"instance_id": f"{settings.group_prefix}-{number}"})


def held(member: StreamMember) -> set[str]:
    return {partition.topic for partition in member.ownership.partitions()}


async def spread(topics: list[str], *members: StreamMember) -> None:
    """Wait until the members hold everything and each holds something."""
    await eventually_async(
        lambda: all(map(held, members)) and sum(len(held(member)) for member in members) == len(topics),
        what="an assignment of all",
    )


def test_two_members_take_whole_tenants_and_the_survivor_takes_all(
    settings: Settings, tenants: list[str], topics: list[str]
) -> None:
    async def run() -> None:
        async with joined(slot(settings, 1), topics) as first:
            await spread(topics, first)
            async with joined(slot(settings, 2), topics) as second:
                await spread(topics, first, second)
                counts = []
                for member in (first, second):
                    mine = held(member)
                    whole = [tenant for tenant in tenants if requests_topic(tenant) in mine]
                    assert whole == [tenant for tenant in tenants if backfill_topic(tenant) in mine]
                    counts.append(len(whole))
                assert sorted(counts) == [2, 3]
            await spread(topics, first)

    asyncio.run(run())


def test_each_member_that_comes_is_one_rebalance(settings: Settings, topics: list[str]) -> None:
    """A client that joins more than once each time may keep the others from ever coming to rest."""

    async def run() -> None:
        async with joined(slot(settings, 1), topics) as first:
            await spread(topics, first)
            assert generation_of(first) == 1
            async with joined(slot(settings, 2), topics) as second:
                await spread(topics, first, second)
                assert generation_of(first) == generation_of(second) == 2

    asyncio.run(run())


def generation_of(member: StreamMember) -> int:
    assert member.ownership.membership is not None
    return member.ownership.membership.generation
