"""`PrivateRegressor`: a scikit-learn regressor with a guarantee."""

import os
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import check_consistent_length, column_or_1d

from hush.core.errors import InvalidValue, short_repr
from hush.integrations.sklearn.estimator import PrivateEstimator, target_or_error
from hush.integrations.sklearn.schema import Array, Numeric, Schema, numbers
from hush.integrations.sklearn.solvers import NumberTargets
from hush.training.tuning.trial import TuningTrial


class PrivateRegressor(RegressorMixin, PrivateEstimator):  # type: ignore[misc]
    """Linear regression or small network whose fit is differentially private.

    Args:
        schema: bounds and categories of the columns, declared: `{"age": Numeric(low=0, high=100), ...}`,
            a list by place, or one `Numeric` for all.
        target: bounds of the target, declared; what lies beyond them is clamped.
        epsilon: of the budget.
        delta: of the budget; None: a tenth of one over the number of records, which is public.
        solver: "least_squares" releases noisy sufficient statistics once (linear models), "sgd" is
            DP-SGD on the squared error; "auto" chooses by the budget and the numbers of records and
            columns (docs/results/estimators.md).
        scaling: "bounds" scales columns and target by their declared bounds, "paid" by a noisy mean and
            variance, for a tenth of epsilon.
        hidden_layer_sizes: widths of hidden layers, tanh between them; none: a linear model.
        steps: of DP-SGD.
        rate: Poisson sampling rate of DP-SGD: the share of the records in a step, on average.
        clip_norm: l2 clipping norm of DP-SGD.
        learning_rate: of DP-SGD, with momentum 0.9.
        ledger: file that all fits are charged to, and whose whole is kept within the budget; None: each
            fit has its own ledger, in memory.
        random_state: seeds all draws, so that they can be repeated: for tests; the guarantee says so.

    Attributes:
        guarantee_: of everything on the ledger after the fit.
        ledger_: the ledger, closed.
        solver_: the solver that ran.

    **Guarantee.** As of `PrivateClassifier`.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        target: Numeric | None = None,
        *,
        epsilon: float = 1.0,
        delta: float | None = None,
        solver: Literal["auto", "least_squares", "sgd"] = "auto",
        scaling: Literal["bounds", "paid"] = "bounds",
        hidden_layer_sizes: Sequence[int] = (),
        steps: int = 100,
        rate: float = 0.25,
        clip_norm: float = 0.5,
        learning_rate: float = 0.1,
        ledger: str | os.PathLike[str] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.schema = schema
        self.target = target
        self.epsilon = epsilon
        self.delta = delta
        self.solver = solver
        self.scaling = scaling
        self.hidden_layer_sizes = hidden_layer_sizes
        self.steps = steps
        self.rate = rate
        self.clip_norm = clip_norm
        self.learning_rate = learning_rate
        self.ledger = ledger
        self.random_state = random_state

    def fit(self, X: Any, y: Any, *, trial: TuningTrial | None = None) -> Self:  # noqa: N803
        """The regressor, fitted within its budget.

        Args:
            X: a data frame or matrix with the schema's columns.
            y: finite numbers.
            trial: of `hush.tune`: its plan, steps and ledger are used in place of the estimator's own.

        Returns:
            Itself, with `guarantee_` and `ledger_`.
        """
        target = self._target()
        encoded = self._encode(X, reset=True)
        values = numbers("y", column_or_1d(target_or_error(self, y), warn=True))
        check_consistent_length(encoded.numeric, values)
        return self._fit(encoded, NumberTargets(target.scale(values)[:, None]), trial)

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Predicted target of each record, within the declared bounds.

        Args:
            X: a data frame or matrix with the schema's columns.
        """
        return self._target().unscale(self._outputs(X)[:, 0])

    def _target(self) -> Numeric:
        if not isinstance(self.target, Numeric):
            raise InvalidValue(
                f"target={short_repr(self.target)} must declare the target's bounds: the largest value "
                "among the records is somebody's. Pass e.g. target=Numeric(low=0, high=100).",
                key="target",
            )
        return self.target
