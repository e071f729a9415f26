"""Who writes and reads each topic family by ``topics.yaml``, which permissions follow from, against what the code does.

Code cannot be asked whether it reads or writes what it names. So ``USES`` says of each of our processes where it does
what; the tests hold that table against the file, and against every mention of a topic in the code of a process: a new
use, or one that is gone, is an entry that is missing here or one too many.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fairlane.names import RECORDED_TOPICS
from fairlane_server.topics.families import TopicFamily, load_families

REPOSITORY = Path(__file__).parents[3]
READS, WRITES = "readers", "writers"

_PRICES = "fairlane_server/costs/published_prices.py"
_MODELS = "fairlane_server/control/published_models.py"
CODE = {
    "dispatcher": ("stream_processors/dispatcher", _PRICES, _MODELS),
    "consumer": ("inference_consumers", _PRICES, _MODELS),
    "recorder": ("stream_processors/recorder",),
    "operator": (
        *("fairlane_server/cli", "fairlane_server/control", "fairlane_server/kafka/load_feed.py"),
        "fairlane_server/dead_letters/bulk.py",
    ),
    "replayer": ("fairlane_server/dead_letters",),
    "tenant": ("fairlane/client",),
    "gateway": ("producers/gateway", "fairlane_server/kafka/load_feed.py", _MODELS),
    "admin": (
        *("producers/admin", "fairlane_server/administration", "fairlane_server/control"),
        *("fairlane_server/dead_letters", "fairlane_server/kafka/load_feed.py", "fairlane_server/log_replay"),
    ),
}

FAMILIES = {
    "requests_topic": {"requests"},
    "backfill_topic": {"backfill"},
    "priority_topic": {"priority"},
    "is_priority": {"priority"},
    "returned_topic": {"returned"},
    "replies_topic": {"replies", "service-replies"},
    "is_replies": {"replies", "service-replies", "gateway-replies", "jobs-replies"},
    "GATEWAY_REPLIES": {"gateway-replies"},
    "JOBS_REPLIES": {"jobs-replies"},
    "EVALUATION_WORK": {"evaluation-work"},
    "EVALUATION_REPLIES": {"evaluation-replies"},
    "chunks_topic": {"chunks"},
    "dead_letter_replies_topic": {"dead-letter-replies"},
    "DEAD_LETTER_REQUESTS": {"dead-letter-requests"},
    "DEAD_LETTER_WORK": {"dead-letter-work"},
    "CONTROL_TENANTS": {"control-tenants"},
    "CONTROL_MODELS": {"control-models"},
    "CONTROL_PRICES": {"control-prices"},
    "CONTROL_CAPACITY": {"control-capacity"},
    "CONTROL_DISPATCH": {"control-dispatch"},
    "CONTROL_CANCELLATIONS": {"control-cancellations"},
    "LEDGER_USAGE": {"ledger-usage"},
    "LEDGER_AUDIT": {"ledger-audit"},
    "LEDGER_FEEDBACK": {"ledger-feedback"},
}
"""What the names of `fairlane.names` stand for."""

_DISPATCHER, _CONSUMER = "stream_processors/dispatcher", "inference_consumers"
_LETTERS = "fairlane_server/dead_letters"
_TENANTS = "fairlane_server/control/published_tenants.py"
_GATEWAY = "producers/gateway/pipeline"

USES = {
    ("dispatcher", READS): {
        "requests": (f"{_DISPATCHER}/reading/request_topics.py", "requests_topic"),
        "backfill": (f"{_DISPATCHER}/reading/request_topics.py", "backfill_topic"),
        "returned": (f"{_DISPATCHER}/reading/request_topics.py", "returned_topic"),
        "evaluation-work": (f"{_DISPATCHER}/reading/request_topics.py", "EVALUATION_WORK"),
        "priority": (f"{_DISPATCHER}/feedback/work_feed.py", "priority_topic"),
        # Named by the recorder's tables, which say where the reply to a repeated request stands.
        "replies": (f"{_DISPATCHER}/deduplication/reply_archive.py", "reply_topic"),
        "service-replies": (f"{_DISPATCHER}/deduplication/reply_archive.py", "reply_topic"),
        "gateway-replies": (f"{_DISPATCHER}/deduplication/reply_archive.py", "reply_topic"),
        "jobs-replies": (f"{_DISPATCHER}/deduplication/reply_archive.py", "reply_topic"),
        "control-tenants": (f"{_DISPATCHER}/app.py", "CONTROL_TENANTS"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "control-prices": (_PRICES, "CONTROL_PRICES"),
        "control-capacity": (f"{_DISPATCHER}/feedback/work_feed.py", "CONTROL_CAPACITY"),
        "control-dispatch": (f"{_DISPATCHER}/feedback/work_feed.py", "CONTROL_DISPATCH"),
        "ledger-usage": (f"{_DISPATCHER}/feedback/work_feed.py", "LEDGER_USAGE"),
    },
    ("dispatcher", WRITES): {
        "priority": (f"{_DISPATCHER}/output/decision_records.py", "priority_topic"),
        "replies": (f"{_DISPATCHER}/output/decision_records.py", "reply_topic"),
        "service-replies": (f"{_DISPATCHER}/output/decision_records.py", "reply_topic"),
        "gateway-replies": (f"{_DISPATCHER}/output/decision_records.py", "reply_topic"),
        "jobs-replies": (f"{_DISPATCHER}/output/decision_records.py", "reply_topic"),
        "evaluation-work": (f"{_DISPATCHER}/output/decision_records.py", "EVALUATION_WORK"),
        "evaluation-replies": (f"{_DISPATCHER}/output/decision_records.py", "EVALUATION_REPLIES"),
        "ledger-audit": (f"{_DISPATCHER}/output/decision_records.py", "LEDGER_AUDIT"),
        "ledger-feedback": (f"{_DISPATCHER}/output/decision_records.py", "LEDGER_FEEDBACK"),
        "ledger-usage": (f"{_DISPATCHER}/output/decision_records.py", "LEDGER_USAGE"),
        "dead-letter-requests": (f"{_DISPATCHER}/output/decision_records.py", "DEAD_LETTER_REQUESTS"),
        "control-dispatch": (f"{_DISPATCHER}/output/heartbeat_publisher.py", "CONTROL_DISPATCH"),
        "control-cancellations": (f"{_DISPATCHER}/output/decision_records.py", "CONTROL_CANCELLATIONS"),
    },
    ("consumer", READS): {
        "priority": (f"{_CONSUMER}/group.py", "priority_topic"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "control-prices": (_PRICES, "CONTROL_PRICES"),
        "control-capacity": (f"{_CONSUMER}/versions/heartbeats.py", "CONTROL_CAPACITY"),
        "control-cancellations": (f"{_CONSUMER}/cancellations.py", "CONTROL_CANCELLATIONS"),
    },
    ("consumer", WRITES): {
        "chunks": (f"{_CONSUMER}/results/chunk_writer.py", "chunks_topic"),
        "replies": (f"{_CONSUMER}/results/records.py", "reply_topic"),
        "service-replies": (f"{_CONSUMER}/results/records.py", "reply_topic"),
        "gateway-replies": (f"{_CONSUMER}/results/records.py", "reply_topic"),
        "jobs-replies": (f"{_CONSUMER}/results/records.py", "reply_topic"),
        "evaluation-replies": (f"{_CONSUMER}/results/records.py", "EVALUATION_REPLIES"),
        "returned": (f"{_CONSUMER}/results/records.py", "returned_topic"),
        "ledger-usage": (f"{_CONSUMER}/results/records.py", "LEDGER_USAGE"),
        "ledger-audit": (f"{_CONSUMER}/results/records.py", "LEDGER_AUDIT"),
        "dead-letter-work": (f"{_CONSUMER}/results/records.py", "DEAD_LETTER_WORK"),
        "control-capacity": (f"{_CONSUMER}/capacity/reporter.py", "CONTROL_CAPACITY"),
    },
    ("recorder", READS): {
        "replies": ("stream_processors/recorder/projection.py", "is_replies"),
        "service-replies": ("stream_processors/recorder/projection.py", "is_replies"),
        "gateway-replies": ("stream_processors/recorder/projection.py", "is_replies"),
        "jobs-replies": ("stream_processors/recorder/projection.py", "is_replies"),
        "evaluation-replies": ("stream_processors/recorder/projection.py", "EVALUATION_REPLIES"),
        "control-tenants": ("stream_processors/recorder/projection.py", "CONTROL_TENANTS"),
        "control-models": ("stream_processors/recorder/projection.py", "CONTROL_MODELS"),
        "ledger-usage": ("stream_processors/recorder/projection.py", "LEDGER_USAGE"),
        "ledger-audit": ("stream_processors/recorder/projection.py", "LEDGER_AUDIT"),
        "ledger-feedback": ("stream_processors/recorder/projection.py", "LEDGER_FEEDBACK"),
        # Single items, which the usage records name.
        "priority": ("stream_processors/recorder/label_sources.py", "is_priority"),
    },
    ("recorder", WRITES): {},
    # `tenants list|apply`, `models apply` and `prices apply` read what is published before they write what changed.
    ("operator", READS): {
        "control-tenants": ("fairlane_server/kafka/load_feed.py", "CONTROL_TENANTS"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "control-prices": ("fairlane_server/cli/prices.py", "CONTROL_PRICES"),
        "control-capacity": ("fairlane_server/kafka/load_feed.py", "CONTROL_CAPACITY"),
        "control-dispatch": ("fairlane_server/kafka/load_feed.py", "CONTROL_DISPATCH"),
        "dead-letter-requests": ("fairlane_server/dead_letters/bulk.py", "DEAD_LETTER_REQUESTS"),
        "dead-letter-work": ("fairlane_server/dead_letters/bulk.py", "DEAD_LETTER_WORK"),
    },
    ("operator", WRITES): {
        "control-tenants": (_TENANTS, "CONTROL_TENANTS"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "control-prices": ("fairlane_server/cli/prices.py", "CONTROL_PRICES"),
    },
    # An operator who may write the requests of every tenant is a role of its own.
    ("replayer", READS): {
        "dead-letter-requests": (f"{_LETTERS}/log.py", "topics"),
        "dead-letter-work": (f"{_LETTERS}/log.py", "topics"),
    },
    ("replayer", WRITES): {
        # Where the letter stands, where the request in it came from.
        "dead-letter-requests": (f"{_LETTERS}/replay.py", "topic"),
        "dead-letter-work": (f"{_LETTERS}/replay.py", "topic"),
        "requests": (f"{_LETTERS}/replay.py", "topic"),
        "backfill": (f"{_LETTERS}/replay.py", "topic"),
        "ledger-audit": (f"{_LETTERS}/replay.py", "LEDGER_AUDIT"),
    },
    ("admin", READS): {
        "control-tenants": (_TENANTS, "CONTROL_TENANTS"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "control-capacity": ("fairlane_server/kafka/load_feed.py", "CONTROL_CAPACITY"),
        "control-dispatch": ("fairlane_server/kafka/load_feed.py", "CONTROL_DISPATCH"),
        "dead-letter-requests": (f"{_LETTERS}/bulk.py", "DEAD_LETTER_REQUESTS"),
        "dead-letter-work": (f"{_LETTERS}/bulk.py", "DEAD_LETTER_WORK"),
        "priority": ("fairlane_server/log_replay/ranges.py", "priority_topic"),
    },
    ("admin", WRITES): {
        "evaluation-work": ("fairlane_server/log_replay/copier.py", "EVALUATION_WORK"),
        "control-tenants": (_TENANTS, "CONTROL_TENANTS"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "dead-letter-requests": (f"{_LETTERS}/replay.py", "topic"),
        "dead-letter-work": (f"{_LETTERS}/replay.py", "topic"),
        "requests": (f"{_LETTERS}/replay.py", "topic"),
        "backfill": (f"{_LETTERS}/replay.py", "topic"),
        "ledger-audit": (f"{_LETTERS}/replay.py", "LEDGER_AUDIT"),
    },
    ("tenant", READS): {
        "replies": ("fairlane/client/core.py", "replies_topic"),
        "service-replies": ("fairlane/client/core.py", "replies_topic"),
        "chunks": ("fairlane/client/core.py", "chunks_topic"),
        "dead-letter-replies": ("fairlane/client/base.py", "dead_letter_replies_topic"),
    },
    ("gateway", READS): {
        "gateway-replies": (f"{_GATEWAY}/reply_reader.py", "GATEWAY_REPLIES"),
        "chunks": (f"{_GATEWAY}/chunk_reader.py", "chunks_topic"),
        "control-tenants": (f"{_GATEWAY}/load_watch.py", "CONTROL_TENANTS"),
        "control-models": (_MODELS, "CONTROL_MODELS"),
        "control-capacity": ("fairlane_server/kafka/load_feed.py", "CONTROL_CAPACITY"),
        "control-dispatch": ("fairlane_server/kafka/load_feed.py", "CONTROL_DISPATCH"),
    },
    ("gateway", WRITES): {"requests": (f"{_GATEWAY}/submitter.py", "requests_topic")},
    ("tenant", WRITES): {
        "requests": ("fairlane/client/publisher.py", "requests_topic"),
        "backfill": ("fairlane/client/publisher.py", "backfill_topic"),
        "dead-letter-replies": ("fairlane/client/reply_service.py", "dead_letter_replies_topic"),
    },
}
"""By role: the family, where in the code, and what it is called there."""

BESIDES_OUR_CODE = {
    ("operator", READS): {"ledger-audit"},  # with Kafka's own tools
}
"""What a role may do and no code of ours does."""

_ANY_REPLIES = {"replies", "service-replies", "gateway-replies", "jobs-replies"}
FROM_RECORDS = {
    "dispatcher": _ANY_REPLIES,
    "consumer": _ANY_REPLIES,
    "replayer": {"requests", "backfill", "dead-letter-requests", "dead-letter-work"},
    "admin": {"requests", "backfill"},
}
"""What a role reaches through a topic that comes with a record, and so need not name."""

FAMILY_BY_NAME = {family.family: family for family in load_families()}


def allowed(role: str, verb: str) -> set[str]:
    return {name for name, family in FAMILY_BY_NAME.items() if role in getattr(family, verb)}


def sources(role: str) -> Iterator[Path]:
    for place in CODE[role]:
        path = REPOSITORY / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def topics_named(path: Path) -> set[str]:
    """What of FAMILIES a module takes from `fairlane.names`, by ``from`` or as an attribute of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fairlane.names":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "names":
            found.add(node.attr)
    return found & FAMILIES.keys()


