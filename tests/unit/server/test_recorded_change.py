"""Changes outside of Postgres in the audit: begun before they are made, and ended however they end."""

import pytest

from fairlane.records import TenantSpec
from fairlane_server.administration.events import AuditError
from fairlane_server.administration.recorded_change import recorded_change
from fairlane_server.administration.tenants import TenantChange, tenant_event
from fairlane_server.kafka.cluster_admin import ClusterError
from tests.kit.memory_audit import MemoryAudit

OLD, NEW = TenantSpec("acme"), TenantSpec("acme", weight=2.0)
CHANGES = (
    tenant_event(TenantChange("acme", OLD, NEW), "me@here", kafka_user="operator"),
    tenant_event(TenantChange("globex", TenantSpec("globex"), None), "me@here"),
)


def ends(audit: MemoryAudit) -> list[tuple[str, str, int | None, object]]:
    return [(one.tenant, one.outcome, one.of_event, one.details.get("reason")) for one in audit.events[2:]]


def test_each_change_has_what_was_before_and_who_makes_it() -> None:
    first, second = CHANGES
    assert (first.name, second.name) == ("tenant_set", "tenant_removed")
    before, after = first.details["before"], first.details["after"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert (before["weight"], after["weight"]) == (1.0, 2.0)
    assert (first.author, first.details["kafka_user"]) == ("me@here", "operator")
    assert second.details["after"] is None
    assert "kafka_user" not in second.details


def test_changes_begin_together_and_each_has_its_end() -> None:
    audit = MemoryAudit()
    with recorded_change(audit, *CHANGES):
        assert [(one.tenant, one.outcome) for one in audit.events] == [("acme", "started"), ("globex", "started")]
    assert ends(audit) == [("acme", "done", 1, None), ("globex", "done", 2, None)]


@pytest.mark.parametrize(
    ("error", "reason"), [(ClusterError("no broker"), "no broker"), (SystemExit(1), "the process failed")]
)
def test_a_change_that_fails_says_why(error: BaseException, reason: str) -> None:
    audit = MemoryAudit()
    with pytest.raises(type(error)), recorded_change(audit, *CHANGES):
        raise error
    assert ends(audit) == [("acme", "failed", 1, reason), ("globex", "failed", 2, reason)]


def test_what_cannot_be_recorded_is_not_begun() -> None:
    audit = MemoryAudit()
    audit.is_away = True
    with pytest.raises(AuditError), recorded_change(audit, *CHANGES):
        raise AssertionError("begun")
    assert audit.events == []
