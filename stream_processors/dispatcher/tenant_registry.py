"""Valid tenants of the control topic."""

from fairlane.names import is_name
from fairlane.records import TenantSpec
from fairlane_server.control.tenants_file import check_numbers
from stream_processors.dispatcher.last_good import LastGood
from stream_processors.dispatcher.scheduling.shares import Share


class TenantRegistry(LastGood[TenantSpec]):
    """Validates tenants. Tenant, pool and service names become part of topic names; an invalid one would stop the feeds
    of every dispatcher."""

    unusable = "tenant_unusable"

    def check(self, name: str, spec: TenantSpec) -> None:
        """Raises ValueError for an invalid name, number, weight or group."""
        if spec.tenant != name or not is_name(name):
            raise ValueError(f"tenant: {spec.tenant!r} under the key {name!r}")
        if spec.pool is not None and not is_name(spec.pool):
            raise ValueError(f"pool: {spec.pool!r} cannot name one")
        for service in spec.services:
            if not is_name(service):
                raise ValueError(f"services: {service!r} cannot name one")
        Share(spec.weight, spec.groups)
        check_numbers(spec)
