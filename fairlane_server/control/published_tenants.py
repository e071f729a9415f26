"""The published tenants, and which of them the admin API manages."""

from collections.abc import Iterable, Mapping

from fairlane.codec import Codec
from fairlane.names import CONTROL_TENANTS
from fairlane.records import TenantSpec
from fairlane.settings import KafkaSettings, Settings
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.control.tenants_file import API, load_tenants


def tenant_topic(settings: KafkaSettings, codec: Codec) -> ControlTopic[TenantSpec]:
    """The control topic of the tenants."""
    return ControlTopic(settings, codec, CONTROL_TENANTS, TenantSpec, kind="tenant")


def managed_by_api(published: Mapping[str, TenantSpec | None]) -> dict[str, TenantSpec]:
    """The tenants that the API manages."""
    return {name: spec for name, spec in published.items() if spec is not None and spec.managed_by == API}


def with_api_tenants(
    of_file: Iterable[TenantSpec], published: Mapping[str, TenantSpec | None]
) -> tuple[TenantSpec, ...]:
    """The tenants of the file and those of the API, whose settings count for a tenant that is in both. A record that
    cannot be read counts for nothing: it could be anything."""
    return tuple({**{spec.tenant: spec for spec in of_file}, **managed_by_api(published)}.values())


def all_tenants(settings: Settings, codec: Codec) -> tuple[TenantSpec, ...]:
    """The tenants of the file and those of the API; without the control topic those of the file. Raises ValueError for
    a wrong file, and ClusterError."""
    of_file = load_tenants(settings.tenants_file)
    return with_api_tenants(of_file, tenant_topic(settings, codec).read_if_there())
