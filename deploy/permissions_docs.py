"""Writes the table of permissions in docs/identity.md: ``python -m deploy.permissions_docs``."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fairlane_server.api_keys.api_key import Role
from fairlane_server.api_keys.permissions import (
    DEPLOYMENT_ROLES,
    GRANTABLE,
    MEANINGS,
    OF_DEPLOYMENT,
    OF_TENANTS,
    SCOPES,
    TENANT_ROLES,
    Permission,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "identity.md"
_BEGIN, _END = "<!-- permissions: python -m deploy.permissions_docs -->", "<!-- end of permissions -->"


def tables() -> str:
    """One table for identities of tenants, and one for those of the deployment."""
    of_tenants = {role: TENANT_ROLES[role] for role in (Role.VIEWER, Role.TENANT)}
    return "\n\n".join(
        (
            "Of a tenant, for this tenant:",
            _table(of_tenants, OF_TENANTS),
            "Of the deployment, for all tenants:",
            _table(DEPLOYMENT_ROLES, OF_DEPLOYMENT),
        )
    )


def page(text: str) -> str:
    """The page with its tables up to date."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n\n{tables()}\n\n{_END}{tail}"


def _table(roles: Mapping[Role, frozenset[Permission]], permissions: Iterable[Permission]) -> str:
    rows = [("permission", "to", *(f"`{role}`" for role in roles), "scope"), ("---",) * (len(roles) + 3)]
    wanted = {*permissions}
    for permission in Permission:
        if permission in wanted:
            scope = next((f"`{scope}`" for scope, given in SCOPES.items() if permission in given), "any")
            marks = (_mark(permission, given) for given in roles.values())
            rows.append((f"`{permission}`", MEANINGS[permission], *marks, scope))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _mark(permission: Permission, given: frozenset[Permission]) -> str:
    if permission in given:
        return "yes"
    return "if granted" if permission in GRANTABLE else ""


def main() -> int:
    """Rewrite the page. Returns the exit status."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
