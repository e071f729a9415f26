"""deploy/nginx held against the gateway behind it: its bounds, its times, its paths, and the format of its errors."""

import re

import pytest

from deploy.local.layout import PROJECT_ROOT
from fairlane.settings import Settings
from producers.admin.app import MOST_BODY_BYTES
from producers.gateway.app import Gateway
from producers.gateway.edge.connections import ConnectionTimeouts
from producers.gateway.edge.limited_protocol import MOST_HEAD_BYTES
from producers.gateway.native.deps import EventPolicy
from producers.gateway.received_forms import MOST_FORM_BYTES
from producers.openai_api.errors import speaks_openai

FOLDER = PROJECT_ROOT / "deploy" / "nginx"
WHOLE = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
GATEWAYS = (FOLDER / "gateways.conf").read_text(encoding="utf-8")
SETTINGS = Settings.model_fields
UNITS = {"s": 1, "m": 60, "h": 3_600, "k": 1_024, "": 1}
NOT_FOR_CALLERS = {"/health", "/health/ready"}


def values(directive: str, text: str = WHOLE) -> list[str]:
    """Of each place that has it, in order."""
    return re.findall(rf"^ *{directive} ([^;]+);", text, re.MULTILINE)


def amount(value: str) -> int:
    found = re.fullmatch(r"(\d+)([a-z]?)", value)
    assert found is not None, value
    return int(found[1]) * UNITS[found[2]]


def paths() -> list[str]:
    """Of every route that the gateway documents, with something in place of each parameter; and of its documents."""
    documented = Gateway(Settings()).app.openapi()["paths"]
    return ["/docs", "/redoc", "/openapi.json", *(re.sub(r"\{\w+\}", "a-1", path) for path in documented)]


def location_of(path: str) -> str:
    """The head of the location that NGINX chooses: an exact one, else the first regular expression, else the longest
    prefix."""
    heads = re.findall(r"^ +location ((?:[=~] )?/\S*|~ \S+) \{", WHOLE, re.MULTILINE)
    exact = [head for head in heads if head == f"= {path}"]
    matching = [head for head in heads if head.startswith("~ ") and re.search(head[2:], path)]
    prefixes = sorted((head for head in heads if head[0] == "/" and path.startswith(head)), key=len)
    return str((exact or matching or prefixes[-1:])[0])


def body_of(head: str) -> str:
    (body,) = re.findall(rf"location {re.escape(head)} \{{(.*?)\n        \}}", WHOLE, re.DOTALL)
    return str(body)


def test_administration_is_off_and_for_named_addresses_alone() -> None:
    assert not (FOLDER / "admin-location.conf").exists()
    text = (FOLDER / "admin-location.conf.off").read_text(encoding="utf-8")
    assert values("deny", text) == ["all"]
    assert amount(values("client_max_body_size", text)[0]) == MOST_BODY_BYTES
    assert values("proxy_pass", text) == [f"http://127.0.0.1:{SETTINGS['admin_port'].default}"]


def test_bodies_have_the_bounds_of_the_gateway() -> None:
    general, events, files, documents = map(amount, values("client_max_body_size"))
    assert general == SETTINGS["gateway_max_body_bytes"].default
    assert events < general
    assert files == SETTINGS["gateway_max_file_bytes"].default + MOST_FORM_BYTES
    assert documents == SETTINGS["gateway_max_document_bytes"].default + MOST_FORM_BYTES


def test_a_head_is_smaller_than_what_a_gateway_takes() -> None:
    """With what the edge adds: an address, and a host name that it repeats."""
    (first,) = map(amount, values("client_header_buffer_size"))
    ((count, size),) = (value.split() for value in values("large_client_header_buffers"))
    assert first + int(count) * amount(size) + 1_024 <= MOST_HEAD_BYTES


def test_no_connection_is_used_that_a_gateway_may_be_closing() -> None:
    idle_s = ConnectionTimeouts().idle_s
    assert [amount(value) for value in values("keepalive_timeout", GATEWAYS)] == [60, 60]
    assert idle_s - 60 >= 10
    assert [amount(value) for value in values("keepalive_timeout")] == [idle_s]


def test_the_edge_waits_longer_than_a_gateway() -> None:
    general, files, documents = map(amount, values("proxy_read_timeout"))
    # Identity, publishing, and the wait for the reply.
    assert general >= SETTINGS["gateway_wait_s"].default + 30
    assert files == documents > general
    assert general > 2 * EventPolicy().ping_s
    timeouts = ConnectionTimeouts()
    assert [amount(value) for value in values("client_header_timeout")] == [timeouts.head_s]
    assert [amount(value) for value in values("client_body_timeout")] == [timeouts.span_s]
    assert [amount(value) for value in values("send_timeout")] == [timeouts.taken_span_s]


def test_callers_are_limited_as_promised() -> None:
    assert re.findall(r"rate=(\S+);", WHOLE) == ["1000r/s"]
    assert values("limit_req") == [f"zone=rate burst={SETTINGS['gateway_key_burst'].default} nodelay"]
    (connections,) = map(int, values("worker_connections"))
    (descriptors,) = map(int, values("worker_rlimit_nofile"))
    # Of 10,000 callers one worker may have all, each with a connection to a gateway, besides those that are kept.
    kept = sum(map(int, values("keepalive", GATEWAYS)))
    assert connections >= 2 * 10_000 + kept
    assert descriptors >= 2 * connections


@pytest.mark.parametrize("path", paths())
def test_every_route_for_callers_is_passed_on_and_no_other(path: str) -> None:
    assert ("proxy_pass" in body_of(location_of(path))) == (path not in NOT_FOR_CALLERS)


def test_a_stream_of_events_has_its_location() -> None:
    assert location_of("/v1/requests/a-1/events") == "~ ^/v1/requests/[^/]+/events$"
    assert location_of("/v1/requests/a-1") == "/v1/"
    assert location_of("/v1/files/a-1/content") == "/v1/files"


@pytest.mark.parametrize("path", [*paths(), "/v1/chat", "/v1/chatty", "/v1/filesystem", "/", "/v1", "/metrics"])
@pytest.mark.parametrize("rest", ["", "?a=b", "/more"])
def test_errors_have_the_format_that_the_gateway_has_for_the_path(path: str, rest: str) -> None:
    (pattern,) = re.findall(r'map \$request \$is_openai \{\s+default 0;\s+"~(.+)" 1;', WHOLE)
    is_openai = re.search(pattern, f"POST {path}{rest} HTTP/1.1") is not None
    assert is_openai == speaks_openai((path + rest).partition("?")[0])


@pytest.mark.parametrize("path", [path for path in paths() if path not in NOT_FOR_CALLERS])
def test_the_log_names_every_route(path: str) -> None:
    (block,) = re.findall(r"map \$request_uri \$route \{(.+?)\n    \}", WHOLE, re.DOTALL)
    patterns = [re.sub(r"\?<(\w+)>", r"?P<\1>", pattern) for pattern in re.findall(r'"~(.+?)" \$', block)]
    assert [pattern for pattern in patterns if re.search(pattern, path + "?a=b")]


def test_both_lists_name_the_same_gateways() -> None:
    first, second = GATEWAYS.split("\nupstream ")[1:]
    assert [value.split()[0] for value in values("server", first)] == [
        value.split()[0] for value in values("server", second)
    ]
