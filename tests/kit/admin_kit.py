"""The admin API as it is assembled, with stores that are unavailable."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn
from unittest.mock import patch

from fairlane.settings import Settings
from fairlane_server.kafka.cluster_admin import ClusterError
from producers.admin.app import AdminApi
from producers.gateway.identity.authentication import Authenticator
from tests.kit.permission_matrix import ScriptedAuthenticator

_STORES = (
    *("ApiKeys", "AdminAudit", "Tenants", "DeadLetterOffice", "ModelRoutes", "Observer", "RolloutController"),
    *("LogReplayOffice", "LogReplayRunner", "DriftFindings", "TenantEvaluations", "TenantLabels"),
)


class Away:
    """A store that is unavailable, and notes what was asked."""

    def __init__(self, *_parts: object) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def fail(*_arguments: object, **named: object) -> NoReturn:
            self.asked.append((name, named))
            raise ClusterError("away")

        return fail


class _Authentication:
    def __init__(self, authenticator: Authenticator | ScriptedAuthenticator) -> None:
        self.authenticator = authenticator


def admin_api(
    settings: Settings,
    authenticator: Authenticator | ScriptedAuthenticator | None = None,
    keys: Away | None = None,
) -> AdminApi:
    """The application; with its own authentication unless one is given. ``keys`` notes what is asked of the keys."""
    with ExitStack() as patched:
        if authenticator is not None:
            made = _Authentication(authenticator)
            patched.enter_context(patch("producers.admin.app.authentication", lambda *_parts, **_more: made))
        for store in _STORES:
            patched.enter_context(patch(f"producers.admin.app.{store}", Away))
        if keys is not None:
            patched.enter_context(patch("producers.admin.app.ApiKeys", lambda *_parts: keys))
        return AdminApi(settings)
