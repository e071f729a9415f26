"""edge: what NGINX with the configuration of deploy/nginx adds to a gateway, and what idle callers take of it.

The same calls go to a gateway and through the edge to the same gateway, in an order that alternates: first as fast as
they are answered, then at half of the edge's peak, from calls at random moments. They come over connections that are
kept, to the edge with TLS. No dispatcher runs. The edge's limit for an address is lifted, since all calls come from
one. Edge, gateway, broker and generator share the machine, so the rate through the edge is what is left of its cores.

Then 10,000 callers connect, call once and keep their connections, and the load at half of the peak is repeated. Memory
is that of all processes of the edge.
"""

import resource
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import HttpService, cluster
from benchmarks.gateway import BODY, CONNECTIONS, PATH, TENANT
from benchmarks.http_load import HttpLoadResult, Order, load
from benchmarks.processes import cpu_with_children_s, resident_bytes
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from deploy.local.certificates import prepare_certificates
from deploy.local.nginx import HOST, Nginx, running
from deploy.local.ports import PortClaims

NAME = "edge"
HOW = f"{MEDIAN_OF_REPETITIONS}; the idle callers once"
AIM_RATIO = 0.7
AIM_ADDED_MS = 3.0
AIM_IDLE_BYTES = 32_768
SECONDS = 8.0
WARM_UP_S = 2.0
IDLE = 10_000
_PART_OF_PEAK = 0.5
_TIMEOUT_S = 30.0
_DESCRIPTORS_BESIDES = 512
_SHOWN_LINES = 5
_CHANGES = {"rate=1000r/s": "rate=1000000r/s", "keepalive_timeout 75s;": "keepalive_timeout 900s;"}
"""For a load from one address; and callers stay connected for as long as all the others take to connect."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A running edge in front of a gateway. ``environment`` is of callers who trust its certificate."""

    service: HttpService
    nginx: Nginx
    environment: Mapping[str, str]

    @property
    def resident_bytes(self) -> int:
        master = self.service.pid
        workers = Path(f"/proc/{master}/task/{master}/children").read_text(encoding="ascii").split()
        return sum(map(resident_bytes, (master, *map(int, workers))))


@contextmanager
def edge(folder: Path, gateway: HttpService) -> Iterator[Edge]:
    """Raises NginxMissingError."""
    certificates = prepare_certificates(folder / "certificates")
    with closing(PortClaims()) as ports:
        address = gateway.url.removeprefix("http://")
        nginx = Nginx(folder / "nginx", ports.take("edge"), [address], certificates, changes=_CHANGES)
        with running(nginx) as instance:
            service = HttpService(nginx.url, instance.pid, gateway.headers)
            yield Edge(service, nginx, {"SSL_CERT_FILE": str(certificates.ca_file)})


def run() -> Result:
    """Three repetitions on one cluster, the median of each figure; then the idle callers."""
    with ExitStack() as stack:
        bench = stack.enter_context(cluster([], parts=("kafka", "redis", "postgres"), tenants=(TENANT,)))
        gateway = stack.enter_context(bench.gateway(TENANT))
        between = stack.enter_context(edge(bench.folder / "edge", gateway))
        for service in (gateway, between.service):
            _loaded(service, between, WARM_UP_S, connections=CONNECTIONS)
        runs = repeated(lambda number: _measure(number, gateway, between))
        idle = _idle(gateway, between, median_of(runs, "rate_per_s"))
    figures = (
        Figure("submits/s divided by the gateway's own", median_of(runs, "ratio"), "ratio", "at least", AIM_RATIO),
        Figure("submits/s through the edge", median_of(runs, "edge_per_s"), "requests/s"),
        Figure("submits/s of the gateway", median_of(runs, "gateway_per_s"), "requests/s"),
        Figure("p50 added by the edge at half of its peak", median_of(runs, "added_ms"), "ms", "at most", AIM_ADDED_MS),
        Figure("p50 through the edge then", median_of(runs, "edge_p50_ms"), "ms"),
        Figure("p99 through the edge then", median_of(runs, "edge_p99_ms"), "ms"),
        Figure("p50 of the gateway then", median_of(runs, "gateway_p50_ms"), "ms"),
        Figure("p99 of the gateway then", median_of(runs, "gateway_p99_ms"), "ms"),
        Figure("processor time of the edge for a submit", median_of(runs, "edge_us"), "µs"),
        Figure("idle callers", idle["callers"], "", "at least", IDLE),
        Figure("memory of the edge for each", idle["edge_bytes"], "bytes", "at most", AIM_IDLE_BYTES),
        Figure("memory of the edge with all", idle["edge_mib"], "MiB"),
        Figure("memory that the gateway took with them", idle["gateway_mib"], "MiB"),
        Figure("p50 through the edge beside them", idle["p50_ms"], "ms"),
        Figure("p99 through the edge beside them", idle["p99_ms"], "ms"),
    )
    return Result(NAME, figures, (*runs, idle))


