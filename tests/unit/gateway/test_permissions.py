"""Who may call which route: the table of permissions against the routes of the gateway as it is assembled."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fastapi import FastAPI

from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope
from fairlane_server.api_keys.permissions import (
    DEPLOYMENT_ROLES,
    GRANTABLE,
    MEANINGS,
    OF_DEPLOYMENT,
    OF_EVERY_SCOPE,
    OF_TENANTS,
    SCOPES,
    TENANT_ROLES,
    Permission,
    refused_grants,
    refused_role,
    refused_scopes,
    role_permissions,
)
from producers.gateway.app import Gateway
from tests.kit.permission_matrix import ScriptedAuthenticator, deviations, routes_of, undeclared


@pytest.fixture(scope="module")
def app() -> FastAPI:
    with patch(
        "producers.gateway.app.authentication",
        lambda *_parts: SimpleNamespace(authenticator=ScriptedAuthenticator(), users=None, sessions=None),
    ):
        return Gateway(Settings(redis_url=None, postgres_dsn="postgresql://nobody@127.0.0.1:1/none")).app


def test_every_route_declares_one_permission(app: FastAPI) -> None:
    assert undeclared(app) == []
    declared = {permission for route in routes_of(app) for permission in route.permissions}
    assert declared == OF_TENANTS


def test_every_route_lets_in_whom_the_table_names_and_nobody_else(app: FastAPI) -> None:
    calls, wrong = deviations(app)
    assert wrong == []
    assert calls > 500


def test_a_route_without_a_permission_is_found() -> None:
    app = FastAPI()
    app.get("/v1/forgotten")(lambda: None)
    assert undeclared(app) == ["/v1/forgotten"]


def test_no_identity_of_a_tenant_has_a_permission_about_others() -> None:
    for role in Role:
        assert not role_permissions("acme", role, frozenset(Permission)) & OF_DEPLOYMENT


def test_no_identity_of_the_deployment_acts_for_a_tenant() -> None:
    for role in Role:
        assert not role_permissions(DEPLOYMENT, role, frozenset(Permission)) & OF_TENANTS


def test_the_table_names_every_permission_role_and_scope() -> None:
    assert MEANINGS.keys() == {*Permission}
    assert TENANT_ROLES.keys() == {*Role}
    assert DEPLOYMENT_ROLES.keys() == {*Role} - {Role.TENANT}
    assert SCOPES.keys() == {*Scope}
    scoped = [permission for scope in Scope for permission in SCOPES[scope]]
    assert len(scoped) == len({*scoped})
    assert {*scoped} | OF_EVERY_SCOPE == {*Permission}


@pytest.mark.parametrize("wanted", sorted(GRANTABLE))
def test_what_tenants_wrote_needs_a_grant_unless_the_role_is_admin(wanted: Permission) -> None:
    assert {Permission.DEAD_LETTERS_PAYLOAD, Permission.LABELS_JUDGE} == GRANTABLE
    for role in DEPLOYMENT_ROLES:
        assert (wanted in role_permissions(DEPLOYMENT, role)) is (role is Role.ADMIN)
        assert wanted in role_permissions(DEPLOYMENT, role, {wanted})


def test_new_keys_have_roles_scopes_and_grants_of_their_owner() -> None:
    assert {role for role in Role if refused_role("acme", role) is None} == {Role.VIEWER, Role.TENANT}
    assert {role for role in Role if refused_role(DEPLOYMENT, role) is None} == {*DEPLOYMENT_ROLES}
    of_tenants = {Scope.INFERENCE, Scope.RESULTS, Scope.FILES, Scope.BATCHES}
    assert {scope for scope in Scope if refused_scopes("acme", [scope]) is None} == of_tenants
    assert {scope for scope in Scope if refused_scopes(DEPLOYMENT, [scope]) is None} == {*Scope} - of_tenants
    assert refused_grants("acme", GRANTABLE) is not None
    assert refused_grants(DEPLOYMENT, [Permission.DEAD_LETTERS_PURGE]) is not None
    assert refused_grants(DEPLOYMENT, GRANTABLE) is None
