"""Short runs of the fuzzer (`python -m tests.fuzz`), and proofs that it finds what there is to find."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from benchmarks.record_batches import CODECS, ProduceRefusedError, Written, batch, produce_batch
from deploy.local.layout import PROJECT_ROOT
from fairlane.codec import DecodeError, DecodeProblem
from fairlane.schema_files import default_codec
from tests.fuzz import checks, corpus, hostile_calls, hostile_records, in_process, live, record_batch, worker
from tests.fuzz.__main__ import main
from tests.fuzz.mutation import mutated_bytes, mutated_json
from tests.kit.dispatcher_bench import request
from tests.kit.gateway_kit import serving
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.full

SEED = 14


@pytest.fixture(autouse=True)
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Failing inputs are kept here and not with those of real runs."""
    monkeypatch.setattr(corpus, "FINDINGS", tmp_path / "findings")
    return tmp_path / "findings"


# ------------------------------------------------------------------ runs


@pytest.mark.parametrize("target", ["records", "batches", "bodies"])
def test_within_a_process_nothing_is_found(target: str) -> None:
    outcome = in_process.run(target, seconds=3, seed=SEED)
    assert outcome.reason is None, outcome.command
    assert outcome.cases > 100


@pytest.mark.broker
def test_live_nothing_is_found(broker: str, postgres: PostgresServer, redis_url: str, tmp_path: Path) -> None:
    stack, tenants = tmp_path / "stack", (live.HOSTILE, live.HONEST)
    with serving(broker, postgres, stack, redis_url=redis_url, gateway_env=live.GATEWAY_ENV, tenants=tenants) as served:
        outcome = live.attack(served, seconds=20, seed=SEED, kinds=list(live.KINDS))
    assert outcome.reason is None, outcome.command
    assert outcome.figures["records written"] > 50
    assert outcome.figures["answers with 400"] > 5
    assert outcome.figures["honest calls"] > 3


# ------------------------------------------------------------------ what it would find


def broken_target(monkeypatch: pytest.MonkeyPatch, check: Callable[[bytes], None]) -> checks.Target:
    return checks.Target((b"first", b"second"), lambda rng: b"mutated" + rng.randbytes(2), check)


def tried(monkeypatch: pytest.MonkeyPatch, check: Callable[[bytes], None]) -> str | None:
    return worker._tried(broken_target(monkeypatch, check), b"input")


def test_an_exception_a_finding_time_and_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_: bytes) -> NoReturn:
        raise UnicodeDecodeError("utf-8", b"secret", 0, 1, "bad")

    def finds(_: bytes) -> NoReturn:
        raise checks.Finding("no field")

    def spins(_: bytes) -> None:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass

    assert "UnicodeDecodeError at " in (tried(monkeypatch, raises) or "")
    assert "secret" not in (tried(monkeypatch, raises) or "")
    assert tried(monkeypatch, finds) == "no field"
    assert tried(monkeypatch, lambda _: None) is None
    monkeypatch.setattr(worker, "MOST_CPU_S", 0.1)
    assert "of CPU for 5 bytes" in (tried(monkeypatch, spins) or "")
    monkeypatch.setattr(worker, "_most_bytes", iter((0, 2**30)).__next__)
    assert tried(monkeypatch, lambda _: None) == "took 1024 MiB of memory for 5 bytes"


@pytest.mark.parametrize(("number", "told"), [(signal.SIGSEGV, "ended with -11"), (signal.SIGSTOP, "within 1 s")])
def test_a_crash_and_a_hang_leave_the_input_that_did_it(
    number: signal.Signals, told: str, monkeypatch: pytest.MonkeyPatch, findings: Path, tmp_path: Path
) -> None:
    """The child is this test's own program, which does what a decoder in C would do."""
    program = f"""
import mmap, os, sys
from tests.fuzz.worker import SLOT, SLOT_BYTES
with open(sys.argv[2], "r+b") as file, mmap.mmap(file.fileno(), SLOT_BYTES) as slot:
    slot[SLOT.size : SLOT.size + 5] = b"input"
    slot[: SLOT.size] = SLOT.pack(7, 5)
    os.kill(os.getpid(), {int(number)})
"""
    file = tmp_path / "program.py"
    file.write_text(program, encoding="utf-8")
    monkeypatch.setattr(in_process, "_COMMAND", (sys.executable, str(file)))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT))
    monkeypatch.setattr(in_process, "_STALL_S", 1.0)
    outcome = in_process.run("records", 1, SEED)
    assert told in (outcome.reason or "")
    assert outcome.file is not None
    assert outcome.file.parent == findings
    assert outcome.file.read_bytes() == b"input"
    assert outcome.command == f"python -m tests.fuzz --input {outcome.file}"
    assert outcome.cases == 7


