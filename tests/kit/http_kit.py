"""A second tenant's traffic beside an attack on a gateway, and what a process holds of memory.

with honest(served) as traffic:
    quiet = traffic.p99_ms(300)
    ...  # the attack
    assert traffic.p99_ms(300) <= bound_ms(quiet)
"""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

import httpx

from benchmarks.processes import resident_bytes
from tests.kit.gateway_kit import CALL_TIMEOUT_S, Served
from tests.kit.waiting import PATIENCE_S, eventually

MEBIBYTE: Final = 1024 * 1024
SAMPLES: Final = 300
"""So many calls, of which the third slowest is the 99th percentile."""
_PACE_S: Final = 0.01


def bound_ms(quiet_p99_ms: float) -> float:
    """The most that the 99th percentile of another tenant may be beside an attack: three times what it is without, and
    50 ms for an attacker that runs on the same two cores as everything else."""
    return 3 * quiet_p99_ms + 50


class PeakMemory:
    """The most that a process had, looked at all the time from the beginning of the block to its end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self.peak_bytes = resident_bytes(pid)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_S)

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._pid))


class Honest:
    """Sends requests one after the other, at most 100 a second, until it is told to stop.

    Attributes:
        failures: what was answered but 202.
    """

    def __init__(self, served: Served, tenant: str) -> None:
        self._served = served
        self._tenant = tenant
        self._ended = threading.Event()
        self._took_ms: list[float] = []
        self._thread = threading.Thread(target=self._send, name="honest", daemon=True)
        self.failures: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(CALL_TIMEOUT_S)
        assert not self._thread.is_alive()

    def p99_ms(self, samples: int = SAMPLES) -> float:
        """Of so many calls from now on."""
        begin = len(self._took_ms)
        eventually(
            lambda: len(self._took_ms) >= begin + samples or not self._thread.is_alive(), 120.0, f"{samples} calls"
        )
        assert self._thread.is_alive(), self.failures
        took_ms = sorted(self._took_ms[begin : begin + samples])
        return took_ms[samples * 99 // 100 - 1]

    def _send(self) -> None:
        with self._served.client(self._tenant) as client:
            while not self._ended.wait(_PACE_S):
                began = monotonic()
                try:
                    answer = client.post("/v1/requests", json=self._served.question())
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    return
                self._took_ms.append(1_000 * (monotonic() - began))
                if answer.status_code != 202:
                    self.failures.append(answer.text)


@contextmanager
def honest(served: Served, tenant: str = "b") -> Iterator[Honest]:
    """Of this tenant. Raises AssertionError in the end if one of its calls was not accepted."""
    traffic = Honest(served, tenant)
    traffic.start()
    try:
        traffic.p99_ms(50)
        yield traffic
    finally:
        traffic.stop()
    assert not traffic.failures


def report(*, before: int, peak: int, after: int, quiet_ms: float, beside_ms: float) -> None:
    """For whoever runs a test with ``-s``: memory in bytes, and the other tenant's 99th percentiles."""
    memory = f"RSS {before / MEBIBYTE:.0f} MiB before, {peak / MEBIBYTE:.0f} at the peak, {after / MEBIBYTE:.0f} after"
    sys.stdout.write(f"\n{memory}; other tenant p99 {quiet_ms:.0f} ms quiet, {beside_ms:.0f} ms beside\n")


def connected(served: Served, source: str = "127.0.0.1") -> socket.socket:
    """A connection to the first gateway, to be closed, from an address of this machine."""
    url = httpx.URL(served.url())
    peer = socket.create_connection((url.host, url.port or 80), PATIENCE_S, source_address=(source, 0))
    peer.settimeout(PATIENCE_S)
    return peer


def said(peer: socket.socket) -> bytes:
    """What comes until the other side ends the connection; a reset ends it uncleanly, and raises."""
    came = b""
    while piece := peer.recv(65_536):
        came += piece
    return came
