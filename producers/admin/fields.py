"""Fields of request bodies that JSON has as text: names of an enumeration, and times."""

from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Annotated

from pydantic import AwareDatetime, BeforeValidator

from fairlane_server.api_keys.api_key import Role, Scope
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.dead_letters.bulk import DeadLetters


def _member(kind: type[StrEnum], value: object) -> object:
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"must be one of {', '.join(kind)}") from None
    return value


def _time(value: object) -> object:
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("must be a time, such as 2026-01-31T12:00:00Z") from None
    return value


RoleField = Annotated[Role, BeforeValidator(partial(_member, Role))]
ScopeField = Annotated[Scope, BeforeValidator(partial(_member, Scope))]
PermissionField = Annotated[Permission, BeforeValidator(partial(_member, Permission))]
TopicField = Annotated[DeadLetters, BeforeValidator(partial(_member, DeadLetters))]
TimeField = Annotated[AwareDatetime, BeforeValidator(_time)]
