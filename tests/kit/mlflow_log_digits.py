"""``python mlflow_log_digits.py URL NAME FOLDER ACCURACY``: log and register a model with MLflow's client.

Runs in MLflow's environment, which has nothing of Fairlane.
"""

import sys
from typing import Any

import mlflow
import numpy as np
from mlflow.models import ModelSignature
from mlflow.types.schema import Schema, TensorSpec


class Unused(mlflow.pyfunc.PythonModel):  # type: ignore[misc]  # its environment has it, the checker's has not
    """What MLflow would serve; Fairlane takes the files below ``artifacts``."""

    def predict(self, context: object, model_input: Any) -> Any:
        return model_input


def main() -> None:
    url, name, folder, accuracy = sys.argv[1:]
    mlflow.set_tracking_uri(url)
    signature = ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("uint8"), (-1, 8, 8), "image")]),
        outputs=Schema([TensorSpec(np.dtype("float32"), (-1, 10), "scores")]),
    )
    with mlflow.start_run():
        mlflow.log_metric("accuracy", float(accuracy))
        logged = mlflow.pyfunc.log_model(
            name="model",
            python_model=Unused(),
            artifacts={"digits": folder},
            signature=signature,
            pip_requirements=["torch==2.13.0"],
            registered_model_name=name,
        )
        mlflow.log_metric("recall", 0.5, model_id=logged.model_id)
    print(logged.registered_model_version)  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    main()
