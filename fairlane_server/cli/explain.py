"""``fairlane explain``: the timeline of one request."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from fairlane_server.cli.output import (
    AsJson,
    OneTenant,
    fail,
    printable,
    say,
    settings_with,
    show_json,
    show_table,
    utc,
)
from fairlane_server.postgres.request_history import read_history
from fairlane_server.postgres.request_timeline import RequestTimeline, TimelineEvent, tell

# The longest first: a name ends in exactly one of them.
_UNITS = (
    ("_tokens_per_s", " tokens/s"),
    ("_per_s", "/s"),
    ("_tokens", " tokens"),
    ("_requests", " requests"),
    ("_bytes", " bytes"),
    ("_ms", " ms"),
    ("_s", " s"),
)
_INSTANT = "_at_ms"

RequestId = Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The id as it was published.", show_default=False)]


def explain_command(request_id: RequestId, tenant: OneTenant = None, *, as_json: AsJson = False) -> None:
    """Tell what became of a request: every decision with its inputs, and when each stage was reached.

    From the tables that the recorder fills (POSTGRES_DSN), so what happened a moment ago may not be there yet.
    """
    if not request_id:
        fail("REQUEST_ID must not be empty")
    places = tell(read_history(settings_with(), request_id, tenant))
    if not places:
        of = "" if tenant is None else f" of tenant {tenant}"
        fail(f"nothing is recorded of request {request_id}{of}: a wrong id, or the recorder is behind")
    if as_json:
        show_json({"request_id": request_id, "places": [_as_json(place) for place in places]})
        return
    for number, place in enumerate(places, 1):
        if number > 1:
            say("")
        _show(request_id, place, f" ({number} of {len(places)} places with this id)" if len(places) > 1 else "")


def _as_json(place: RequestTimeline) -> dict[str, object]:
    began_at_ms = place.began_at_ms
    return {
        "tenant": place.tenant,
        "source": asdict(place.source),
        "state": place.state,
        "began_at_ms": began_at_ms,
        "events": [{"offset_ms": event.at_ms - began_at_ms, **_event_as_json(event)} for event in place.events],
    }


def _event_as_json(event: TimelineEvent) -> dict[str, object]:
    return {name: value for name, value in asdict(event).items() if value is not None}


def _show(request_id: str, place: RequestTimeline, which: str) -> None:
    source = place.source
    where = f"{source.topic}-{source.partition}@{source.offset}" if source.topic else "a place that is not known"
    say(f"request {printable(request_id)}{which}")
    began = f"{utc(place.began_at_ms)}.{place.began_at_ms % 1_000:03}"
    say(f"tenant {printable(place.tenant)}, {printable(where)}, {began} UTC")
    say(f"state: {place.state}")
    show_table(
        ("ms", "event", "by", "what"),
        [
            (
                f"+{event.at_ms - place.began_at_ms:,}",
                event.event.replace("_", " "),
                event.actor or "",
                ", ".join(_words(event, place.began_at_ms)),
            )
            for event in place.events
        ],
    )


def _words(event: TimelineEvent, began_at_ms: int) -> Iterable[str]:
    if event.code is not None:
        yield event.code
    if event.message is not None:
        yield event.message
    for name, value in event.details.items():
        yield with_unit(name, value, began_at_ms)


def with_unit(name: str, value: str, began_at_ms: int) -> str:
    """``waited_ms`` and "35" as "waited 35 ms"; an instant (``_at_ms``) relative to the first event."""
    if name.endswith(_INSTANT) and value.isdecimal():
        return f"{_label(name, _INSTANT)} {int(value) - began_at_ms:+,} ms"
    for suffix, unit in _UNITS:
        if name.endswith(suffix) and name != suffix:
            return f"{_label(name, suffix)} {_number(value)}{unit}"
    return f"{name.replace('_', ' ')} {_number(value)}"


def _label(name: str, suffix: str) -> str:
    return name.removesuffix(suffix).replace("_", " ")


def _number(value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        return value
    if number.is_integer():
        return f"{int(number):,}"
    return f"{number:,.1f}" if abs(number) >= 100 else f"{number:.3g}"
