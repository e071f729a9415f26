"""Structured logs: an event name and fields. Prompts, keys and tokens are never logged."""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from fairlane.settings import Settings

_SECRET_KEYS = re.compile(r"password|secret|token$|api_key|authorization|dsn|prompt$|messages$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^:/@\s]*):[^@\s]*@")


def redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask fields that could contain a secret, and passwords in URLs."""
    for key, value in event.items():
        if _SECRET_KEYS.search(key):
            event[key] = "***"
        elif isinstance(value, str):
            event[key] = _URL_PASSWORD.sub(r"\1:***@", value)
    return event


def configure(settings: Settings, service: str) -> None:
    """Set up logging of this process, libraries included. Called once, from the composition root."""
    identity = {"service": service, "instance_id": settings.instance_id}

    def identify(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # Not context variables: threads do not inherit them.
        event.update(identity)
        return event

    shared: list[Any] = [
        identify,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level)
    for noisy in ("aiokafka", "faust", "mode", "httpx", "alembic"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> Any:
    """Return a logger, to be used as ``log.info("event_name", field=value)``."""
    return structlog.stdlib.get_logger(name)
