"""``fairlane models register`` and ``sync``: versions with files from folders, storage and registries."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from fairlane import logs
from fairlane.backoff import Backoff
from fairlane.records import ModelRoute, ModelVersion
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.artifacts.digest import DIGEST_PATTERN, ArtifactError
from fairlane_server.artifacts.registration import FetchedArtifact, fetch_artifact, with_artifact
from fairlane_server.artifacts.registry import Registry
from fairlane_server.artifacts.source import StoppedError
from fairlane_server.artifacts.store import artifact_store, mlflow_source
from fairlane_server.artifacts.sync import SyncReport, VersionReader, plan_sync, proposed
from fairlane_server.artifacts.sync_file import FollowedModel, read_followed_models
from fairlane_server.cli.models import author_of
from fairlane_server.cli.output import FAILURE, AsJson, BootstrapServers, fail, settings_with, show
from fairlane_server.control.published_models import key_of, model_topic
from fairlane_server.control.route_change import model_changes
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import API, Author, ImmutableVersionError, Published, registered, versions_of
from fairlane_server.models.models_file import read_models
from fairlane_server.models.routes import version_key
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal

log = logs.get_logger(__name__)

_LONGEST_WAIT_S = 600.0


def register_models(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Versions in the format of models.yaml.")],
    digest: Annotated[
        str | None, typer.Option(metavar="sha256:...", help="The digest that the files of the one version must have.")
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Publish new versions, which get only requests that name them until an alias or a rule does.

    The files of a version with a `source` are downloaded to MODELS_CACHE_DIR, and the version is published with their
    digest. Aliases of the file do not count. The pools must have topics, which `fairlane models apply` creates.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    logs.configure(settings, "models")
    versions = [_with_digest(one, digest) for one in read_models(file).versions]
    if digest is not None and len(versions) != 1:
        fail(f"--digest: {file} has {len(versions)} versions; give each its artifact_digest")
    author = author_of("")
    found = _fetched(settings, file, versions)
    made: list[ModelVersion] = []

    def decided(published: Published) -> tuple[list[ModelRecord], tuple[str, ...]]:
        try:
            made[:] = [_registered(one, found, published, author) for one in versions]
        except ImmutableVersionError as error:
            fail(f"{file}: {error}")
        return [one for one in made if one not in published.values()], ()

    model_changes(settings).make(model_topic(settings, codec_for(settings)), decided)
    names = [key_of(one) for one in made]
    digests = {key_of(one): one.artifact_digest for one in made if one.artifact_digest}
    result: dict[str, object] = {"registered": names}
    if digests:
        result["artifact_digests"] = digests
    lines = (f"{name}: registered" + (f", {digests[name]}" if name in digests else "") for name in names)
    show(result, "\n".join(lines), as_json=as_json)


def _with_digest(version: ModelVersion, digest: str | None) -> ModelVersion:
    if digest is None:
        return version
    if DIGEST_PATTERN.fullmatch(digest) is None:
        fail(f"--digest {digest}: must be sha256: and 64 hexadecimal digits")
    if version.source is None:
        fail(f"--digest: version {version.version} of {version.model} has no source")
    if version.artifact_digest not in (None, digest):
        fail(f"--digest: version {version.version} of {version.model} names another artifact_digest")
    return replace(version, artifact_digest=digest)


def _fetched(settings: Settings, file: Path, versions: list[ModelVersion]) -> dict[str, FetchedArtifact]:
    """By the keys of the versions with a source. Ends the command when one cannot be had."""
    store, found = artifact_store(settings), {}
    for one in versions:
        if one.source is not None:
            try:
                found[key_of(one)] = fetch_artifact(store, one, StopSignal().wait)
            except ArtifactError as error:
                fail(f"{file}: version {one.version} of {one.model}: {error}")
    return found


def _registered(
    version: ModelVersion, found: dict[str, FetchedArtifact], published: Published, author: Author
) -> ModelVersion:
    before = versions_of(published, version.model).get(version.version)
    if artifact := found.get(key_of(version)):
        version = with_artifact(version, artifact, is_new=before is None)
    return registered(version, before, author, API)


def sync_models(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The registered models to follow.")],
    bootstrap_servers: BootstrapServers = None,
    once: Annotated[
        bool, typer.Option("--once", help="One pass; the exit status is 1 if something was wrong.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Time between two passes.")] = 60.0,
    verify_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Time between two readings of all registered files, in the first pass too; 0: never.",
        ),
    ] = 86_400.0,
    *,
    as_json: AsJson = False,
) -> None:
    """Follow an MLflow registry, and register its new versions here.

    No request gets a new version by this: an alias or a rule says so later. Until SIGTERM or Ctrl-C, unless --once.
    Health and metrics are on METRICS_PORT.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    logs.configure(settings, "models")
    followed = read_followed_models(file)
    stop = StopSignal()
    try:
        syncer = Syncer(settings, stop)
        if once:
            report = syncer.run(followed, verify_every)
            show(asdict(report), _text(report), as_json=as_json)
            if not report.is_good:
                raise typer.Exit(FAILURE)
            return
        stop.install()
        _follow(syncer, settings, stop, followed, every, verify_every, as_json=as_json)
    except ArtifactError as error:
        fail(str(error))
    except StoppedError:
        pass


