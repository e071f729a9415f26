from fairlane.records import TenantSpec
from fairlane_server.control.publisher import Publication, compare


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
