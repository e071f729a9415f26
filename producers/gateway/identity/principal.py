"""Who asks, and what that one may do."""

from dataclasses import dataclass

from fairlane_server.api_keys.roles import Role, Scope

__all__ = ["Identity", "Role", "Scope"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller.

    Attributes:
        tenant: whose topics, documents and results it reaches.
        subject: who it is in logs and audits: the id of a key, or the subject of a token. Never a secret.
        role: the strongest of its roles.
        scopes: of a key; empty is all.
        user: the person behind it: of a token its subject, of a key whom it was made for, if anybody.
    """

    tenant: str
    subject: str
    role: Role
    scopes: frozenset[Scope] = frozenset()
    user: str | None = None

    def may(self, scope: Scope) -> bool:
        """Whether it may use what this scope stands for."""
        return not self.scopes or scope in self.scopes

    @property
    def may_write(self) -> bool:
        """Whether it may send work and cancel it."""
        return self.role in (Role.ADMIN, Role.TENANT)
