"""Loggers for `hush.train(callbacks=[...])`: TensorBoard and MLflow. docs/logging.md."""

import os
from collections.abc import Sequence
from typing import Any

from hush.core.value import as_path, check_count
from hush.integrations.extras import require
from hush.training.metrics import StepMetrics, check_sensitive

PREFIX = "sensitive/"
"""What the key of a number begins with that depends on the records and is covered by no charge."""


class MetricsLogger:
    """Callback that writes the public metrics of every so many steps, and sensitive ones by name.

    Args:
        every: steps between lines; composing epsilon takes some milliseconds.
        sensitive: names for `StepMetrics.sensitive`; their keys begin with `sensitive/`. A log that has
            one is as secret as the records.
    """

    def __init__(self, *, every: int = 10, sensitive: Sequence[str] = ()) -> None:
        self._every = check_count("every", every, "it is a number of steps", 1)
        self._sensitive = check_sensitive(sensitive)

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Write the metrics of a step.

        Args:
            step: its number.
            metrics: of that step. Evaluations are always written.
        """
        if step % self._every and not any(name.startswith("evaluation/") for name in metrics):
            return
        values = dict(metrics)
        values |= {PREFIX + name: metrics.sensitive(name) for name in self._sensitive}
        self.write(step, values)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Put the numbers where the log is.

        Args:
            step: that they are of.
            values: by key.
        """
        raise NotImplementedError


class TensorBoardLogger(MetricsLogger):
    """Scalars in event files of TensorBoard.

    Args:
        directory: where the files are written.
        every: as in `MetricsLogger`, and so is `sensitive`.
        sensitive: names of sensitive metrics.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every: int = 10, sensitive: Sequence[str] = ()
    ) -> None:
        super().__init__(every=every, sensitive=sensitive)
        tensorboard = require("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = tensorboard.SummaryWriter(str(as_path("directory", directory)))

    def write(self, step: int, values: dict[str, float]) -> None:
        """One scalar a key, on disk when this returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class MLflowLogger(MetricsLogger):
    """Metrics of an MLflow run.

    Args:
        run_id: of the run; None: the active one, which MLflow begins if there is none.
        every: as in `MetricsLogger`, and so is `sensitive`.
        sensitive: names of sensitive metrics.
    """

    def __init__(
        self, run_id: str | None = None, *, every: int = 10, sensitive: Sequence[str] = ()
    ) -> None:
        super().__init__(every=every, sensitive=sensitive)
        self._mlflow: Any = require("mlflow", "mlflow")
        self._run_id = run_id

    def write(self, step: int, values: dict[str, float]) -> None:
        """All keys at once."""
        self._mlflow.log_metrics(values, step=step, run_id=self._run_id)
