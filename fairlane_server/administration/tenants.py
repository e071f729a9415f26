"""Changes of tenants as the audit has them, and changes of one: decided against what is published, recorded, then
published."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import psycopg

from fairlane.closing import Closing
from fairlane.codec import Codec
from fairlane.records import TenantSpec
from fairlane.settings import Settings
from fairlane_server.administration.events import AdminAudit, AdminEvent, AdminEventKind, AuditError
from fairlane_server.administration.recorded_change import recorded_change
from fairlane_server.administration.tenant_remains import TenantRemains, written_topics
from fairlane_server.api_keys.key_store import ApiKey, ApiKeys, Author
from fairlane_server.control.published_tenants import tenant_topic
from fairlane_server.control.tenants_file import API, tenant_document
from fairlane_server.kafka.cluster_admin import ClusterAdmin, ClusterError
from fairlane_server.kafka.open_kafka import check_open_kafka
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from fairlane_server.store_error import ReportableError
from fairlane_server.topics.admin import apply_plan, read_state
from fairlane_server.topics.families import expand, load_families
from fairlane_server.topics.plan import plan

_LONGEST_CHANGE_S = 120.0
# Any number of our own: two processes never change tenants at the same time.
_LOCK = "SELECT pg_advisory_xact_lock(3170517420259)"

Published = Mapping[str, TenantSpec | None]
_NOTHING = TenantRemains()


class TenantError(ReportableError):
    """The change was refused; nothing was done."""


class TenantNotFoundError(TenantError):
    """No such tenant."""


class TenantConflictError(TenantError):
    """The state of the tenants does not permit it. ``field`` is the key at fault, if any."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TenantChangedError(TenantError):
    """It is not what the caller has read."""


class ETagNeededError(TenantError):
    """The caller did not say what it has read."""


@dataclass(frozen=True, slots=True)
class TenantChange:
    """A decided change. ``before`` is None for a new tenant, ``after`` for a removed one."""

    tenant: str
    before: TenantSpec | None
    after: TenantSpec | None


def etag_of(spec: TenantSpec | None) -> str:
    """Changes whenever the tenant does. None: a published record that cannot be read."""
    return sha256(repr(spec).encode()).hexdigest()[:32]


def decide_set(
    published: Published,
    wanted: TenantSpec,
    etag: str | None,
    *,
    adopt: bool,
    restore: bool = False,
    remains: TenantRemains = _NOTHING,
) -> TenantChange:
    """A new or changed tenant. ``etag`` is of what the caller has read, None for a new one; ``adopt``: take the tenant
    over from the file. ``remains`` are those of a tenant of this name; ``restore``: it is the same one, and gets them
    back. Raises TenantError."""
    name = wanted.tenant
    before = _found(published, name, etag, adopt=adopt) if name in published else None
    if name not in published and etag is not None:
        raise TenantNotFoundError("there is no such tenant")
    if name not in published and remains and not restore:
        raise TenantConflictError(
            f"there was a tenant of this name, and who gets the name gets what is left ({remains}): take another "
            "name, or for the same customer `restore=true`. `fairlane access apply --delete` takes the rights of its "
            "Kafka users, then `fairlane topics apply --delete` deletes its topics; the name stays taken while it has "
            "rows"
        )
    owner = next(
        (one for one, spec in published.items() if one != name and spec and wanted.pool and spec.pool == wanted.pool),
        None,
    )
    if owner is not None:
        raise TenantConflictError(f"{wanted.pool!r} is already the dedicated pool of {owner!r}", "pool")
    return TenantChange(name, before, wanted)


def decide_removal(published: Published, tenant: str, etag: str | None) -> TenantChange:
    """The end of a tenant that the API manages. Raises TenantError."""
    if tenant not in published:
        raise TenantNotFoundError("there is no such tenant")
    return TenantChange(tenant, _found(published, tenant, etag, adopt=False), None)


def _found(published: Published, tenant: str, etag: str | None, *, adopt: bool) -> TenantSpec | None:
    known = published[tenant]
    if known is not None and known.managed_by != API and not adopt:
        raise TenantConflictError("the tenants file manages this tenant; `adopt=true` takes it over")
    if etag is None:
        raise ETagNeededError("say with `If-Match` which state is changed")
    if etag != etag_of(known):
        raise TenantChangedError("it was changed since it was read")
    return known