def test_a_fault_of_intake_is_found_and_not_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.RecordCheck()
    good = default_codec().encode(request())
    check(good)
    monkeypatch.setattr("stream_processors.dispatcher.intake.classifier.validate", lambda *_args, **_named: 1 / 0)
    with pytest.raises(checks.Finding, match="intake failed: ZeroDivisionError"):
        check(good)


def test_a_codec_that_raises_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.RecordCheck()

    def decode(data: bytes | None) -> NoReturn:
        raise RecursionError

    monkeypatch.setattr(check._codec, "decode", decode)
    with pytest.raises(RecursionError):
        check(b"\0")


# ------------------------------------------------------------------ its inputs


def test_cases_follow_from_seed_and_number() -> None:
    target = checks.bodies()
    first = [target.case(SEED, number) for number in range(60)]
    assert first == [target.case(SEED, number) for number in range(60)]
    assert first[: len(target.seeds)] == list(target.seeds)
    assert first[-1] != target.case(SEED + 1, 59)


def test_mutations_of_a_record_reach_behind_its_frame() -> None:
    seeds, rng = corpus.records(), Random(SEED)
    problems = set()
    decoded = 0
    for _ in range(2_000):
        try:
            default_codec().decode(mutated_bytes(rng.choice(seeds), rng, seeds))
            decoded += 1
        except DecodeError as error:
            problems.add(error.problem)
    assert problems >= {
        DecodeProblem.EMPTY,
        DecodeProblem.BAD_MAGIC,
        DecodeProblem.UNKNOWN_SCHEMA_ID,
        DecodeProblem.TRUNCATED_BODY,
        DecodeProblem.TRAILING_BYTES,
        DecodeProblem.TOO_MANY_ITEMS,
        DecodeProblem.INVALID_BODY,
    }
    assert decoded > 100


def test_mutations_of_a_body_are_mostly_json_still() -> None:
    seeds, rng = corpus.bodies(), Random(SEED)
    made = [mutated_json(rng.choice(seeds), rng, seeds) for _ in range(500)]
    readable = 0
    for body in made:
        try:
            json.loads(body)
            readable += 1
        except (ValueError, RecursionError):
            continue
    assert 200 < readable < 500


def test_every_kind_of_action_is_made_unless_it_is_left_out_and_can_be_written_down() -> None:
    rng = Random(SEED)
    made = [hostile_records.action(rng, request(), frozenset()) for _ in range(400)]
    made += [hostile_calls.action(rng, "words", frozenset()) for _ in range(200)]
    assert {action["kind"] for action in made} == set(live.KINDS)
    assert all(json.loads(json.dumps(action))["kind"] == action["kind"] for action in made)
    without = frozenset(live.KINDS) - {"records", "bodies"}
    assert {hostile_records.action(rng, request(), without)["kind"] for _ in range(20)} == {"records"}
    assert {hostile_calls.action(rng, "words", without)["kind"] for _ in range(20)} == {"bodies"}


@pytest.mark.broker
def test_a_batch_made_by_hand_is_taken_and_read_as_it_was_meant(broker: str, unique: str) -> None:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker})
    admin.create_topics([NewTopic(unique, 1, 1)])[unique].result(30)
    records = [
        Written(b"value", b"key", ((b"name", b"header"),)),
        Written(None, None),
    ]
    now_ms = int(time.time() * 1_000)
    for codec in range(len(CODECS)):
        made = batch(records, timestamp_ms=now_ms, codec=codec)
        produce_batch(broker, unique, made)
    with pytest.raises(ProduceRefusedError):
        produce_batch(broker, unique, made[:-1] + b"\x07")
    damaged = made[:30] + b"\x07" + made[31:]
    assert record_batch.repaired(made) == made
    assert record_batch.repaired(damaged) != damaged
    reader = Consumer({"bootstrap.servers": broker, "group.id": unique, "auto.offset.reset": "earliest"})
    try:
        reader.subscribe([unique])
        found = reader.consume(2 * len(CODECS), timeout=30)
    finally:
        reader.close()
    assert [(message.key(), message.value(), message.headers()) for message in found] == [
        (b"key", b"value", [("name", b"header")]),
        (None, None, None),
    ] * len(CODECS)


# ------------------------------------------------------------------ the command


def test_the_command_says_what_was_found_and_how_to_try_it_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--level", "process", "--target", "http", "--seconds", "1", "--seed", "5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "seed 5"
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["seed"], told["outcomes"][0]["target"], told["outcomes"][0]["reason"]) == (5, "bodies", None)
    file = tmp_path / f"records-{os.getpid()}"
    file.write_bytes(b"\0\0\0")
    assert main(["--input", str(file)]) == 0
    assert "records: 1 inputs" in capsys.readouterr().out
