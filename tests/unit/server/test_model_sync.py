"""Following a registry: what is new, what is proposed, and the file that says whom to follow."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from fairlane.records import ModelMetric, ModelRoute, ModelVersion
from fairlane_server.artifacts.description import Description, described_by
from fairlane_server.artifacts.digest import ArtifactError, digest_of_folder
from fairlane_server.artifacts.folder import FolderSource
from fairlane_server.artifacts.registration import FetchedArtifact, fetch_artifact, with_artifact
from fairlane_server.artifacts.registry import RegistryVersion
from fairlane_server.artifacts.source import ArtifactUnavailableError, ResolvedArtifact
from fairlane_server.artifacts.sync import MOST_NEW, SyncReport, VersionReader, name_here, plan_sync, proposed
from fairlane_server.artifacts.sync_file import FollowedModel, read_followed_models
from fairlane_server.control.published_models import key_of
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import API, Author, ImmutableVersionError
from fairlane_server.yaml_config import ConfigError
from tests.kit.artifact_kit import FILES, never_stop, store_of, write_files

TEMPLATE = ModelVersion("digits", "0", "encode", "torch-classifier", ("classify",), ".", 1, 0)
FOLLOWED = FollowedModel("classifier", TEMPLATE, version_prefix="r")
AUTHOR = Author("ops@desk", 1_000, "models sync")
DIGEST, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
ROUTE = ModelRoute("digits", 3, {"champion": "1"}, {})
FIRST = replace(TEMPLATE, version="1")


def listed(number: int, *, ready: bool = True) -> RegistryVersion:
    return RegistryVersion("classifier", str(number), ready)


def found(number: int, digest: str = DIGEST) -> tuple[RegistryVersion, FetchedArtifact]:
    return listed(number), FetchedArtifact(
        f"models:/classifier/{number}", digest, (ModelMetric("accuracy", 0.9),), Description("{}", ("torch",))
    )


def published(*records: ModelRecord) -> dict[str, ModelRecord | None]:
    return {key_of(record): record for record in records}


def registered(number: int, digest: str | None = DIGEST, source: str | None = None) -> ModelVersion:
    source = source or f"models:/classifier/{number}"
    return replace(TEMPLATE, version=f"r{number}", source=source, artifact_digest=digest)


@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.integers(1, 60))
def test_every_version_is_registered_once_in_the_order_of_the_registry(
    numbers: set[int], here: set[int], first: int
) -> None:
    followed = replace(FOLLOWED, first_version=first)
    everything = [listed(number) for number in sorted(numbers)]
    present = {f"r{number}": registered(number) for number in here}
    seen: list[RegistryVersion] = []
    while new := plan_sync(followed, everything, present).new:
        assert len(new) <= MOST_NEW
        seen += new
        present |= {name_here(followed, one): registered(int(one.version)) for one in new}
    assert seen == [one for one in everything if int(one.version) >= first and int(one.version) not in here]
    assert len(plan_sync(followed, everything, present).known) == sum(number >= first for number in numbers)


def test_incomplete_versions_wait_and_versions_from_elsewhere_stay_as_they_are() -> None:
    plan = plan_sync(
        FOLLOWED,
        [listed(1, ready=False), listed(2), listed(3), listed(4)],
        {"r2": registered(2, source="s3://models/2"), "r3": registered(3, digest=None), "r4": registered(4)},
    )
    assert plan.new == ()
    assert plan.taken == (listed(2), listed(3))
    assert plan.known == ((listed(4), registered(4)),)


def test_a_version_is_registered_with_what_the_registry_knows_and_no_alias_moves() -> None:
    (made,) = proposed(FOLLOWED, [found(7)], published(FIRST, ROUTE), AUTHOR)
    assert made == replace(
        registered(7),
        metrics=(ModelMetric("accuracy", 0.9),),
        signature="{}",
        requirements=("torch",),
        registered_at_ms=1_000,
        registered_by="ops@desk",
        managed_by=API,
    )


def test_the_alias_moves_to_the_last_of_the_new_versions_and_the_champion_stays() -> None:
    followed = replace(FOLLOWED, alias="candidate")
    *versions, route = proposed(followed, [found(7), found(8)], published(FIRST, ROUTE), AUTHOR)
    assert [key_of(one) for one in versions] == ["digits/r7", "digits/r8"]
    assert isinstance(route, ModelRoute)
    assert (route.aliases, route.revision, route.reason) == ({"champion": "1", "candidate": "r8"}, 4, "models sync")


def test_the_alias_does_not_go_back_to_a_version_that_could_be_read_late() -> None:
    followed = replace(FOLLOWED, alias="candidate")
    route = replace(ROUTE, aliases={"champion": "1", "candidate": "r8"})
    elsewhere = registered(50, source="s3://models/50")
    here = published(FIRST, route, registered(8), elsewhere)
    assert [key_of(one) for one in proposed(followed, [found(7)], here, AUTHOR)] == ["digits/r7"]
    *versions, moved = proposed(followed, [found(7), found(9)], here, AUTHOR)
    assert [key_of(one) for one in versions] == ["digits/r7", "digits/r9"]
    assert isinstance(moved, ModelRoute)
    assert moved.aliases["candidate"] == "r9"


def test_without_a_champion_no_alias_is_set() -> None:
    """The first alias of a model would be its champion, and get all traffic."""
    made = proposed(replace(FOLLOWED, alias="candidate"), [found(7)], {}, AUTHOR)
    assert [key_of(one) for one in made] == ["digits/r7"]


def test_a_version_that_was_published_meanwhile_stays() -> None:
    followed = replace(FOLLOWED, alias="candidate")
    assert proposed(followed, [found(7)], published(FIRST, ROUTE, registered(7)), AUTHOR) == []
    with pytest.raises(ImmutableVersionError, match="digits/r7 is published with other files now"):
        proposed(followed, [found(7, OTHER)], published(FIRST, ROUTE, registered(7)), AUTHOR)


def test_a_registered_version_keeps_what_it_was_described_by() -> None:
    asked = replace(TEMPLATE, source="models:/classifier@best", metrics=(ModelMetric("own", 1.0),))
    _, artifact = found(7)
    new = with_artifact(asked, artifact, is_new=True)
    assert (new.source, new.artifact_digest, new.metrics) == ("models:/classifier/7", DIGEST, asked.metrics)
    assert (new.signature, new.requirements) == ("{}", ("torch",))
    again = with_artifact(replace(asked, metrics=()), artifact, is_new=False)
    assert (again.source, again.metrics, again.requirements) == ("models:/classifier/7", (), ())


class Shelf(FolderSource):
    """A registry's versions, each a folder with its number."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.away: set[str] = set()
        self.read: list[str] = []

    def resolve(self, reference: str) -> ResolvedArtifact:
        number = reference.rpartition("/")[2]
        if number in self.away:
            raise ArtifactUnavailableError("the registry is away")
        self.read.append(number)
        return replace(super().resolve(number), source=reference)


