"""Stops processes in reverse start order."""

import threading
import time
from collections.abc import Mapping

from deploy.local.process import Child, ProcessSpec, Reporter, State

TICK_S = 0.02


def stop_in_reverse(
    children: Mapping[str, Child], guard: threading.Condition, hurry: threading.Event, report: Reporter
) -> None:
    """Stop each process once all that depend on it are gone, so that services drain while Kafka still answers.

    Returns when none runs any more.

    Args:
        children: all processes by name.
        guard: held whenever a child is touched.
        hurry: once set, what still runs is killed at once.
        report: told which process had to be killed.
    """
    while running := _running(children, guard):
        with guard:
            needed = {name for child in running for name in _needs(children, child.spec)}
            for child in running:
                if child.spec.name not in needed:
                    _push_out(child, time.monotonic(), hurry, report)
        time.sleep(TICK_S)
    with guard:
        for child in children.values():
            child.state = State.STOPPED


def _push_out(child: Child, now: float, hurry: threading.Event, report: Reporter) -> None:
    if child.instance is None:
        return
    if child.state is not State.STOPPED:
        child.state = State.STOPPED
        child.stop_deadline = now + child.spec.stop_timeout_s
        child.instance.ask_to_stop(child.spec.stop_signal)
    late = child.stop_deadline is not None and now >= child.stop_deadline
    if late:
        report(child.spec.name, f"did not stop within {child.spec.stop_timeout_s:g} s, killing it")
        child.stop_deadline = now + child.spec.stop_timeout_s
    if late or hurry.is_set():
        child.instance.kill()


def _running(children: Mapping[str, Child], guard: threading.Condition) -> list[Child]:
    with guard:
        for child in children.values():
            if child.instance is not None and child.instance.collect() is not None:
                child.instance = None
        return [child for child in children.values() if child.instance is not None]


def _needs(children: Mapping[str, Child], spec: ProcessSpec) -> set[str]:
    """Everything that `spec` depends on, directly or through others (steps that are done are in between)."""
    found: set[str] = set()
    open_names = list(spec.depends_on)
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names.extend(children[name].spec.depends_on)
    return found