class Tenants(Closing):
    """The published tenants. For one thread at a time; all instances change one after another."""

    def __init__(self, settings: Settings, codec: Codec, audit: AdminAudit, keys: ApiKeys) -> None:
        self._settings = settings
        self._keys = keys
        self._topic = tenant_topic(settings, codec)
        self._audit = audit
        dsn = settings.postgres_dsn.get_secret_value()
        self._lock = ReconnectingConnection(dsn, "fairlane-tenants", _LONGEST_CHANGE_S)

    def close(self) -> None:
        self._lock.close()

    def read(self) -> dict[str, TenantSpec | None]:
        """All tenants by name; None for one that cannot be read. Raises ClusterError."""
        return self._topic.read()

    def set(
        self, wanted: TenantSpec, etag: str | None, author: Author, *, adopt: bool, restore: bool = False
    ) -> TenantChange:
        """Create the tenant's topics, then publish it; with ``restore`` its identities are accepted from then on.

        Raises TenantError: nothing was done; ClusterError, AuditError, ApiKeysError: the audit says how far it came,
        and the call may be repeated."""
        with self._locked():
            published = self._topic.read()
            remains = _NOTHING if wanted.tenant in published else self._remains(wanted.tenant)
            change = decide_set(published, wanted, etag, adopt=adopt, restore=restore, remains=remains)
            check_open_kafka(self._settings, published.keys() | {wanted.tenant})
            with recorded_change(self._audit, tenant_event(change, author.name)):
                self._create_topics(wanted)
                self._topic.publish([wanted])
                if restore:
                    self._keys.readmit_tenant(wanted.tenant, author=author)
        return change

    def remove(self, tenant: str, etag: str | None, author: Author) -> Sequence[ApiKey]:
        """Bar a tenant's identities and revoke its keys, then withdraw it; its topics and rows stay. Returns the keys.
        Raises as ``set``."""
        with self._locked():
            change = decide_removal(self._topic.read(), tenant, etag)
            with recorded_change(self._audit, tenant_event(change, author.name)):
                # First, so that a call that fails behind it can be repeated.
                revoked = self._keys.bar_tenant(tenant, author=author)
                self._topic.publish([], [tenant])
        return revoked

    def _remains(self, tenant: str) -> TenantRemains:
        topics = written_topics(ClusterAdmin(self._settings), load_families(), tenant)
        return TenantRemains(self._keys.tenant_remains(tenant), topics)

    def _create_topics(self, spec: TenantSpec) -> None:
        cluster = ClusterAdmin(self._settings)
        families = [family for family in load_families() if family.placeholders]
        wanted = expand(families, [spec], models=())
        # Without the settings of topics: those that exist stay as they are.
        state = read_state(cluster, ())
        missing = tuple(topic for topic in wanted if topic.name not in state.topics)
        made = plan(
            missing,
            state.topics,
            families=(),
            broker_config=state.broker_config,
            replication_factor=state.default_replication_factor,
        )
        for one in apply_plan(cluster, made):
            if one.result == "failed":
                raise ClusterError(f"{one.change.topic}: {one.change.action} failed: {one.reason}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock.transaction(timeout_s=_LONGEST_CHANGE_S) as connection:
                connection.execute(_LOCK)
                yield
        except psycopg.Error as error:
            raise AuditError(f"tenants cannot be locked: {reason(error)}") from None


def tenant_event(change: TenantChange, author: str, kafka_user: str | None = None) -> AdminEvent:
    """The change as the audit has it. ``kafka_user``: of a command, whose author is what it says of itself."""
    kind = AdminEventKind.TENANT_REMOVED if change.after is None else AdminEventKind.TENANT_SET
    details: dict[str, object] = {"before": _document(change.before), "after": _document(change.after)}
    if kafka_user is not None:
        details["kafka_user"] = kafka_user
    return AdminEvent(kind, change.tenant, author, details=details)


def _document(spec: TenantSpec | None) -> dict[str, object] | None:
    return None if spec is None else {"managed_by": spec.managed_by, **tenant_document(spec)}
