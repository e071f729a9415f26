"""What an author of keys and users may give to others."""

import pytest

from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope
from fairlane_server.api_keys.key_store import Author, BeyondOwnRightsError
from fairlane_server.api_keys.permissions import OF_DEPLOYMENT, SCOPES, Permission, role_permissions

KEEPER = Author("key:1", SCOPES[Scope.IDENTITIES])
OPERATOR = role_permissions(DEPLOYMENT, Role.OPERATOR)


def may_give(author: Author, tenant: str, role: Role, scopes: tuple[Scope, ...] = (), *grants: Permission) -> bool:
    try:
        author.check_may_give(tenant, role, scopes, grants)
    except BeyondOwnRightsError:
        return False
    return True


def test_a_command_may_give_everything() -> None:
    assert may_give(Author(), DEPLOYMENT, Role.ADMIN, (), Permission.DEAD_LETTERS_PAYLOAD)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.TENANT])
def test_whoever_writes_keys_may_make_those_of_tenants(role: Role) -> None:
    assert may_give(KEEPER, "acme", role)


def test_nobody_gives_what_he_has_not() -> None:
    assert not may_give(KEEPER, DEPLOYMENT, Role.ADMIN)
    assert not may_give(KEEPER, DEPLOYMENT, Role.VIEWER)
    assert may_give(KEEPER, DEPLOYMENT, Role.ADMIN, (Scope.IDENTITIES,))
    assert not may_give(KEEPER, DEPLOYMENT, Role.ADMIN, (Scope.IDENTITIES, Scope.AUDIT))
    # Nothing is left of the role within this scope.
    assert may_give(KEEPER, DEPLOYMENT, Role.OPERATOR, (Scope.IDENTITIES,))
    assert may_give(Author("key:2", OPERATOR), DEPLOYMENT, Role.OPERATOR)
    assert not may_give(Author("key:2", OPERATOR), DEPLOYMENT, Role.OPERATOR, (), Permission.DEAD_LETTERS_PAYLOAD)
    assert may_give(Author("key:3", OF_DEPLOYMENT), DEPLOYMENT, Role.OPERATOR, (), Permission.DEAD_LETTERS_PAYLOAD)
