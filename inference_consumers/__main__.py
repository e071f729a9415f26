"""``python -m inference_consumers --pool NAME``"""

import os
import sys
from time import sleep
from typing import Annotated

import typer

from fairlane import logs
from fairlane.clock import now_ms
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.control.published_models import model_topic
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.processes.launcher import Launcher, end_with_launcher
from fairlane_server.processes.start import begin_service
from inference_consumers.app import ConsumerApp
from inference_consumers.engines.protocol import EngineLoadError
from inference_consumers.gpu_workers import GpusError, detect_gpus, gpus_to_use, plan_workers
from inference_consumers.versions.wanted import wanted_versions

log = logs.get_logger(__name__)

_PUBLISHED_POLL_S = 10.0


def run(
    pool: Annotated[str, typer.Option(help="The pool to serve; its models are those that `fairlane models` published")],
    engine: Annotated[
        str | None, typer.Option(help="'simulated' answers without a model, for load tests; every reply says so")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="auto, none, or names like 0,1: one process for each of these GPUs (for each set of "
            "tensor_parallel_size of them), started again when it dies"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="How many processes to run where there is no GPU")
    ] = None,
) -> None:
    """Serve one pool: read its work in micro-batches, run it, answer it.

    Without --gpus and --workers it does so in this process, on the device that DEVICE names.
    """
    end_with_launcher()
    settings = Settings() if engine is None else Settings(engine=engine)
    begin_service(settings, f"consumer-{pool}")
    try:
        if gpus is None and workers is None:
            status = ConsumerApp(settings, pool).run()
        else:
            status = _launch(settings, pool, engine, gpus or "auto", workers or 1)
    except (ClusterError, EngineLoadError, FeedUnavailableError, GpusError) as error:
        typer.echo(f"inference_consumers: {error}", err=True)
        status = 1
    sys.exit(status)


def _launch(settings: Settings, pool: str, engine: str | None, gpus: str, workers: int) -> int:
    simulated = settings.engine == "simulated"
    devices = () if simulated else gpus_to_use(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), detect_gpus)
    each = _gpus_each(settings, pool) if devices else 1
    planned = plan_workers(devices, each, workers, None if settings.engine_threads else os.cpu_count())
    command = [sys.executable, "-m", "inference_consumers", "--pool", pool]
    command += [] if engine is None else ["--engine", engine]
    for one in planned:
        log.info("worker_planned", worker=one.number, gpus=one.devices)
    environments = [one.environment(os.environ, settings.instance_id, settings.metrics_port) for one in planned]
    return Launcher(command, environments, settings.drain_timeout_s).run()


def _gpus_each(settings: Settings, pool: str) -> int:
    """The largest ``tensor_parallel_size`` of the pool's published versions, once there are some. Raises
    ClusterError."""
    models = model_topic(settings, codec_for(settings))
    while True:
        catalog = ModelCatalog.of({key: record for key, record in models.read().items() if record is not None})
        wanted = wanted_versions(catalog, pool, now_ms())
        if wanted:
            return max(one.version.tensor_parallel_size for one in wanted)
        log.warning("nothing_to_serve", pool=pool, reason="no version of the pool's models is published")
        sleep(_PUBLISHED_POLL_S)


if __name__ == "__main__":
    typer.run(run)
