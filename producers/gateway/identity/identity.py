"""The authenticated caller and its permissions."""

from dataclasses import dataclass

from fairlane_server.api_keys.roles import Role, Scope

__all__ = ["Identity", "Role", "Scope"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One authenticated caller.

    Attributes:
        tenant: owner of the topics, documents and results that it can access.
        subject: its name in logs and audits: the id of a key, or the subject of a token. Never a secret.
        role: the strongest of its roles.
        scopes: scopes of a key; empty means all.
        user: the subject of a token, or the user that a key was made for, if any.
    """

    tenant: str
    subject: str
    role: Role
    scopes: frozenset[Scope] = frozenset()
    user: str | None = None

    def may(self, scope: Scope) -> bool:
        """Whether it has this scope."""
        return not self.scopes or scope in self.scopes

    @property
    def may_write(self) -> bool:
        """Whether it may send and cancel requests."""
        return self.role in (Role.ADMIN, Role.TENANT)