def _measure(number: int, gateway: HttpService, between: Edge) -> dict[str, float]:
    services = {"gateway": gateway, "edge": between.service}
    in_turn = tuple(services) if number % 2 == 0 else tuple(services)[::-1]
    peaks, used_s = {}, {}
    for name in in_turn:
        before_s = cpu_with_children_s(between.service.pid)
        peaks[name] = _loaded(services[name], between, SECONDS, connections=CONNECTIONS)
        used_s[name] = cpu_with_children_s(between.service.pid) - before_s
    rate_per_s = _PART_OF_PEAK * peaks["edge"].per_s
    paced = {name: _loaded(services[name], between, SECONDS, rate_per_s=rate_per_s) for name in in_turn}
    return {
        "ratio": peaks["edge"].per_s / peaks["gateway"].per_s,
        "edge_per_s": peaks["edge"].per_s,
        "gateway_per_s": peaks["gateway"].per_s,
        "rate_per_s": rate_per_s,
        "added_ms": paced["edge"].p50_ms - paced["gateway"].p50_ms,
        "edge_p50_ms": paced["edge"].p50_ms,
        "edge_p99_ms": paced["edge"].p99_ms,
        "gateway_p50_ms": paced["gateway"].p50_ms,
        "gateway_p99_ms": paced["gateway"].p99_ms,
        "edge_us": 1e6 * used_s["edge"] / (peaks["edge"].per_s * SECONDS),
    }


def _idle(gateway: HttpService, between: Edge, rate_per_s: float) -> dict[str, float]:
    """Raises ValueError if the machine does not permit so many file descriptors."""
    wanted = IDLE + _DESCRIPTORS_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    tls = ssl.create_default_context(cafile=between.environment["SSL_CERT_FILE"])
    head = "".join(f"{name}: {value}\r\n" for name, value in between.service.headers.items())
    call = f"GET /v1/models HTTP/1.1\r\nhost: edge\r\n{head}\r\n".encode()
    before = between.resident_bytes, resident_bytes(gateway.pid)
    with ExitStack() as opened:
        peers = []
        for _ in range(IDLE):
            plain = socket.create_connection((HOST, between.nginx.port), _TIMEOUT_S)
            peers.append(opened.enter_context(tls.wrap_socket(plain, server_hostname=HOST)))
            _ask(peers[-1], call)
        after = between.resident_bytes, resident_bytes(gateway.pid)
        beside = _loaded(between.service, between, SECONDS, rate_per_s=rate_per_s)
        callers = sum(_is_open(peer) for peer in peers)
    return {
        "callers": float(callers),
        "edge_bytes": (after[0] - before[0]) / IDLE,
        "edge_mib": after[0] / 2**20,
        "gateway_mib": (after[1] - before[1]) / 2**20,
        "p50_ms": beside.p50_ms,
        "p99_ms": beside.p99_ms,
    }


def _ask(peer: ssl.SSLSocket, call: bytes) -> None:
    """Call, and read the answer. Raises RuntimeError: it is not the one that was expected."""
    peer.sendall(call)
    answer = b""
    while not answer.endswith(b"}"):
        piece = peer.recv(65_536)
        answer += piece
        if not piece or not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"a caller was answered {answer[:200]!r}")


def _is_open(peer: ssl.SSLSocket) -> bool:
    """Whether the other side has not closed the connection."""
    peer.setblocking(False)
    try:
        return bool(peer.recv(1))
    except ssl.SSLWantReadError:
        return True
    except OSError:
        return False


def _loaded(
    service: HttpService, between: Edge, seconds: float, *, connections: int = 0, rate_per_s: float = 0.0
) -> HttpLoadResult:
    """Raises RuntimeError, with the edge's lines about them: not every call was answered with 202."""
    order = Order(service.url, PATH, service.headers, BODY, seconds, connections, rate_per_s)
    measured = load(order, between.environment)
    if measured.others or not measured.per_s:
        lines = between.nginx.access_log.read_text(encoding="utf-8").splitlines()
        refused = [line for line in lines if '"status":202,' not in line]
        shown = "\n".join(refused[-_SHOWN_LINES:])
        raise RuntimeError(f"{service.url}: not every call was accepted: {measured.statuses}\n{shown}")
    return measured
