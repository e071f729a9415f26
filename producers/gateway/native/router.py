"""Router of the native API."""

from fastapi import APIRouter

from producers.gateway.native.deps import NativeDeps
from producers.gateway.native.event_routes import add_event_routes
from producers.gateway.native.history_routes import add_history_routes
from producers.gateway.native.lookup_routes import add_lookup_routes
from producers.gateway.native.sending_routes import add_sending_routes


def router(deps: NativeDeps) -> APIRouter:
    """All native routes, to be included by the application, which must turn GatewayErrors into answers and close
    ``deps.kept``."""
    made = APIRouter()
    for add in (add_sending_routes, add_history_routes, add_lookup_routes, add_event_routes):
        add(made, deps)
    return made
