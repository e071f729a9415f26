"""Permissions of identities: one table from roles and scopes of keys. Pure.

docs/identity.md shows the table; a test compares the two, and another one calls every route as every role.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope


class Permission(StrEnum):
    """What a route needs. The first group is about the caller's own tenant, the second about the whole deployment."""

    REQUESTS_SEND = "requests:send"
    REQUESTS_READ = "requests:read"
    FEEDBACK_GIVE = "feedback:give"
    USAGE_READ = "usage:read"
    MODELS_READ = "models:read"
    FILES_READ = "files:read"
    FILES_WRITE = "files:write"
    BATCHES_READ = "batches:read"
    BATCHES_WRITE = "batches:write"
    DOCUMENTS_READ = "documents:read"
    DOCUMENTS_WRITE = "documents:write"
    CONVERSATIONS_READ = "conversations:read"
    CONVERSATIONS_ERASE = "conversations:erase"

    LOADS_READ = "loads:read"
    REGISTRY_READ = "registry:read"
    REGISTRY_WRITE = "registry:write"
    ROLLOUTS_STEER = "rollouts:steer"
    TENANTS_READ = "tenants:read"
    TENANTS_WRITE = "tenants:write"
    DEAD_LETTERS_READ = "dead_letters:read"
    DEAD_LETTERS_REPLAY = "dead_letters:replay"
    DEAD_LETTERS_PAYLOAD = "dead_letters:payload"
    DEAD_LETTERS_PURGE = "dead_letters:purge"
    KEYS_READ = "keys:read"
    KEYS_WRITE = "keys:write"
    USERS_READ = "users:read"
    USERS_WRITE = "users:write"
    AUDIT_READ = "audit:read"
    EVALUATIONS_READ = "evaluations:read"
    EVALUATIONS_WRITE = "evaluations:write"
    LABELS_READ = "labels:read"
    LABELS_JUDGE = "labels:judge"


MEANINGS: Mapping[Permission, str] = {
    Permission.REQUESTS_SEND: "send requests, cancel them",
    Permission.REQUESTS_READ: "read requests, results, events and history",
    Permission.FEEDBACK_GIVE: "rate, correct and flag outputs",
    Permission.USAGE_READ: "read usage, costs and budgets",
    Permission.MODELS_READ: "list the models that the tenant may use",
    Permission.FILES_READ: "list and download files",
    Permission.FILES_WRITE: "upload and delete files",
    Permission.BATCHES_READ: "read batches",
    Permission.BATCHES_WRITE: "start and cancel batches",
    Permission.DOCUMENTS_READ: "list collections and documents",
    Permission.DOCUMENTS_WRITE: "create and delete collections, upload and delete documents",
    Permission.CONVERSATIONS_READ: "read and export conversations",
    Permission.CONVERSATIONS_ERASE: "erase conversations",
    Permission.LOADS_READ: "read queues, loads and drift of all tenants and pools",
    Permission.REGISTRY_READ: "read models, their routes, rollouts, shadows and replays",
    Permission.REGISTRY_WRITE: "register versions, move aliases, set rules, start rollouts, shadows and replays",
    Permission.ROLLOUTS_STEER: "approve, pause, end and roll back rollouts, steer replays, stop versions and shadows",
    Permission.TENANTS_READ: "read the settings of tenants",
    Permission.TENANTS_WRITE: "create, change and remove tenants",
    Permission.DEAD_LETTERS_READ: "list and inspect dead letters without payload",
    Permission.DEAD_LETTERS_REPLAY: "replay dead letters",
    Permission.DEAD_LETTERS_PAYLOAD: "read what a tenant wrote in a dead letter",
    Permission.DEAD_LETTERS_PURGE: "delete dead letters",
    Permission.KEYS_READ: "list keys",
    Permission.KEYS_WRITE: "create, rotate and revoke keys",
    Permission.USERS_READ: "list users",
    Permission.USERS_WRITE: "set roles, grants and state of users",
    Permission.AUDIT_READ: "read who changed what",
    Permission.EVALUATIONS_READ: "read evaluation runs and what sets there are, without texts",
    Permission.EVALUATIONS_WRITE: "upload, download and remove evaluation sets, set schedules",
    Permission.LABELS_READ: "read how many outputs are judged, and how reviewers agree",
    Permission.LABELS_JUDGE: "read and judge outputs of tenants that allow it, export what was agreed",
}

EVERYTHING = frozenset(Permission)
OF_TENANTS = frozenset(
    {
        *(Permission.REQUESTS_SEND, Permission.REQUESTS_READ, Permission.FEEDBACK_GIVE),
        *(Permission.USAGE_READ, Permission.MODELS_READ),
        *(Permission.FILES_READ, Permission.FILES_WRITE, Permission.BATCHES_READ, Permission.BATCHES_WRITE),
        *(Permission.DOCUMENTS_READ, Permission.DOCUMENTS_WRITE),
        *(Permission.CONVERSATIONS_READ, Permission.CONVERSATIONS_ERASE),
    }
)
"""Permissions about one's own tenant."""
OF_DEPLOYMENT = EVERYTHING - OF_TENANTS
"""Permissions about all tenants. No identity of a tenant has one of them, whatever its role says."""

GRANTABLE = frozenset({Permission.DEAD_LETTERS_PAYLOAD, Permission.LABELS_JUDGE})
"""Permissions that an identity of the deployment may have besides those of its role."""

