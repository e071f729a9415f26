from pathlib import Path
from types import SimpleNamespace

import pytest

from fairlane.records import TenantSpec
from fairlane_server.cli import control
from fairlane_server.control.publisher import Publication, compare
from fairlane_server.control.tenants_file import API
from fairlane_server.kafka.open_kafka import OpenKafkaError
from tests.kit.deployment import write_tenants


def test_only_what_changed_is_published() -> None:
    wanted = {name: TenantSpec(name) for name in ("same", "changed", "new", "unreadable")}
    published = {
        "same": TenantSpec("same"),
        "changed": TenantSpec("changed", weight=2.0),
        "unreadable": None,
        "gone": TenantSpec("gone"),
        "also-gone": None,
    }
    assert compare(wanted, published) == Publication(
        changed={name: TenantSpec(name) for name in ("changed", "new", "unreadable")},
        unchanged=("same",),
        unknown=("also-gone", "gone"),
    )


@pytest.mark.parametrize(
    ("other", "delete", "is_refused"),
    [
        (TenantSpec("hooli", managed_by=API), False, True),
        # Stays, whatever the file says.
        (TenantSpec("hooli", managed_by=API), True, True),
        # One that cannot be read.
        (None, False, True),
        (TenantSpec("hooli"), False, True),
        # Is withdrawn.
        (TenantSpec("hooli"), True, False),
    ],
)
def test_the_tenants_that_are_published_count_on_a_kafka_that_asks_for_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: TenantSpec | None, delete: bool, is_refused: bool
) -> None:
    write_tenants(tmp_path / "tenants.yaml", [TenantSpec("acme")])
    topic = SimpleNamespace(read_if_there=lambda: {"hooli": other})
    monkeypatch.setattr(control, "tenant_topic", lambda *_: topic)
    applied: list[object] = []
    monkeypatch.setattr(control, "apply_records", lambda *given, **_: applied.append(given))
    monkeypatch.setenv("KAFKA_SECURITY_PROTOCOL", "PLAINTEXT")
    monkeypatch.delenv("ALLOW_OPEN_KAFKA", raising=False)
    if is_refused:
        with pytest.raises(OpenKafkaError, match="2 tenants"):
            control.apply_tenants(tenants_file=tmp_path / "tenants.yaml", delete=delete)
        assert applied == []
    else:
        control.apply_tenants(tenants_file=tmp_path / "tenants.yaml", delete=delete)
        assert len(applied) == 1
