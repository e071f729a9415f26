"""Routes of API keys and users."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fairlane_server.api_keys.api_key import Role, Scope
from fairlane_server.api_keys.key_store import (
    MOST_NAME_CHARACTERS,
    MOST_SUBJECT_CHARACTERS,
    IssuedKey,
)
from fairlane_server.api_keys.permissions import Permission
from producers.admin.deps import (
    AT_MS,
    EXAMPLE_KEY_ID,
    OWNER_PATTERN,
    AdminDeps,
    Cursor,
    Limit,
    Owner,
    author_of,
)
from producers.admin.fields import PermissionField, RoleField, ScopeField
from producers.admin.problems import CHANGING, READING, answered_errors
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered, taking
from producers.gateway.sending import body_of
from producers.openai_api.body import parse

_LONGEST_MS = 3_660 * 86_400_000
_DAY_MS = 86_400_000


class NewKeyBody(BaseModel):
    """A key to create."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(pattern=OWNER_PATTERN, description="Its owner; `_deployment`: no tenant")
    name: str = Field(min_length=1, max_length=MOST_NAME_CHARACTERS, description="What it is for")
    role: RoleField = Role.TENANT
    scopes: list[ScopeField] = Field([], max_length=len(Scope))
    grants: list[PermissionField] = Field([], max_length=len(Permission))
    user: str | None = Field(None, min_length=1, max_length=MOST_SUBJECT_CHARACTERS, description="Whom it is for")
    expires_in_ms: int | None = Field(None, ge=1, le=_LONGEST_MS, description="How long it lives; null: for ever")


class RotateBody(BaseModel):
    """How to rotate a key."""

    model_config = ConfigDict(extra="forbid")

    overlap_ms: int = Field(0, ge=0, le=_LONGEST_MS, description="How long the old key still passes")
    expires_in_ms: int | None = Field(
        None, ge=1, le=_LONGEST_MS, description="How long the new key lives; null: as the old one"
    )


