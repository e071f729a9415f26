"""``python -m inference_consumers --pool NAME``"""

import os
import sys
from typing import Annotated

import typer

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.models.models_file import load_models
from fairlane_server.processes.launcher import Launcher, end_with_launcher
from fairlane_server.processes.start import begin_service
from fairlane_server.yaml_config import ConfigError
from inference_consumers.app import ConsumerApp, NoSuchPoolError, models_of
from inference_consumers.engines.protocol import EngineLoadError
from inference_consumers.gpu_workers import GpusError, detect_gpus, gpus_to_use, plan_workers

log = logs.get_logger(__name__)


def run(
    pool: Annotated[str, typer.Option(help="The pool to serve; its models are those of models.yaml")],
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
    except (ConfigError, NoSuchPoolError, EngineLoadError, GpusError) as error:
        typer.echo(f"inference_consumers: {error}", err=True)
        status = 1
    sys.exit(status)


def _launch(settings: Settings, pool: str, engine: str | None, gpus: str, workers: int) -> int:
    models = models_of(load_models(settings.models_file), pool, settings.models_file)
    simulated = settings.engine == "simulated"
    devices = () if simulated else gpus_to_use(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), detect_gpus)
    each = max(model.tensor_parallel_size for model in models)
    planned = plan_workers(devices, each, workers, None if settings.engine_threads else os.cpu_count())
    command = [sys.executable, "-m", "inference_consumers", "--pool", pool]
    command += [] if engine is None else ["--engine", engine]
    for one in planned:
        log.info("worker_planned", worker=one.number, gpus=one.devices)
    environments = [one.environment(os.environ, settings.instance_id, settings.metrics_port) for one in planned]
    return Launcher(command, environments, settings.drain_timeout_s).run()


if __name__ == "__main__":
    typer.run(run)