def families_of(symbols: Iterable[str]) -> set[str]:
    return set().union(*(FAMILIES[symbol] for symbol in symbols))


@pytest.mark.parametrize(("role", "verb"), USES, ids=str)
def test_permissions_are_what_the_code_does(role: str, verb: str) -> None:
    assert allowed(role, verb) == USES[role, verb].keys() | BESIDES_OUR_CODE.get((role, verb), set())


@pytest.mark.parametrize("role", CODE)
def test_every_topic_that_a_process_names_is_one_it_uses(role: str) -> None:
    named = families_of(set().union(*map(topics_named, sources(role))))
    used = USES[role, READS].keys() | USES[role, WRITES].keys()
    assert named <= used, "say in USES whether it is read or written there"
    # What is not named is reached through a topic that comes with a record.
    assert used - named <= FROM_RECORDS.get(role, set())


def test_what_is_said_to_be_used_stands_where_it_is_said_to() -> None:
    for (role, _), uses in USES.items():
        for family, (file, symbol) in uses.items():
            path = REPOSITORY / file
            assert path in set(sources(role)), file
            if symbol in FAMILIES:
                assert symbol in topics_named(path), (file, symbol)
                assert family in FAMILIES[symbol]
            else:
                assert re.search(rf"\b{symbol}\b", path.read_text(encoding="utf-8")), (file, symbol)


def test_every_name_of_a_topic_is_known_here() -> None:
    assert families_of(FAMILIES) == FAMILY_BY_NAME.keys()


def test_the_recorder_may_read_what_it_subscribes_to() -> None:
    """It does so by pattern, and reads single items of work besides."""

    def subscribed(family: TopicFamily) -> bool:
        topic = re.sub(r"\{[a-z]*\}", "x", family.name)
        return any(re.fullmatch(pattern, topic) for pattern in RECORDED_TOPICS)

    assert {name for name, family in FAMILY_BY_NAME.items() if subscribed(family)} == allowed("recorder", READS) - {
        "priority"
    }
