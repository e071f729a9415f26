"""The admin API keeps to its OpenAPI document, whatever is sent, over stores in memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from schemathesis import GenerationMode
from starlette.requests import HTTPConnection

from fairlane.records import ModelRoute, ModelVersion, SourceCoordinate, TenantSpec
from fairlane.settings import Settings
from fairlane_server.administration.dead_letters import LetterPage, ReplayReport
from fairlane_server.administration.events import RecordedEvent
from fairlane_server.administration.labels import ExportPage
from fairlane_server.administration.model_routes import (
    ModelChangedError,
    ModelConflictError,
    ModelNotFoundError,
    invalid_change,
)
from fairlane_server.administration.tenants import TenantChange, decide_removal, decide_set
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope
from fairlane_server.api_keys.key_store import ApiKey, IssuedKey, KeyNotFoundError, User
from fairlane_server.control.tenants_file import API
from fairlane_server.dead_letters.bulk import Cut, ReplayResult
from fairlane_server.evaluation.calibration import JudgeAgreement
from fairlane_server.evaluation.calibration_store import JudgeCalibration
from fairlane_server.evaluation.comparison import PairedComparison
from fairlane_server.evaluation.evaluation_set import EvaluationSet
from fairlane_server.evaluation.run_store import StoredRun
from fairlane_server.evaluation.schedules import EvaluationSchedule, check_schedule
from fairlane_server.evaluation.set_store import EvaluationStoreError, StoredSet, UnknownEvaluationError
from fairlane_server.evaluation.shadow_report import ShadowCounts, ShadowReport
from fairlane_server.evaluation.shadows import NoShadowError
from fairlane_server.evaluation.stored_runs import JudgeUse, RunHead, RunResult
from fairlane_server.kafka.load_board import LoadBoard, LoadView
from fairlane_server.labelling.decisions import ItemOutcome, ItemState, ReviewerStatistics
from fairlane_server.labelling.queue import LabelError, LabelTask, UnknownLabelItemError
from fairlane_server.log_replay.plan import LogReplayAction, LogReplayPlan, LogReplayState
from fairlane_server.log_replay.progress import ReplayRange
from fairlane_server.log_replay.store import LogReplay, LogReplayNotFoundError, LogReplayStateError, ReplayProgress
from fairlane_server.log_replay.verdict import ReplayTally, judge_replay
from fairlane_server.models.catalog import ModelRecord, route_of_one
from fairlane_server.models.changes import Author, Published, registered
from fairlane_server.postgres.drift_findings import DriftSample, FoundDrift, StatisticState
from fairlane_server.postgres.model_history import RouteChange
from fairlane_server.rollouts.changes import NoRolloutError
from producers.admin.app import AdminApi
from producers.gateway.identity.identity import Identity
from producers.openai_api.errors import GatewayError
from tests.kit.openapi_kit import HEADERS, Probe, Route, operations, probing

KEY_ID = "0123456789abcdef"
VERSION = ModelVersion("m", "1", "p", "e", ("generate",), "x", 1, 1)
KEY = ApiKey(KEY_ID, "acme", "n", Role.TENANT, (Scope.FILES,), (), None, None, 1, None, None, 2)
USER = User("acme", "u-17", Role.VIEWER, False)
EVENT = RecordedEvent(
    1, 2, "acme", "user_set", None, "u-17", "fairlane_admin", "key:1", {"role": "viewer"}, "done", None
)
REPLAY = LogReplay(
    *("replay-1", "yesterday", "m", "2", "1", ("acme",), 1, 2, 0.5, None, 200),
    *((ReplayRange("priority.p.normal", 0, 1, 9),), LogReplayState.RUNNING, "why", "key:1", "", 3, 4, None),
    *(ReplayProgress(answered={"candidate": 1}, per_s=0.5, remaining_s=1.0), None),
)
FACTS: dict[str, Any] = {
    "topic": "dead-letter.work",
    "partition": 0,
    "offset": 12,
    "died_at_ms": 1,
    "bytes": 2,
    "record": None,
    "problem": "unreadable",
    "request_id": None,
    "replay_of": None,
    "tenant": "acme",
    "model": None,
    "exception": "E",
    "message": "why",
    "original": None,
    "original_at_ms": None,
}
WISH = {"model": "m", "candidate": "2", "from": "2026-01-31T12:00:00Z"}
FINDING = FoundDrift(
    *("drift-0123456789abcdef", "acme", "m", "generate", "1", "refusals"),
    *(0.5, 17.0, 16.0),
    since_ms=1,
    until_ms=2,
    blocks=7,
    before={"refused": 0.1},
    now={"refused": 0.6},
    found_at_ms=3,
)
EXAMPLES = 6


async def authenticate(connection: HTTPConnection) -> Identity:
    if connection.headers.get("authorization") != HEADERS["authorization"]:
        raise GatewayError(401, "invalid_api_key", "no identity")
    return Identity(DEPLOYMENT, KEY_ID, Role.ADMIN)


class Store:
    """Base of the doubles."""

    def __init__(self, *_parts: object) -> None:
        pass

    def close(self) -> None:
        """Nothing to close."""


class Keys(Store):
    def list(self, tenant: str | None, **_: Any) -> Sequence[ApiKey]:
        return [KEY, replace(KEY, key_id="f" * 16, tenant=DEPLOYMENT, role=Role.ADMIN, scopes=(), expires_at_ms=9)]

    def create(self, *_: Any, **__: Any) -> IssuedKey:
        return IssuedKey(KEY, "fl_")

    def rotate(self, key_id: str, *_: Any, **__: Any) -> IssuedKey:
        return IssuedKey(self.revoke(key_id), "fl_")

    def revoke(self, key_id: str, **_: Any) -> ApiKey:
        if key_id != KEY_ID:
            raise KeyNotFoundError("there is no key with this id")
        return KEY

    def users(self, *_: Any) -> Sequence[User]:
        return [USER]

    def set_user(self, tenant: str, subject: str, role: Role, **_: Any) -> User:
        return User(tenant, subject, role, False)


class Audit(Store):
    def list(self, *_: Any) -> Sequence[RecordedEvent]:
        return [EVENT]


class MemoryTenants(Store):
    def read(self) -> dict[str, TenantSpec | None]:
        return {"acme": TenantSpec("acme", managed_by=API), "file": TenantSpec("file"), "unreadable": None}

    def set(self, wanted: TenantSpec, etag: str | None, author: object, *, adopt: bool, restore: bool) -> TenantChange:
        return decide_set(self.read(), wanted, etag, adopt=adopt, restore=restore)

    def remove(self, tenant: str, etag: str | None, author: object) -> Sequence[ApiKey]:
        decide_removal(self.read(), tenant, etag)
        return [KEY]


class Office(Store):
    def page(self, *_: Any) -> LetterPage:
        return LetterPage([{**FACTS, "replayed_as": ["again"]}], ("dead-letter.work", 0, 13))

    def letter(self, place: Any, *_: Any) -> dict[str, Any] | None:
        return {**FACTS, "headers": {}, "content": None} if place.offset == 12 else None

    payload = letter

    def replay(self, *_: Any, **__: Any) -> ReplayReport:
        return ReplayReport([ReplayResult(SourceCoordinate("dead-letter.work", 0, 1), "skipped", reason="why")], 1, 2)

    def purge(self, *_: Any, **__: Any) -> list[Cut]:
        return [Cut("dead-letter.work", 0, 3, 2, 1)]


class MemoryModels(Store):
    """Decides as the real one does, on records that never change."""

    def read(self) -> dict[str, ModelRecord | None]:
        return {"m/1": VERSION, "m/2": replace(VERSION, version="2"), "m": route_of_one(VERSION), "unreadable": None}

    def change(self, model: str, revision: int | None, decide: Callable[[Published], ModelRoute]) -> ModelRoute:
        if model != "m":
            raise ModelNotFoundError("there is no such model")
        if revision not in (None, 1):
            raise ModelChangedError("it was changed since it was read")
        try:
            return decide(self.read())
        except (NoRolloutError, NoShadowError) as error:
            raise ModelConflictError(str(error)) from None
        except ValueError as error:
            raise invalid_change(error) from None

    def register(self, version: ModelVersion, author: Author) -> ModelVersion:
        return registered(version, None, author, API)

    def history(self, *_: Any) -> Sequence[RouteChange]:
        return [RouteChange(1, {"champion": "1"}, {}, [], [], 1, "key:1", "", API, None)]

    def shadow_report(self, run: str, most: int) -> ShadowReport:
        return ShadowReport(run, ShadowCounts({"copied": most}, {}), ())

    def decisions(self, *_: Any) -> Sequence[RouteChange]:
        return [RouteChange(2, {"champion": "1"}, {}, [], [], 1, "key:1", "", API, {"rollout": "2-1"})]


class Replays(Store):
    """One running replay; steered as the real one."""

    def get(self, wanted: str) -> LogReplay:
        if wanted != "yesterday":
            raise LogReplayNotFoundError("no replay has this id or name")
        return REPLAY

    def page(self, *_: Any) -> Sequence[LogReplay]:
        return [REPLAY, REPLAY]

    def create(self, plan: LogReplayPlan, against: str, author: str) -> LogReplay:
        if plan.name == "yesterday":
            raise LogReplayStateError("another replay has the name yesterday")
        return replace(REPLAY, name=plan.name, against=against, created_by=author, state=LogReplayState.PLANNED)

    def steer(self, wanted: str, action: LogReplayAction, *_: Any) -> LogReplay:
        if action is LogReplayAction.RESUME:
            raise LogReplayStateError("the replay is running")
        return self.get(wanted)

    def report(self, wanted: str) -> tuple[LogReplay, dict[str, Any]]:
        return self.get(wanted), asdict(judge_replay([ReplayTally("classify", pairs=3)]))


class Watch(Store):
    def loads(self) -> tuple[LoadView, str | None]:
        return LoadBoard().view(1), "nothing comes"


class Findings(Store):
    def page(self, *_: Any) -> Sequence[FoundDrift]:
        return [FINDING]

    def get(self, finding_id: str) -> tuple[FoundDrift, Sequence[DriftSample]] | None:
        return (FINDING, [DriftSample("r", 2.0, 1)]) if finding_id == FINDING.finding_id else None

    def statistics(self, *_: Any) -> Sequence[StatisticState]:
        return [StatisticState("acme", "m", "generate", "", "prompt_tokens", "reference", 3, 1)]


SET = StoredSet("holdout", 1, "d" * 64, 2, 100, 1, "key:1", None, 2, 0)
HEAD = RunHead("holdout", 1, "d" * 64, 2, "m/1", "m", "exact", {"priority": "low"}, JudgeUse("j", "good", "r" * 64))
RUN = StoredRun(
    *("0123456789abcdef", HEAD, "finished", 1, "key:1", None, 2),
    RunResult(0.5, 0.1, 0.9, 2, 0, {}, {"1": 2}, 10, 20),
    {"is_fall": False},
    2,
)
LABEL_TASK = LabelTask(KEY_ID, "generate", "m", "1", None, {"prompt": "p"}, {"text": "t"}, None, 1)


class MemoryEvaluations(Store):
    def add_set(self, tenant: str, name: str, examples: EvaluationSet, author: str) -> tuple[StoredSet, bool]:
        return replace(SET, name=name, examples=len(examples.examples)), name != "holdout"

    def sets(self, *_: Any) -> Sequence[StoredSet]:
        return [SET]

    def find_set(self, tenant: str, name: str, version: int | None) -> StoredSet:
        if (name, version) != ("holdout", 1):
            raise UnknownEvaluationError("there is no such set", "set")
        return SET

    def examples(self, tenant: str, name: str, version: int, after: int, most: int, author: str) -> Any:
        self.find_set(tenant, name, version)
        return [(after + 1, {"id": "a", "input": {"prompt": "p"}})]

    def remove_set(self, tenant: str, name: str, version: int, author: str) -> StoredSet:
        return self.find_set(tenant, name, version)

    def runs(self, *_: Any) -> Sequence[StoredRun]:
        return [RUN]

    def find_run(self, tenant: str, run_id: str) -> StoredRun:
        if run_id != RUN.run_id:
            raise UnknownEvaluationError("there is no such run", "run")
        return RUN

    def comparison(self, tenant: str, baseline: str, run_id: str) -> PairedComparison | None:
        self.find_run(tenant, run_id)
        if baseline != run_id:
            raise EvaluationStoreError("they differ in the set", "baseline")
        return PairedComparison(2, 1, 0, 0.5, 0.1, 0.9, 0.5, True)

    def schedules(self, *_: Any) -> Sequence[EvaluationSchedule]:
        return [EvaluationSchedule("m", "holdout", "exact", {}, None, 24.0)]

    def set_schedule(self, tenant: str, schedule: EvaluationSchedule, author: str) -> EvaluationSchedule:
        check_schedule_as_stored(schedule)
        return schedule

    def remove_schedule(self, tenant: str, model: str, author: str) -> None:
        if model != "m":
            raise UnknownEvaluationError("there is no such schedule", "model")

    def calibrations(self, *_: Any) -> Sequence[JudgeCalibration]:
        agreement = JudgeAgreement(2, 2, None, None, None, None, (0.0, 0.25, 0.5, 0.75, 1.0), "2 rated examples")
        return [JudgeCalibration("c", "j", "1", "good", "r" * 64, "rated", 1, "d" * 64, agreement, 1, "key:1")]


def check_schedule_as_stored(schedule: EvaluationSchedule) -> None:
    try:
        check_schedule(schedule)
    except ValueError as error:
        raise EvaluationStoreError(str(error), "every_hours") from None


class MemoryLabels(Store):
    def lease(self, tenant: str, *_: Any) -> LabelTask | None:
        if tenant == "denied":
            raise LabelError("denied does not allow evaluation")
        return LABEL_TASK if tenant == "acme" else None

    def submit(self, tenant: str, reviewer: str, request_id: str, label: str, correction: str | None) -> ItemOutcome:
        if request_id != KEY_ID:
            raise UnknownLabelItemError("no item")
        return ItemOutcome(ItemState.AGREED, label)

    def skip(self, tenant: str, reviewer: str, request_id: str) -> ItemOutcome:
        return replace(self.submit(tenant, reviewer, request_id, "bad", None), state=ItemState.OPEN, label=None)

    def set_gold(self, tenant: str, request_id: str, label: str | None, author: str) -> None:
        self.submit(tenant, author, request_id, label or "", None)

    def statistics(self, *_: Any) -> Any:
        return {"open": 1}, [ReviewerStatistics("key:1", 1, 0, 1, 1, 1, 1)]

    def export(self, *_: Any, **__: Any) -> ExportPage:
        return ExportPage([{"id": KEY_ID}], 1, (1, KEY_ID))


AUTHENTICATION = SimpleNamespace(authenticator=authenticate)


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    doubles: dict[str, type] = {
        "ApiKeys": Keys,
        "AdminAudit": Audit,
        "Tenants": MemoryTenants,
        "DeadLetterOffice": Office,
    }
    with ExitStack() as patched:
        patched.enter_context(patch("producers.admin.app.authentication", lambda *_parts, **_more: AUTHENTICATION))
        doubles |= {
            "ModelRoutes": MemoryModels,
            "Observer": Watch,
            "LogReplayOffice": Replays,
            "DriftFindings": Findings,
            "TenantEvaluations": MemoryEvaluations,
            "TenantLabels": MemoryLabels,
        }
        for name, double in doubles.items():
            patched.enter_context(patch(f"producers.admin.app.{name}", double))
        api = AdminApi(Settings())
        api.app.router.lifespan_context = type(api.app)().router.lifespan_context
        yield patched.enter_context(probing(api.app))


def routes() -> list[tuple[Route, GenerationMode]]:
    with patch("producers.admin.app.authentication", lambda *_parts, **_more: AUTHENTICATION):
        found = sorted(operations(AdminApi(Settings()).app.openapi()))
    positive = [(route, GenerationMode.POSITIVE) for route in found if route[1].startswith("/v1/admin")]
    takes = ("POST", "PUT")
    return positive + [(route, GenerationMode.NEGATIVE) for route, _ in positive if route[0] in takes]


@pytest.mark.parametrize(("route", "mode"), routes(), ids=str)
def test_no_call_is_answered_otherwise_than_documented(probe: Probe, route: Route, mode: GenerationMode) -> None:
    probe.search(*route, mode, EXAMPLES)


def test_the_usual_calls_are_answered(probe: Probe) -> None:
    name, run = {"tenant": "acme"}, {"run_id": RUN.run_id}
    for route, parts, status in (
        (("GET", "/v1/admin/tenants"), {}, 200),
        (("GET", "/v1/admin/tenants/{tenant}"), {"path_parameters": name}, 200),
        (("GET", "/v1/admin/tenants/{tenant}"), {"path_parameters": {"tenant": "nobody"}}, 404),
        (("GET", "/v1/admin/tenants/{tenant}"), {"path_parameters": {"tenant": "unreadable"}}, 200),
        (("PUT", "/v1/admin/tenants/{tenant}"), {"path_parameters": {"tenant": "new"}, "body": {"weight": 2}}, 201),
        (("PUT", "/v1/admin/tenants/{tenant}"), {"path_parameters": name, "body": {}}, 428),
        (("DELETE", "/v1/admin/tenants/{tenant}"), {"path_parameters": {"tenant": "file"}}, 409),
        (("GET", "/v1/admin/keys"), {}, 200),
        (("GET", "/v1/admin/users"), {}, 200),
        (("GET", "/v1/admin/audit"), {"query": {"limit": 1}}, 200),
        (("GET", "/v1/admin/models"), {}, 200),
        (("GET", "/v1/admin/loads"), {}, 200),
        (("GET", "/v1/admin/replays"), {"query": {"limit": 1}}, 200),
        (("POST", "/v1/admin/replays"), {"body": WISH}, 201),
        (("POST", "/v1/admin/replays"), {"body": {**WISH, "name": "yesterday"}}, 409),
        (("POST", "/v1/admin/replays"), {"body": {**WISH, "candidate": "9"}}, 400),
        (("GET", "/v1/admin/replays/{replay}"), {"path_parameters": {"replay": "yesterday"}}, 200),
        (("GET", "/v1/admin/replays/{replay}"), {"path_parameters": {"replay": "another"}}, 404),
        (("GET", "/v1/admin/replays/{replay}/report"), {"path_parameters": {"replay": "yesterday"}}, 200),
        (("POST", "/v1/admin/replays/{replay}/pause"), {"path_parameters": {"replay": "yesterday"}}, 200),
        (("POST", "/v1/admin/replays/{replay}/resume"), {"path_parameters": {"replay": "yesterday"}}, 409),
        (("GET", "/v1/admin/drift"), {}, 200),
        (("GET", "/v1/admin/drift/statistics"), {}, 200),
        (("GET", "/v1/admin/drift/{finding_id}"), {"path_parameters": {"finding_id": FINDING.finding_id}}, 200),
        (("GET", "/v1/admin/drift/{finding_id}"), {"path_parameters": {"finding_id": "drift-" + "f" * 16}}, 404),
        (("GET", "/v1/admin/dead-letters"), {}, 200),
        (("GET", "/v1/admin/evaluations/{tenant}/sets"), {"path_parameters": name}, 200),
        (("GET", "/v1/admin/evaluations/{tenant}/runs"), {"path_parameters": name}, 200),
        (("GET", "/v1/admin/evaluations/{tenant}/runs/{run_id}"), {"path_parameters": name | run}, 200),
        (("GET", "/v1/admin/evaluations/{tenant}/schedules"), {"path_parameters": name}, 200),
        (("GET", "/v1/admin/evaluations/{tenant}/judges"), {"path_parameters": name}, 200),
        (("POST", "/v1/admin/labels/{tenant}/lease"), {"path_parameters": name}, 200),
        (("POST", "/v1/admin/labels/{tenant}/lease"), {"path_parameters": {"tenant": "denied"}}, 409),
        (("GET", "/v1/admin/labels/{tenant}/statistics"), {"path_parameters": name}, 200),
        (("GET", "/v1/admin/labels/{tenant}/export"), {"path_parameters": name}, 200),
        (("DELETE", "/v1/admin/keys/{key_id}"), {"path_parameters": {"key_id": "f" * 16}}, 404),
    ):
        assert probe.call(route, **parts).status_code == status, route
