"""Which errors of an answer concern which try, and what may have changed after an attack."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.hostile_tenant.cluster_operations import LEFT_OUT, OPERATIONS
from tests.hostile_tenant.operation import Operation, Target, is_refusal
from tests.hostile_tenant.state import Allowance, State, changes
from tests.hostile_tenant.world import World

BY_NAME = {operation.name: operation for operation in OPERATIONS}
WORLD = World((), {"requests.a": UUID(int=1), "requests.b": UUID(int=2)}, {}, ())
A, B = Target("u", topic="requests.a"), Target("u", topic="requests.b")


def test_operations_have_different_names_and_none_is_left_out_as_well() -> None:
    assert len(BY_NAME) == len(OPERATIONS)
    assert not LEFT_OUT.keys() & {operation.api for operation in OPERATIONS}


def test_errors_are_found_by_name() -> None:
    answer: Mapping[str, Any] = {
        "Responses": [
            {"Name": "requests.a", "PartitionResponses": [{"Index": 0, "ErrorCode": 29}]},
            {"Name": "requests.b", "PartitionResponses": [{"Index": 0, "ErrorCode": 3}]},
        ]
    }
    assert BY_NAME["Produce"].codes(answer, A, WORLD) == [29]
    assert BY_NAME["Produce"].codes(answer, B, WORLD) == [3]


def test_errors_are_found_by_id() -> None:
    answer: Mapping[str, Any] = {"Topics": [{"Name": None, "TopicId": UUID(int=2), "ErrorCode": 29, "Partitions": []}]}
    assert BY_NAME["Metadata by id"].codes(answer, B, WORLD) == [29]
    assert BY_NAME["Metadata by id"].codes(answer, A, WORLD) == []


def test_an_error_of_the_whole_answer_concerns_everything() -> None:
    answer = {"ErrorCode": 31, "Responses": [{"Topic": "requests.a", "Partitions": [{"ErrorCode": 0}]}]}
    assert BY_NAME["Fetch"].codes(answer, A, WORLD) == [31, 0]
    assert BY_NAME["Fetch"].codes(answer, B, WORLD) == [31]


def test_of_a_single_try_every_error_counts() -> None:
    answer = {"ResultsByTopicV3AndBelow": [{"Name": "x", "ResultsByPartition": [{"PartitionErrorCode": 53}]}]}
    assert BY_NAME["AddPartitionsToTxn"].codes(answer, A, WORLD) == [53]


@pytest.mark.parametrize(
    ("codes", "refused"), [([29], True), ([0, 53], True), ([0], False), ([3, 16, 55], False), ([], False)]
)
def test_only_a_missing_right_is_a_refusal(codes: list[int], *, refused: bool) -> None:
    assert is_refusal(codes) is refused


def test_what_an_operation_tells() -> None:
    told: Mapping[str, Any] = {"Topics": [{"Name": "requests.a"}]}
    operation: Operation = BY_NAME["Metadata of everything"]
    assert operation.tells is not None
    assert [need.name for need in operation.tells(told, WORLD)] == ["requests.a"]


# ------------------------------------------------------------------ what may have changed

STATE = State(
    rights=frozenset({("topic", "requests.a")}),
    users={"u": ((2, 8_192),)},
    quotas={"u": {"producer_byte_rate": 1.0}},
    topics={"requests.a": (UUID(int=1), 1), "ledger.usage": (UUID(int=2), 1)},
    settings={(2, "requests.a", "retention.ms"): "5"},
    resources=frozenset(),
    begins={("requests.a", 0): 0, ("ledger.usage", 0): 0},
    ends={("requests.a", 0): 10, ("ledger.usage", 0): 3},
    committed={("own", "requests.a", 0): 4, ("another", "requests.a", 0): 4},
)
ALLOWANCE = Allowance(written={"requests.a": {9, 10, 11}}, shared={"ledger.usage"}, groups={"own"})
AFTER = replace(STATE, ends={("requests.a", 0): 12, ("ledger.usage", 0): 3})


def test_what_attackers_may_change_is_no_change() -> None:
    allowed = replace(
        AFTER,
        ends={("requests.a", 0): 12, ("ledger.usage", 0): 5},
        committed={**STATE.committed, ("own", "requests.a", 0): 1_000, ("own", "requests.b", 0): 1},
    )
    assert list(changes(STATE, allowed, ALLOWANCE)) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rights": frozenset()}, "rights: gone"),
        ({"users": {}}, "users: gone"),
        ({"users": {"u": ((2, 4_096),)}}, "users: gone"),
        ({"quotas": {"u": {"producer_byte_rate": 2.0}}}, "quotas: gone"),
        ({"topics": {"requests.a": (UUID(int=9), 1), "ledger.usage": (UUID(int=2), 1)}}, "topics: gone"),
        ({"settings": {}}, "settings: gone"),
        ({"resources": frozenset({(16, "x")})}, "resources: gone [], new"),
        ({"begins": {("requests.a", 0): 5, ("ledger.usage", 0): 0}}, "begins: gone"),
        ({"ends": {("requests.a", 0): 13, ("ledger.usage", 0): 3}}, "end of requests.a-0: 10, now 13"),
        ({"ends": {("requests.a", 0): 11, ("ledger.usage", 0): 3}}, "end of requests.a-0: 10, now 11"),
        ({"ends": {("requests.a", 0): 12}}, "end of ledger.usage-0: 3, now -1"),
        ({"committed": {("own", "requests.a", 0): 4}}, "committed by ('another', 'requests.a', 0): 4, now None"),
        ({"committed": {**STATE.committed, ("new", "x", 0): 1}}, "committed by ('new', 'x', 0): None, now 1"),
    ],
)
def test_every_other_change_is_one(change: Mapping[str, Any], what: str) -> None:
    (found,) = changes(STATE, replace(AFTER, **change), ALLOWANCE)
    assert found.startswith(what)
