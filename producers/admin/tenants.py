"""Routes of tenants."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from fairlane.names import TENANT_PATTERN
from fairlane.outcomes import Code
from fairlane.records import TenantSpec
from fairlane_server.administration.tenants import TenantChange, Tenants, etag_of
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.control.tenants_file import API, tenant_document, tenant_of_json
from producers.admin.deps import EXAMPLE_KEY_ID, AdminDeps, Cursor, Limit, author_of
from producers.admin.file_bodies import file_body, parsed
from producers.admin.problems import CHANGING_TENANTS, READING, READING_ONE, answered_errors, not_found
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered
from producers.gateway.sending import body_of
from producers.openai_api.errors import GatewayError

_MOST_ETAG_CHARACTERS = 100


class TenantAnswer(ResponseBody):
    """A published tenant."""

    tenant: str
    managed_by: str | None = Field(None, description="`file` or `api`")
    etag: str = Field(description="For `If-Match`; also in the header `etag`")
    settings: dict[str, Any] | None = Field(None, description="As in tenants.yaml; left out if it cannot be read")


class RemovedTenantAnswer(ResponseBody):
    """A tenant that was withdrawn."""

    tenant: str
    removed: bool = True
    revoked_keys: tuple[str, ...] = Field(description="Ids of its keys, which are revoked")


Name = Annotated[str, Path(pattern=rf"^{TENANT_PATTERN.pattern}$", description="Name of the tenant", examples=["acme"])]
IfMatch = Annotated[
    str | None,
    Header(max_length=_MOST_ETAG_CHARACTERS, description="The `etag` that was read; needed for an existing tenant"),
]
Adopt = Annotated[bool, Query(description="Take over a tenant that the tenants file manages")]
Restore = Annotated[bool, Query(description="It is the customer of before, who gets back what is left under this name")]

_SPEC = TenantSpec("acme", weight=2.0, tokens_per_minute=120_000, managed_by=API)
_EXAMPLE = TenantAnswer(tenant="acme", managed_by=API, etag=etag_of(_SPEC), settings=tenant_document(_SPEC))
_REMOVED = RemovedTenantAnswer(tenant="acme", revoked_keys=(EXAMPLE_KEY_ID,))
_BODY = file_body(
    "The settings of the tenant, with the keys of an entry of tenants.yaml, or their defaults",
    "A share",
    {"weight": 2, "quotas": {"tokens_per_day": 9000}},
)
_cursors = Cursors(str)


def router(deps: AdminDeps, tenants: Tenants) -> APIRouter:
    """All routes of tenants."""
    api = APIRouter(tags=["tenants"])
    Reader = Annotated[Identity, deps.caller(Permission.TENANTS_READ)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.TENANTS_WRITE)]  # noqa: N806 - a type
    calls = deps.kafka_calls
    page = Page[TenantAnswer](data=(_EXAMPLE,), has_more=False)

    @api.get("/tenants", responses=answered(page, "A page") | READING)
    async def list_tenants(caller: Reader, limit: Limit = 50, cursor: Cursor = None) -> Response:
        """The published tenants, by name."""
        after = _cursors.decode(caller.tenant, cursor) or ""
        with answered_errors():
            published = await calls.run(tenants.read)
        found = sorted(name for name in published if name > after)
        return page_of(
            *(Page[TenantAnswer], found, limit),
            lambda name: _answer_of(name, published[name]),
            lambda last: _cursors.encode(caller.tenant, last),
        )

    @api.get("/tenants/{tenant}", responses=answered(_EXAMPLE, "The tenant") | READING_ONE)
    async def get_tenant(tenant: Name, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """One tenant with all its settings."""
        with answered_errors():
            published = await calls.run(tenants.read)
        if tenant not in published:
            raise not_found("there is no such tenant")
        return _answer(tenant, published[tenant])

    @api.put(
        "/tenants/{tenant}",
        responses=answered(_EXAMPLE, "The changed tenant")
        | answered(_EXAMPLE, "The new tenant", 201)
        | CHANGING_TENANTS,
        openapi_extra=_BODY,
    )
    async def set_tenant(
        request: Request,
        tenant: Name,
        caller: Writer,
        if_match: IfMatch = None,
        adopt: Adopt = False,
        restore: Restore = False,
    ) -> Response:
        """Create a tenant with its topics, or replace its settings. Every process knows it within seconds.

        A tenant that reads and writes Kafka itself also needs a user: `fairlane access apply`. A name under which
        something of a tenant is left gets 409, unless `restore` says that it is the same customer.
        """
        wanted = parsed(partial(tenant_of_json, tenant), await body_of(request))
        change = partial(tenants.set, wanted, _etag(if_match), author_of(caller), adopt=adopt, restore=restore)
        with answered_errors():
            made: TenantChange = await calls.run(change)
        return _answer(tenant, made.after, 201 if made.before is None else 200)

    @api.delete("/tenants/{tenant}", responses=answered(_REMOVED, "It is withdrawn") | CHANGING_TENANTS)
    async def remove_tenant(tenant: Name, caller: Writer, if_match: IfMatch = None) -> Response:
        """Withdraw a tenant that the API manages, revoke its keys, and refuse its tokens and sessions. Its Kafka users
        keep their rights until `fairlane access apply --delete`, its topics stay until `fairlane topics apply
        --delete`."""
        with answered_errors():
            revoked = await calls.run(partial(tenants.remove, tenant, _etag(if_match), author_of(caller)))
        return answer(RemovedTenantAnswer(tenant=tenant, revoked_keys=tuple(key.key_id for key in revoked)))

    return api


def _etag(if_match: str | None) -> str | None:
    """The tag without its quotation marks. Raises GatewayError: 400."""
    if if_match is None:
        return None
    if len(if_match) < 2 or not (if_match[0] == if_match[-1] == '"'):
        raise GatewayError(400, Code.INVALID, 'must be one tag in quotation marks: "..."', field="if-match")
    return if_match[1:-1]


def _answer_of(tenant: str, spec: TenantSpec | None) -> TenantAnswer:
    if spec is None:
        return TenantAnswer(tenant=tenant, etag=etag_of(spec))
    return TenantAnswer(tenant=tenant, managed_by=spec.managed_by, etag=etag_of(spec), settings=tenant_document(spec))


def _answer(tenant: str, spec: TenantSpec | None, status: int = 200) -> Response:
    return answer(_answer_of(tenant, spec), status, {"etag": f'"{etag_of(spec)}"'})