def _follow(
    syncer: "Syncer",
    settings: Settings,
    stop: StopSignal,
    followed: tuple[FollowedModel, ...],
    every_s: float,
    verify_every_s: float,
    *,
    as_json: bool,
) -> None:
    readiness = Readiness("registry")
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    backoff = Backoff(every_s, max(every_s, _LONGEST_WAIT_S))
    failures, shown = 0, SyncReport()
    try:
        while not stop.stopping:
            report = syncer.run(followed, verify_every_s)
            if report != shown:
                typer.echo(json.dumps(asdict(report)) if as_json else _text(report))
                shown = report
            failures = failures + 1 if report.is_away else 0
            readiness.set("registry", "; ".join(report.failed.values()) if report.is_away else None)
            stop.wait(every_s if not failures else backoff.delay_s(failures, random.random()))  # noqa: S311 - jitter
    finally:
        health.stop()


class Syncer:
    """Passes over the followed models. Each does all that is left to do, whatever became of the ones before."""

    def __init__(self, settings: Settings, stop: StopSignal) -> None:
        """Raises ArtifactError for settings that name no registry."""
        self._settings = settings
        self._registry: Registry = mlflow_source(settings)
        self._reader = VersionReader(artifact_store(settings), stop.wait)
        self._control = model_topic(settings, codec_for(settings))

    def run(self, followed: tuple[FollowedModel, ...], verify_every_s: float) -> SyncReport:
        """One pass, in which the files of registered versions are read that were not for so long (0: none). What fails
        is in the report, and does not keep the others from being done. Raises StoppedError."""
        report = SyncReport()
        for one in followed:
            try:
                self._sync(one, report, verify_every_s)
            except (ArtifactError, ClusterError, ValueError) as error:
                # ValueError: the change of the route is refused.
                report.fail(one.template.model, error)
                log.warning("sync_failed", model=one.template.model, reason=str(error))
        return report

    def _sync(self, followed: FollowedModel, report: SyncReport, verify_every_s: float) -> None:
        model = followed.template.model
        listed = self._registry.versions(followed.registered_model)
        plan = plan_sync(followed, listed, versions_of(self._control.read(), model))
        for taken in plan.taken:
            key = version_key(model, f"{followed.version_prefix}{taken.version}")
            report.failed[key] = f"this version is published, and not from {taken.reference}: set a version_prefix"
        found = self._reader.fetch_new(followed, plan.new, report)
        if found:
            self._publish(lambda published: proposed(followed, found, published, author_of("models sync")), report)
        if verify_every_s:
            self._reader.verify(model, plan.known, verify_every_s, report)

    def _publish(self, decide: Callable[[Published], list[ModelRecord]], report: SyncReport) -> None:
        made: list[ModelRecord] = []

        def decided(published: Published) -> tuple[list[ModelRecord], tuple[str, ...]]:
            made[:] = decide(published)
            return made, ()

        model_changes(self._settings).make(self._control, decided)
        report.registered += [key_of(one) for one in made if isinstance(one, ModelVersion)]
        report.aliases |= {
            f"{one.model}@{alias}": version
            for one in made
            if isinstance(one, ModelRoute)
            for alias, version in one.aliases.items()
        }


def _text(report: SyncReport) -> str:
    lines = [f"{name}: registered" for name in report.registered]
    lines += [f"{alias}: {version}" for alias, version in sorted(report.aliases.items())]
    lines += [f"{name}: CHANGED at its source; what is registered stays as it is" for name in report.changed]
    lines += [f"{name}: {reason}" for name, reason in report.failed.items()]
    lines += [f"{len(report.verified)} registered versions are unchanged"] if report.verified else []
    return "\n".join(lines) or "nothing new"