_READS = OF_TENANTS - {
    *(Permission.REQUESTS_SEND, Permission.FEEDBACK_GIVE, Permission.FILES_WRITE, Permission.BATCHES_WRITE),
    *(Permission.DOCUMENTS_WRITE, Permission.CONVERSATIONS_ERASE),
}
_WATCHES = frozenset(
    {
        *(Permission.LOADS_READ, Permission.REGISTRY_READ, Permission.TENANTS_READ),
        *(Permission.DEAD_LETTERS_READ, Permission.EVALUATIONS_READ, Permission.LABELS_READ),
    }
)

TENANT_ROLES: Mapping[Role, frozenset[Permission]] = {
    Role.VIEWER: _READS,
    Role.TENANT: OF_TENANTS,
    # Of keys, users and tokens from before roles of the deployment existed; no new ones are made.
    Role.OPERATOR: _READS,
    Role.ADMIN: OF_TENANTS,
}
"""Permissions of an identity that belongs to a tenant, all about this tenant."""

DEPLOYMENT_ROLES: Mapping[Role, frozenset[Permission]] = {
    Role.VIEWER: _WATCHES,
    Role.OPERATOR: _WATCHES | {Permission.DEAD_LETTERS_REPLAY, Permission.ROLLOUTS_STEER},
    Role.ADMIN: OF_DEPLOYMENT,
}
"""Permissions of an identity that belongs to the deployment. It has none for requests of any tenant."""

SCOPES: Mapping[Scope, frozenset[Permission]] = {
    Scope.INFERENCE: frozenset({Permission.REQUESTS_SEND, Permission.FEEDBACK_GIVE}),
    Scope.RESULTS: frozenset(
        {
            *(Permission.REQUESTS_READ, Permission.USAGE_READ),
            *(Permission.CONVERSATIONS_READ, Permission.CONVERSATIONS_ERASE),
        }
    ),
    Scope.FILES: frozenset(
        {
            *(Permission.FILES_READ, Permission.FILES_WRITE),
            *(Permission.DOCUMENTS_READ, Permission.DOCUMENTS_WRITE),
        }
    ),
    Scope.BATCHES: frozenset({Permission.BATCHES_READ, Permission.BATCHES_WRITE}),
    Scope.LOADS: frozenset({Permission.LOADS_READ, Permission.REGISTRY_READ}),
    Scope.MODELS: frozenset({Permission.REGISTRY_WRITE, Permission.ROLLOUTS_STEER}),
    Scope.TENANTS: frozenset({Permission.TENANTS_READ, Permission.TENANTS_WRITE}),
    Scope.DEAD_LETTERS: frozenset(one for one in Permission if one.startswith("dead_letters:")),
    Scope.IDENTITIES: frozenset(
        {Permission.KEYS_READ, Permission.KEYS_WRITE, Permission.USERS_READ, Permission.USERS_WRITE}
    ),
    Scope.AUDIT: frozenset({Permission.AUDIT_READ}),
    Scope.EVALUATIONS: frozenset({Permission.EVALUATIONS_READ, Permission.EVALUATIONS_WRITE}),
    Scope.LABELS: frozenset({Permission.LABELS_READ, Permission.LABELS_JUDGE}),
}
"""What a key with this scope is restricted to."""
OF_EVERY_SCOPE = frozenset({Permission.MODELS_READ})
"""No scope takes these away."""


def role_permissions(tenant: str, role: Role, grants: Collection[Permission] = frozenset()) -> frozenset[Permission]:
    """The permissions of a role, with those granted besides."""
    if tenant != DEPLOYMENT:
        return TENANT_ROLES[role]
    return DEPLOYMENT_ROLES.get(role, frozenset()) | GRANTABLE.intersection(grants)


def scope_permissions(scopes: Collection[Scope]) -> frozenset[Permission]:
    """The permissions that a key with these scopes is restricted to; all if it has none."""
    return OF_EVERY_SCOPE.union(*(SCOPES[scope] for scope in scopes)) if scopes else EVERYTHING


def refused_role(tenant: str, role: Role) -> str | None:
    """Why no new key or user may have this role there; None if it may."""
    known = DEPLOYMENT_ROLES if tenant == DEPLOYMENT else (Role.VIEWER, Role.TENANT)
    if role in known:
        return None
    whose = "the deployment" if tenant == DEPLOYMENT else "a tenant"
    return f"the roles of {whose} are {', '.join(known)}, not {role}"


def refused_scopes(tenant: str, scopes: Collection[Scope]) -> str | None:
    """Why no new key may have these scopes there; None if it may."""
    wanted = OF_DEPLOYMENT if tenant == DEPLOYMENT else OF_TENANTS
    whose = "the deployment" if tenant == DEPLOYMENT else "a tenant"
    for scope in scopes:
        if not SCOPES[scope] <= wanted:
            known = ", ".join(one for one in Scope if SCOPES[one] <= wanted)
            return f"the scopes of {whose} are {known}, not {scope}"
    return None


def refused_grants(tenant: str, grants: Collection[Permission]) -> str | None:
    """Why no key or user may have these grants there; None if it may."""
    if grants and tenant != DEPLOYMENT:
        return "only identities of the deployment have grants"
    for grant in grants:
        if grant not in GRANTABLE:
            return f"{grant} belongs to roles; {', '.join(sorted(GRANTABLE))} can be granted"
    return None
