"""Bodies of the admin API: what they take, and the field that an error names."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from fairlane_server.api_keys.api_key import Role, Scope
from fairlane_server.dead_letters.bulk import DeadLetters
from producers.admin.dead_letters import PurgeBody, ReplayBody
from producers.admin.identities import NewKeyBody, RotateBody, UserBody
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError


def read(model: type[BaseModel], **fields: Any) -> Any:
    return parse(model, json.dumps(fields).encode())


def test_names_and_times_are_text_in_json() -> None:
    key = read(NewKeyBody, tenant="_deployment", name="n", role="operator", scopes=["loads", "audit"])
    assert (key.role, key.scopes) == (Role.OPERATOR, [Scope.LOADS, Scope.AUDIT])
    assert read(UserBody, tenant="_deployment", subject="u", role="viewer", grants=["dead_letters:payload"]).grants
    replay = read(ReplayBody, dry_run=False, topic="work", since="2026-01-31T12:00:00Z")
    assert (replay.topic, replay.since.timestamp()) == (DeadLetters.WORK, 1_769_860_800)
    assert read(PurgeBody, dry_run=True, topic="requests", until="2026-01-31T13:00:00+01:00").until == replay.since
    assert read(RotateBody).overlap_ms == 0


@pytest.mark.parametrize(
    ("model", "fields", "field"),
    [
        (NewKeyBody, {"name": "n"}, "tenant"),
        (NewKeyBody, {"tenant": "Acme", "name": "n"}, "tenant"),
        (NewKeyBody, {"tenant": "acme", "name": ""}, "name"),
        (NewKeyBody, {"tenant": "acme", "name": "n", "role": "root"}, "role"),
        (NewKeyBody, {"tenant": "acme", "name": "n", "role": 7}, "role"),
        (NewKeyBody, {"tenant": "acme", "name": "n", "scopes": ["files", "all"]}, "scopes[1]"),
        (NewKeyBody, {"tenant": "acme", "name": "n", "expires_in_ms": "1"}, "expires_in_ms"),
        (NewKeyBody, {"tenant": "acme", "name": "n", "secret": "mine"}, "secret"),
        (UserBody, {"tenant": "acme", "subject": "u", "role": "viewer", "disabled": "yes"}, "disabled"),
        (UserBody, {"tenant": "acme", "subject": "u", "role": "viewer", "grants": ["everything"]}, "grants[0]"),
        (UserBody, {"tenant": "acme", "subject": "", "role": "viewer"}, "subject"),
        (UserBody, {"tenant": "*", "subject": "u", "role": "viewer"}, "tenant"),
        (RotateBody, {"overlap_ms": -1}, "overlap_ms"),
        (ReplayBody, {"all": True}, "dry_run"),
        (ReplayBody, {"dry_run": True, "since": "yesterday"}, "since"),
        (ReplayBody, {"dry_run": True, "since": "2026-01-31T12:00:00"}, "since"),
        (ReplayBody, {"dry_run": True, "limit": 501}, "limit"),
        (ReplayBody, {"dry_run": True, "tenant": "a\u0000"}, "tenant"),
        (PurgeBody, {"dry_run": True, "topic": "replies"}, "topic"),
        (PurgeBody, {"dry_run": True, "topic": "work", "last_offset": 2**63}, "last_offset"),
    ],
)
def test_the_field_at_fault_is_named(model: type[BaseModel], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(GatewayError) as wrong:
        read(model, **fields)
    assert (wrong.value.status, wrong.value.field) == (400, field)
