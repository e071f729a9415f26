"""sync-call: latency that a blocking chat completion over HTTP adds to the client SDK's call for the same work.

The same question is asked one at a time, in turn: of the gateway over one open connection, and through the SDK. Both
use the same dispatcher and a consumer whose simulated engine takes no time, so the difference is the gateway, HTTP, and
the shared topic of the gateway's replies.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

from benchmarks.cluster import cluster
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.service_curve import percentile
from benchmarks.simulated_pool import INSTANT_SERVICES, MODEL
from fairlane import Client

NAME = "sync-call"
HOW = MEDIAN_OF_REPETITIONS
AIM_MS = 5.0
CALLS = 200
WARM_UP = 30
_TENANT = "acme"
_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_MAX_TOKENS = 16
_PATH = "/v1/chat/completions"
_BODY = json.dumps({"model": MODEL, "messages": [_QUESTION], "max_tokens": _MAX_TOKENS, "fairlane": {"cache": "none"}})
_TIMEOUT_S = 60.0


def run() -> Result:
    """Three repetitions; in each the difference of the medians over calls that alternate."""
    with (
        cluster(INSTANT_SERVICES, parts=("kafka", "redis", "postgres"), tenants=(_TENANT,)) as running,
        running.gateway(_TENANT) as service,
        Client(_TENANT, settings=running.settings) as client,
        closing(HTTPConnection(urlsplit(service.url).netloc, timeout=_TIMEOUT_S)) as connection,
    ):

        def measure(_number: int, calls: int | None = None) -> dict[str, float]:
            pairs = [(_http_ms(connection, service.headers), _sdk_ms(client)) for _ in range(calls or CALLS)]
            over_http, sdk = zip(*pairs, strict=True)
            return {
                "beyond_ms": median(over_http) - median(sdk),
                "gateway_ms": median(over_http),
                "sdk_ms": median(sdk),
                "gateway_p99_ms": percentile(over_http, 0.99),
                "sdk_p99_ms": percentile(sdk, 0.99),
            }

        measure(0, WARM_UP)
        runs = repeated(measure)
    return Result(
        NAME,
        (
            Figure("median beyond the SDK's own", median_of(runs, "beyond_ms"), "ms", "at most", AIM_MS),
            Figure("median over HTTP", median_of(runs, "gateway_ms"), "ms"),
            Figure("median of the SDK", median_of(runs, "sdk_ms"), "ms"),
            Figure("p99 over HTTP", median_of(runs, "gateway_p99_ms"), "ms"),
            Figure("p99 of the SDK", median_of(runs, "sdk_p99_ms"), "ms"),
        ),
        runs,
    )


def _http_ms(connection: HTTPConnection, headers: Mapping[str, str]) -> float:
    """Raises RuntimeError: it was not answered."""
    started_s = perf_counter()
    connection.request("POST", _PATH, _BODY, dict(headers))
    response = connection.getresponse()
    answer = response.read()
    took_ms = (perf_counter() - started_s) * 1_000
    if response.status != 200:
        raise RuntimeError(f"the gateway answered {response.status}: {answer[:200]!r}")
    return took_ms


def _sdk_ms(client: Client) -> float:
    started_s = perf_counter()
    client.submit(model=MODEL, messages=[_QUESTION], max_tokens=_MAX_TOKENS, cache="none").result(_TIMEOUT_S)
    return (perf_counter() - started_s) * 1_000
