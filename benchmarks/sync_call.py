"""sync-call: latency that a blocking chat completion over HTTP adds to the client SDK's call for the same work.

The same question is asked one at a time, in turn: of the gateway over one open connection, and through the SDK. Both
use the same dispatcher and a consumer whose simulated engine takes no time, so the difference is the gateway, HTTP, and
the shared topic of the gateway's replies.
"""

import http.client
import json
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

from benchmarks.cluster import HttpService, cluster
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.service_curve import percentile
from benchmarks.simulated_pool import INSTANT_SERVICES, MODEL
from fairlane import Client

NAME = "sync-call"
HOW = MEDIAN_OF_REPETITIONS
AIM_MS = 15.0
CALLS = 200
WARM_UP = 30
_TENANT = "acme"
_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_MAX_TOKENS = 16
_PATH = "/v1/chat/completions"
_TIMEOUT_S = 60.0


def run() -> Result:
    """Three repetitions; in each the difference of the medians over calls that alternate."""
    with (
        cluster(INSTANT_SERVICES, parts=("kafka", "redis", "postgres"), tenants=(_TENANT,)) as running,
        running.gateway(_TENANT) as service,
        Client(tenant=_TENANT, bootstrap_servers=running.settings.kafka_bootstrap_servers) as client,
        _Chat(service) as chat,
    ):
        for _ in range(WARM_UP):
            chat.ask_ms()
            _sdk_ms(client)

        def measure(_number: int) -> dict[str, float]:
            pairs = [(chat.ask_ms(), _sdk_ms(client)) for _ in range(CALLS)]
            over_http, sdk = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            return {
                "beyond_ms": median(over_http) - median(sdk),
                "gateway_ms": median(over_http),
                "sdk_ms": median(sdk),
                "gateway_p99_ms": percentile(over_http, 0.99),
                "sdk_p99_ms": percentile(sdk, 0.99),
            }

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


class _Chat:
    """Chat completions over one connection."""

    def __init__(self, service: HttpService) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=_TIMEOUT_S)
        self._headers = dict(service.headers)
        body = {"model": MODEL, "messages": [_QUESTION], "max_tokens": _MAX_TOKENS, "fairlane": {"cache": "none"}}
        self._body = json.dumps(body).encode()

    def __enter__(self) -> "_Chat":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask_ms(self) -> float:
        """Raises RuntimeError: it was not answered."""
        started_s = perf_counter()
        self._connection.request("POST", _PATH, self._body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        took_ms = (perf_counter() - started_s) * 1_000
        if response.status != 200:
            raise RuntimeError(f"the gateway answered {response.status}: {answer[:200]!r}")
        return took_ms


def _sdk_ms(client: Client) -> float:
    started_s = perf_counter()
    client.submit(model=MODEL, messages=[_QUESTION], max_tokens=_MAX_TOKENS, cache="none").result(_TIMEOUT_S)
    return (perf_counter() - started_s) * 1_000
