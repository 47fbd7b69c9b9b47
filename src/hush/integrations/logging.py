"""Loggers for `hush.Logging(callbacks=[...])`: TensorBoard and MLflow. docs/logging.md."""

import os
from collections.abc import Sequence
from typing import Any

from hush.core.value import check_count
from hush.integrations import require
from hush.training.metrics import StepMetrics, check_sensitive

PREFIX = "sensitive/"
"""Key prefix of metrics that depend on the records and are not covered by the guarantee."""


class MetricsLogger:
    """Callback that writes the public metrics every few steps, and sensitive ones by name.

    Args:
        every: Steps between two writes. Computing epsilon takes some milliseconds.
        sensitive: Names for `StepMetrics.sensitive`, logged with the prefix `sensitive/`. Keep such a
            log as secret as the records.
    """

    def __init__(self, *, every: int = 10, sensitive: Sequence[str] = ()) -> None:
        self._every = check_count("every", every, "it is a number of steps", 1)
        self._sensitive = check_sensitive(sensitive)

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Write the metrics of a step. Evaluations are always written."""
        if step % self._every and not any(name.startswith("evaluation/") for name in metrics):
            return
        sensitive = {PREFIX + name: metrics.sensitive(name) for name in self._sensitive}
        self.write(step, {**metrics, **sensitive})

    def write(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoardLogger(MetricsLogger):
    """Scalars in event files of TensorBoard.

    Args:
        directory: Folder of the event files.
        options: `every` and `sensitive`, as in `MetricsLogger`.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        tensorboard = require("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(directory))

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflowLogger(MetricsLogger):
    """Metrics of an MLflow run.

    Args:
        run_id: Run to log to; None: the active run, which MLflow starts if there is none.
        options: `every` and `sensitive`, as in `MetricsLogger`.
    """

    def __init__(self, run_id: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._mlflow: Any = require("mlflow", "mlflow")
        self._run_id = run_id

    def write(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step, run_id=self._run_id)
