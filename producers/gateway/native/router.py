"""All native routes."""

from fastapi import APIRouter

from producers.gateway.native.deps import NativeDeps
from producers.gateway.native.event_routes import add_event_routes
from producers.gateway.native.history_routes import add_history_routes
from producers.gateway.native.lookup_routes import add_lookup_routes
from producers.gateway.native.sending_routes import add_sending_routes


def router(deps: NativeDeps) -> APIRouter:
    """To be included by the application, or its routes taken over as they are. It turns a GatewayError into an answer,
    and closes ``deps.kept``."""
    made = APIRouter()
    for add in (add_sending_routes, add_history_routes, add_lookup_routes, add_event_routes):
        add(made, deps)
    return made