def test_files_are_read_once_in_a_while_each_and_a_changed_one_is_an_alarm_until_it_is_read_unchanged(
    tmp_path: Path,
) -> None:
    now_s, shelf, model = 0.0, Shelf(tmp_path), f"verified-{uuid4().hex}"
    store = store_of(tmp_path / "cache", {"models:/": lambda: shelf})
    folders = {number: write_files(tmp_path / str(number), {"a": b"%d" % number}) for number in (1, 2)}
    known = [(listed(number), registered(number, digest_of_folder(folder))) for number, folder in folders.items()]
    reader = VersionReader(store, never_stop, lambda: now_s)

    def verified(known: Sequence[tuple[RegistryVersion, ModelVersion]] = known) -> tuple[SyncReport, float | None]:
        report = SyncReport()
        shelf.read.clear()
        reader.verify(model, known, 100.0, report)
        return report, REGISTRY.get_sample_value("fairlane_artifacts_changed", {"model": model})

    assert verified() == (SyncReport(verified=[f"{model}/r1", f"{model}/r2"]), 0)
    now_s = 99.0
    assert verified() == (SyncReport(), 0)
    assert shelf.read == []

    (folders[1] / "a").write_bytes(b"other")
    shelf.away = {"2"}
    now_s = 100.0
    report, gauge = verified()
    assert (report.changed, report.failed, gauge) == ([f"{model}/r1"], {f"{model}/r2": "the registry is away"}, 1)
    shelf.away = {"1", "2"}
    assert verified()[1] == 1
    shelf.away = set()
    report, gauge = verified()
    assert (report.changed, report.verified, gauge) == ([], [f"{model}/r2"], 1), "only what was away is read again"

    now_s = 200.0
    shelf.away = {"1"}
    assert verified()[1] == 1, "an alarm does not end because its source is away"
    (folders[1] / "a").write_bytes(b"1")
    shelf.away = set()
    report, gauge = verified()
    assert (report.verified, gauge) == ([f"{model}/r1"], 0)

    (folders[1] / "a").write_bytes(b"other")
    now_s = 300.0
    assert verified()[1] == 1
    assert verified(known[1:])[1] == 0, "nor does it outlive its version"


