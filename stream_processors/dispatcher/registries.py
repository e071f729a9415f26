"""Valid tenants and models of the control topics; the last valid specification of a name stays in use."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from fairlane.logs import get_logger
from fairlane.models import is_model_name
from fairlane.names import is_name
from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.control.tenants_file import check_numbers
from stream_processors.dispatcher.scheduling.shares import Share

log = get_logger(__name__)

SpecT = TypeVar("SpecT")


class LastGood(ABC, Generic[SpecT]):
    """Keeps the last valid specification of a name whose new one is invalid, and omits a name that never had one.

    The command line rejects an invalid file as a whole, but a record written by another client must not stop a
    dispatcher. For one thread.
    """

    unusable: ClassVar[str]
    """The log event of an invalid specification."""

    def __init__(self) -> None:
        self._seen: Mapping[str, SpecT] | None = None
        self._usable: dict[str, SpecT] = {}

    def usable(self, specs: Mapping[str, SpecT]) -> Mapping[str, SpecT]:
        """The valid specifications by name; the same object until ``specs`` is another object."""
        if specs is not self._seen:
            self._seen = specs
            found = {name: self._checked(name, spec) for name, spec in specs.items()}
            self._usable = {name: spec for name, spec in found.items() if spec is not None}
        return self._usable

    @abstractmethod
    def check(self, name: str, spec: SpecT) -> None:
        """Raises ValueError if the specification under this name is invalid."""

    def _checked(self, name: str, spec: SpecT) -> SpecT | None:
        try:
            self.check(name, spec)
        except ValueError as error:
            log.error(self.unusable, name=name, reason=str(error), kept=name in self._usable)
            return self._usable.get(name)
        return spec


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


class ModelRegistry(LastGood[ModelVersion]):
    """Validates models. Pool names become part of topic names; an invalid one would stop the feeds of every
    dispatcher."""

    unusable = "model_unusable"

    def check(self, name: str, spec: ModelVersion) -> None:
        """Raises ValueError for an invalid model or pool name."""
        if spec.model != name or not is_model_name(name):
            raise ValueError(f"model: {spec.model!r} under the key {name!r}")
        for pool in (spec.pool, *spec.dedicated_pools):
            if not is_name(pool):
                raise ValueError(f"pool: {pool!r} cannot name one")
