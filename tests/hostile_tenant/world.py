"""What an attacker may know of a cluster: every name on it, by the naming rules of the documents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from tests.hostile_tenant.oracle import GROUP_PREFIX, Actor, Kind

INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata")
INSTANCES = ("1", "2")
JOB = "j1"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One of several on a cluster.

    Attributes:
        prefix: TOPIC_PREFIX.
        tenants: each with its services.
    """

    prefix: str
    tenants: Mapping[str, Sequence[str]]
    pools: Sequence[str]

    def groups(self) -> tuple[str, ...]:
        """Of all services and one of each tenant; also those that are only described."""
        own = self.prefix + GROUP_PREFIX
        return (
            *(f"{own}.{name}" for name in ("dispatcher", "dispatcher.archive", "gateway", "gateway.chunks")),
            *(f"{own}.{name}" for name in ("recorder", "jobs", f"job.{JOB}", f"log-replay.{JOB}")),
            *(f"{own}.pool.{pool}" for pool in self.pools),
            f"{self.prefix}fairlane-observer.top",
            *(self.tenant_group(tenant) for tenant in self.tenants),
        )

    def tenant_group(self, tenant: str) -> str:
        return f"{self.prefix}tenant_{tenant}.readers"

    def transactional_ids(self) -> tuple[str, ...]:
        """Of all instances of all services."""
        own = self.prefix + GROUP_PREFIX
        return (
            *(f"{own}.{kind}.{number}" for kind in ("dispatcher", "dispatcher-2") for number in INSTANCES),
            *(
                f"{own}.{kind}.{pool}.{number}"
                for kind in ("consumer", "consumer-2")
                for pool in self.pools
                for number in INSTANCES
            ),
            *(f"{own}.job.{JOB}", f"{own}.log-replay.{JOB}"),
            *(f"{self.prefix}fairlane-dead-letter-replay.{tenant}" for tenant in self.tenants),
        )

    def users(self) -> tuple[str, ...]:
        """The first user of each service, pool and tenant."""
        services = ("dispatcher", "gateway", "backfill", "recorder", "operator", "replayer", "admin", "viewer")
        return (
            *(self.user(service) for service in services),
            *(self.user("consumer", pool) for pool in self.pools),
            *(self.user("tenant", tenant) for tenant in self.tenants),
        )

    def user(self, role: str, owner: str = "") -> str:
        return f"{self.prefix}fairlane_{role}" + (f"_{owner}" if owner else "")


@dataclass(frozen=True, slots=True)
class Attacker:
    """A user of Kafka whose password is known."""

    user: str
    actor: Actor


@dataclass(frozen=True, slots=True)
class World:
    """Everything on the cluster; ``topics`` are ids by name."""

    pipelines: tuple[Pipeline, ...]
    topics: Mapping[str, UUID]
    names: Mapping[Kind, tuple[str, ...]]
    users: tuple[str, ...]

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(pipeline.prefix for pipeline in self.pipelines)


def describe_world(pipelines: Iterable[Pipeline], topics: Mapping[str, UUID], second_users: Iterable[str]) -> World:
    """Of these pipelines on a cluster with these topics."""
    pipelines = tuple(pipelines)
    names = {
        Kind.TOPIC: tuple(sorted(topics)),
        Kind.GROUP: tuple(name for pipeline in pipelines for name in pipeline.groups()),
        Kind.TRANSACTIONAL_ID: tuple(name for pipeline in pipelines for name in pipeline.transactional_ids()),
    }
    users = tuple(user for pipeline in pipelines for user in pipeline.users())
    return World(pipelines, topics, names, (*users, *second_users))