def test_a_path_that_is_not_in_the_artifact_is_refused(tmp_path: Path) -> None:
    origin = write_files(tmp_path / "origin", FILES)
    asked = replace(TEMPLATE, source=str(origin), path="weights")
    assert fetch_artifact(store_of(tmp_path / "cache"), asked, never_stop).source == str(origin)
    with pytest.raises(ArtifactError, match="path: there is no 'digits' in "):
        fetch_artifact(store_of(tmp_path / "cache"), replace(asked, path="digits"), never_stop)


MLMODEL = """\
artifact_path: &name model
name: *name
signature:
  inputs: '[{"type": "string", "name": "text"}]'
  outputs: '[{"type": "double"}]'
  params: null
"""


def test_a_folder_as_mlflow_writes_it_describes_itself(tmp_path: Path) -> None:
    assert described_by(tmp_path) == Description()
    (tmp_path / "MLmodel").write_text(MLMODEL)
    (tmp_path / "requirements.txt").write_text("# pins\nmlflow==3.17.2\n\ntorch==2.13.0\ntorch==2.13.0\n")
    described = described_by(tmp_path)
    assert described.requirements == ("mlflow==3.17.2", "torch==2.13.0")
    assert json.loads(described.signature or "") == {
        "inputs": [{"type": "string", "name": "text"}],
        "outputs": [{"type": "double"}],
    }
    (tmp_path / "MLmodel").write_text("flavors: {}\n")
    assert described_by(tmp_path).signature is None


REQUIREMENTS = """\
--extra-index-url https://me:s3cret@packages.example/simple
-i \\
  https://me:s3cret@packages.example/other
-r https://me:s3cret@packages.example/more.txt
mine @ git+https://s3cret@github.example/us/mine@v1.0#egg=mine
other @ https://me:s3cret@packages.example/other.whl?token=s3cret#sha256=12
torch==2.13.0 \\
    --hash=sha256:12 \\
    --hash=sha256:34
numpy>=2; python_version > "3.10"
"""


def test_no_credentials_of_requirements_are_published(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS)
    requirements = described_by(tmp_path).requirements
    assert requirements == (
        "mine @ git+https://github.example/us/mine@v1.0#egg=mine",
        "other @ https://packages.example/other.whl#sha256=12",
        "torch==2.13.0",
        'numpy>=2; python_version > "3.10"',
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("MLmodel", b"signature: {inputs: 'no json'}"),
        ("MLmodel", b"a: &a {x: 1}\nb: {<<: [*a, *a]}\n"),
        ("MLmodel", b"signature: {inputs: !!python/object/apply:os.system ['x']}"),
        ("MLmodel", b"["),
        ("MLmodel", b"x" * (1 << 20) + b"x"),
        ("MLmodel", b"\xff"),
        ("requirements.txt", b"x\n" * 1 + b"\n".join(b"p%d" % number for number in range(501))),
        ("requirements.txt", b"x" * 301),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=name):
        described_by(tmp_path)


CONFIG = """\
models:
  - registered_model: digits classifier
    model: digits
    version_prefix: r
    first_version: 3
    alias: candidate
    pool: encode
    engine: torch-classifier
    tasks: [classify]
    path: artifacts/digits
    limits: {max_context_tokens: 1, max_output_tokens: 0}
"""


def test_a_file_says_whom_to_follow(tmp_path: Path) -> None:
    (tmp_path / "sync.yaml").write_text(CONFIG)
    (followed,) = read_followed_models(tmp_path / "sync.yaml")
    template = replace(TEMPLATE, path="artifacts/digits")
    assert followed == FollowedModel("digits classifier", template, "r", 3, "candidate")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("alias: candidate", "alias: champion", "'champion' gets all traffic"),
        ("alias: candidate", "alias: Best", "does not match"),
        ("alias: candidate", "alias: rollout-candidate", "'rollout-candidate' is an arm of rollouts"),
        ("first_version: 3", "first_version: 0", "must be from 1 to"),
        ("digits classifier", "x' OR '1", "does not match"),
        ("version_prefix: r", "version: r", "unknown key"),
        ("version_prefix: r", "source: s3://x/y", "unknown key"),
        ("    pool: encode\n", "", "missing: pool"),
        ("models:\n", "models: []\nmore:\n", "unknown key"),
        ("models:\n", CONFIG, "is already filled by another entry"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, old: str, new: str, reason: str) -> None:
    (tmp_path / "sync.yaml").write_text(CONFIG.replace(old, new, 1))
    with pytest.raises(ConfigError, match=reason):
        read_followed_models(tmp_path / "sync.yaml")
