"""`PrivateClassifier`: a scikit-learn classifier with a guarantee."""

import os
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from hush.integrations.sklearn.estimator import PrivateEstimator, target_or_error
from hush.integrations.sklearn.schema import Array, Schema, distinct, indices
from hush.integrations.sklearn.solvers import ClassTargets
from hush.training.tuning.trial import TuningTrial

_SMALL = 0.01
"""Probability below which outputs of least squares are mapped to positive numbers, in their order."""


class PrivateClassifier(ClassifierMixin, PrivateEstimator):  # type: ignore[misc]
    """Linear classifier or small network whose fit is differentially private.

    Args:
        schema: bounds and categories of the columns, declared: `{"age": Numeric(low=0, high=100), ...}`,
            a list by place, or one `Numeric` for all.
        classes: every label that may occur, declared.
        epsilon: of the budget.
        delta: of the budget; None: a tenth of one over the number of records, which is public.
        solver: "least_squares" releases noisy sufficient statistics once (linear models, classes as
            targets), "sgd" is DP-SGD on the cross-entropy; "auto" is "sgd", which was better in every
            measurement (docs/results/estimators.md).
        scaling: "bounds" scales columns by their declared bounds, "paid" by a noisy mean and variance,
            for a tenth of epsilon.
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
        classes_: the declared classes, sorted.
        solver_: the solver that ran.

    **Guarantee.** Everything that `fit` keeps satisfies `guarantee_`, for zero-out neighbours; the
    number of records, the schema, the classes and all parameters are public:
    docs/guarantees/least-squares.md and poisson-gaussian.md. Scores on the training records are not
    part of it.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        classes: Sequence[Hashable] | None = None,
        *,
        epsilon: float = 1.0,
        delta: float | None = None,
        solver: Literal["auto", "least_squares", "sgd"] = "auto",
        scaling: Literal["bounds", "paid"] = "bounds",
        hidden_layer_sizes: Sequence[int] = (),
        steps: int = 100,
        rate: float = 0.25,
        clip_norm: float = 0.5,
        learning_rate: float = 1.0,
        ledger: str | os.PathLike[str] | None = None,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.schema = schema
        self.classes = classes
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

    def fit(self, X: Any, y: Any, *, trial: TuningTrial | None = None) -> Self:  # noqa: N803  (scikit-learn's name)
        """The classifier, fitted within its budget.

        Args:
            X: a data frame or matrix with the schema's columns.
            y: labels, all of them declared in `classes`.
            trial: of `hush.tune`: its plan, steps and ledger are used in place of the estimator's own.

        Returns:
            Itself, with `guarantee_` and `ledger_`.
        """
        declared = np.unique(np.asarray(distinct("classes", self.classes, (0, 1))))
        encoded = self._encode(X, reset=True)
        labels = column_or_1d(target_or_error(self, y), warn=True)
        check_classification_targets(labels)
        check_consistent_length(encoded.numeric, labels)
        places = indices(labels, declared.tolist(), "y", "classes")
        self._fit(encoded, ClassTargets(places, len(declared)), trial)
        self.classes_ = declared
        return self

    def decision_function(self, X: Any) -> Array:  # noqa: N803
        """Outputs of the model, a column a class; for two classes, those of the second less the first's.

        Args:
            X: a data frame or matrix with the schema's columns.
        """
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probabilities of the classes, a column each in the order of `classes_`.

        The softmax of a model of the cross-entropy. The outputs of least squares estimate probabilities
        themselves: those below 0.01, and negative ones, are mapped to (0, 0.01), and all are normalised.

        Args:
            X: a data frame or matrix with the schema's columns.
        """
        outputs = self._outputs(X)
        if self.solver_ == "sgd":
            weights = np.exp(outputs - outputs.max(1, keepdims=True))
        else:
            shares = outputs + 1 / outputs.shape[1]
            weights = np.where(
                shares < _SMALL, _SMALL * np.exp(np.minimum(shares / _SMALL - 1, 0)), shares
            )
        probabilities: Array = weights / weights.sum(1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Class of the largest output for each record.

        Args:
            X: a data frame or matrix with the schema's columns.
        """
        places = self._outputs(X).argmax(1)
        labels: npt.NDArray[Any] = self.classes_[places]
        return labels