class UserBody(BaseModel):
    """A user's role and state, instead of what tokens say."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(pattern=OWNER_PATTERN, description="Its tenant; `_deployment`: none")
    subject: str = Field(min_length=1, max_length=MOST_SUBJECT_CHARACTERS, description="`sub` of its tokens")
    role: RoleField
    disabled: bool = Field(False, description="Refuse the user's tokens and keys")
    grants: list[PermissionField] = Field([], max_length=len(Permission))


class KeyAnswer(ResponseBody):
    """A key, without its secret, which is not stored."""

    key_id: str
    tenant: str
    name: str
    role: Role
    scopes: tuple[Scope, ...]
    grants: tuple[Permission, ...] = ()
    user: str | None = None
    rotated_from: str | None = None
    created_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None
    last_used_at_ms: int | None = None


class IssuedKeyAnswer(ResponseBody):
    """A new key. `api_key` is shown this once."""

    key: KeyAnswer
    api_key: str


class UserAnswer(ResponseBody):
    """A user that has an entry."""

    tenant: str
    subject: str
    role: Role
    disabled: bool
    grants: tuple[Permission, ...] = ()


KeyId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="Id of the key", examples=[EXAMPLE_KEY_ID])]
Ended = Annotated[bool, Query(description="Also those that were revoked or have expired")]

_KEY = KeyAnswer(
    key_id=EXAMPLE_KEY_ID,
    tenant="acme",
    name="nightly report",
    role=Role.TENANT,
    scopes=(Scope.INFERENCE,),
    created_at_ms=AT_MS,
    expires_at_ms=AT_MS + 90 * _DAY_MS,
)
_ISSUED = IssuedKeyAnswer(key=_KEY, api_key=f"fl_{EXAMPLE_KEY_ID}_" + "x" * 43)
_USER = UserAnswer(tenant="acme", subject="u-17", role=Role.VIEWER, disabled=False)
_key_cursors = Cursors(str)
_user_cursors = Cursors(tuple[str, str])


def router(deps: AdminDeps) -> APIRouter:
    """All routes of keys and users."""
    made = APIRouter(tags=["keys and users"])
    _add_keys(made, deps)
    _add_users(made, deps)
    return made


def _add_keys(api: APIRouter, deps: AdminDeps) -> None:
    stores = deps.stores
    Reader = Annotated[Identity, deps.caller(Permission.KEYS_READ)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.KEYS_WRITE)]  # noqa: N806 - a type
    page = Page[KeyAnswer](data=(_KEY,), has_more=False)

    @api.get("/keys", responses=answered(page, "A page") | READING)
    async def list_keys(
        caller: Reader, tenant: Owner = None, ended: Ended = False, limit: Limit = 50, cursor: Cursor = None
    ) -> Response:
        """Keys by owner, the oldest first."""
        query = (caller.tenant, tenant, ended)
        after = _key_cursors.decode(query, cursor)
        with answered_errors():
            found = await stores.calls.run(partial(stores.keys.list, tenant, ended=ended, most=limit + 1, after=after))
        return page_of(
            *(Page[KeyAnswer], found, limit, KeyAnswer.model_validate),
            lambda last: _key_cursors.encode(query, last.key_id),
        )

    @api.post(
        "/keys",
        status_code=201,
        responses=answered(_ISSUED, "The key", 201) | CHANGING,
        openapi_extra=taking(
            NewKeyBody,
            {
                "For a tenant": {"tenant": "acme", "name": "nightly report", "scopes": ["inference"]},
                "For an operator": {"tenant": "_deployment", "name": "on call", "role": "operator"},
            },
            has_key=False,
        ),
    )
    async def create_key(request: Request, caller: Writer) -> Response:
        """Create a key. It is shown this once: only a hash of it is kept."""
        body = parse(NewKeyBody, await body_of(request))
        create = partial(
            stores.keys.create,
            *(body.tenant, body.name, body.role, body.scopes),
            grants=body.grants,
            user=body.user,
            expires_in_ms=body.expires_in_ms,
            author=author_of(caller),
        )
        with answered_errors():
            return answer(_issued_answer(await stores.calls.run(create)), 201)

    @api.post(
        "/keys/{key_id}/rotate",
        status_code=201,
        responses=answered(_ISSUED, "The new key", 201) | CHANGING,
        openapi_extra=taking(RotateBody, {"With an overlap": {"overlap_ms": _DAY_MS}}, has_key=False),
    )
    async def rotate_key(request: Request, key_id: KeyId, caller: Writer) -> Response:
        """Create a key that may do what this one may, and end this one after the overlap."""
        body = parse(RotateBody, await body_of(request))
        rotate = partial(stores.keys.rotate, key_id, body.overlap_ms, body.expires_in_ms, author=author_of(caller))
        with answered_errors():
            return answer(_issued_answer(await stores.calls.run(rotate)), 201)

    @api.delete("/keys/{key_id}", responses=answered(_KEY, "The revoked key") | CHANGING)
    async def revoke_key(key_id: KeyId, caller: Writer) -> Response:
        """Revoke a key; every gateway refuses it within about a second. May be repeated."""
        with answered_errors():
            revoked = await stores.calls.run(partial(stores.keys.revoke, key_id, author=author_of(caller)))
        return answer(KeyAnswer.model_validate(revoked))


def _add_users(api: APIRouter, deps: AdminDeps) -> None:
    stores = deps.stores
    Reader = Annotated[Identity, deps.caller(Permission.USERS_READ)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.USERS_WRITE)]  # noqa: N806 - a type
    page = Page[UserAnswer](data=(_USER,), has_more=False)

    @api.get("/users", responses=answered(page, "A page") | READING)
    async def list_users(caller: Reader, tenant: Owner = None, limit: Limit = 50, cursor: Cursor = None) -> Response:
        """Users that have an entry, by owner and name. Others have the permissions of their tokens."""
        query = (caller.tenant, tenant)
        after = _user_cursors.decode(query, cursor)
        with answered_errors():
            found = await stores.calls.run(partial(stores.keys.users, tenant, limit + 1, after))
        return page_of(
            *(Page[UserAnswer], found, limit, UserAnswer.model_validate),
            lambda last: _user_cursors.encode(query, (last.tenant, last.subject)),
        )

    @api.put(
        "/users",
        responses=answered(_USER, "The user") | CHANGING,
        openapi_extra=taking(
            UserBody,
            {
                "Read only": {"tenant": "acme", "subject": "u-17", "role": "viewer"},
                "Locked out": {"tenant": "acme", "subject": "u-17", "role": "viewer", "disabled": True},
            },
            has_key=False,
        ),
    )
    async def set_user(request: Request, caller: Writer) -> Response:
        """Set a user's role, grants and state. With `disabled` its tokens and keys are refused at once."""
        body = parse(UserBody, await body_of(request))
        change = partial(
            stores.keys.set_user,
            *(body.tenant, body.subject, body.role),
            disabled=body.disabled,
            grants=body.grants,
            author=author_of(caller),
        )
        with answered_errors():
            return answer(UserAnswer.model_validate(await stores.calls.run(change)))


def _issued_answer(issued: IssuedKey) -> IssuedKeyAnswer:
    return IssuedKeyAnswer(key=KeyAnswer.model_validate(issued.key), api_key=issued.text)
