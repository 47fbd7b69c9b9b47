"""Differentially private scikit-learn estimators: `PrivateClassifier` and `PrivateRegressor`."""

import os
import sys
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.core.errors import BudgetExceeded, InvalidValue, PrivacyWarning, Unsupported, short_repr
from hush.core.guarantee import Budget, Guarantee, advised_delta, check_delta
from hush.core.plan import Plan
from hush.core.value import check_count
from hush.integrations.sklearn import fitting
from hush.integrations.sklearn.fitting import FittedModel, Targets
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.schema import (
    Array,
    Encoded,
    Numeric,
    Schema,
    distinct,
    encode,
    indices,
    numbers,
)
from hush.training.trial import TuningTrial

_SMALL = 0.01
"""Least-squares outputs below this probability are mapped to positive numbers; their order is kept."""
_SEVERAL_FITS = {
    "model_selection",
    "ensemble",
    "multiclass",
    "multioutput",
    "calibration",
    "feature_selection",
}
"""Modules of scikit-learn that fit several clones of an estimator to the same records."""
_RESAMPLING = ("sklearn.ensemble._bagging", "sklearn.ensemble._weight_boosting")
"""Modules of scikit-learn that draw records with replacement before calling `fit`."""


@dataclass(repr=False, eq=False)
class _PrivateEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    schema: Schema | None = None
    epsilon: float = field(default=1.0, kw_only=True)
    delta: float | None = field(default=None, kw_only=True)
    solver: Literal["auto", "least_squares", "sgd"] = field(default="auto", kw_only=True)
    hidden_layer_sizes: Sequence[int] = field(default=(), kw_only=True)
    steps: int = field(default=100, kw_only=True)
    rate: float = field(default=0.25, kw_only=True)
    clip_norm: float = field(default=0.5, kw_only=True)
    learning_rate: float = field(default=1.0, kw_only=True)
    ledger: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    fits: int | None = field(default=None, kw_only=True)
    random_state: int | np.random.RandomState | None = field(default=None, kw_only=True)

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "solver": [StrOptions({"auto", "least_squares", "sgd"})],
        "hidden_layer_sizes": ["array-like"],
        "steps": [Interval(Integral, 1, None, closed="left")],
        "fits": [Interval(Integral, 1, None, closed="left"), None],
        "clip_norm": [Interval(Real, 0, 1e15, closed="right")],
        "learning_rate": [Interval(Real, 0, 1e6, closed="right")],
    }

    guarantee_: Guarantee = field(init=False)
    ledger_: Ledger = field(init=False)
    model_: FittedModel = field(init=False)
    solver_: str = field(init=False)

    def _fit(self, encoded: Encoded, targets: Targets, trial: TuningTrial | None) -> Self:
        """Fit within the budget, or with the plan and ledger of a trial of `hush.tune`."""
        _check_callers(self, trial)
        self._validate_params()
        if self.fits is not None and self.ledger is None and trial is None:
            raise InvalidValue(
                f"fits={self.fits} needs a ledger on which the privacy costs of these fits add up. Pass "
                'ledger="ledger.jsonl", a new file.',
                key="fits",
            )
        name, why = "hidden_layer_sizes", "it is a width"
        hidden = tuple(check_count(name, size, why, 1, 16) for size in self.hidden_layer_sizes)
        if self.solver == "least_squares" and hidden:
            text = f'hidden_layer_sizes={short_repr(hidden)} with solver="least_squares": sufficient '
            text += 'statistics are for linear models. Pass solver="sgd", or hidden_layer_sizes=().'
            raise InvalidValue(text, key="solver")
        if trial is not None:
            if self.solver == "least_squares":
                raise Unsupported(
                    'solver="least_squares" in a trial of hush.tune: a trial is charged only for its '
                    'steps of DP-SGD. Leave it at "auto".'
                )
            solver, budget, generator = "sgd", trial.budget, trial.generator
            steps, plan = trial.steps, trial.plan
        else:
            records, generator, steps = len(encoded.numeric), None, self.steps
            delta = advised_delta(records) if self.delta is None else self.delta
            budget = Budget(epsilon=self.epsilon, delta=delta)
            check_delta(budget.delta, records)
            plan = Plan(
                sampling=Poisson(self.rate), clipping=L2(self.clip_norm), noise=Gaussian(multiplier=1.0)
            )
            solver = self.solver
            if self.solver == "auto":  # depends on the budget and the public shape of the data
                linear = targets.classes is None and not hidden
                precise = linear and fitting.precise_statistics(encoded, budget)
                solver = "least_squares" if precise else "sgd"
            if self.random_state is not None:
                seed = int(check_random_state(self.random_state).randint(2**31 - 1))
                generator = torch.Generator().manual_seed(seed)
        rate, done, descent = self.learning_rate, trial is not None, None
        if solver == "sgd":
            descent = fitting.Descent(
                steps=steps, plan=plan, calibrated=done, learning_rate=rate, hidden=hidden
            )
        ledger = Ledger(self.ledger) if trial is None else trial.ledger
        try:
            fits = None if self.fits is None or trial is not None else self.fits - ledger.runs
            if fits is not None and fits < 1:
                raise BudgetExceeded(
                    f"fits={self.fits} were planned, and the ledger {self.ledger} has {ledger.runs}. "
                    "Pass a new ledger; a search has candidates * folds + 1 fits, including the refit."
                )
            spending = fitting.Spending(budget=budget, ledger=ledger, generator=generator, fits=fits)
            self.model_ = fitting.fit(encoded, targets, spending, descent=descent)
            self.guarantee_ = ledger.epsilon(budget.delta)
        finally:
            if trial is None:
                ledger.close()
        self.ledger_, self.solver_ = ledger, solver
        return self

    def _encode(self, table: Any, *, reset: bool) -> Encoded:
        """Encode features by the public schema, and store or compare the number and names of columns."""
        encoded = encode(table, self.schema)
        validate_data(self, table, "no_validation", reset=reset, skip_check_array=True)
        return encoded

    def _target_column(self, y: Any) -> npt.NDArray[Any]:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        column: npt.NDArray[Any] = column_or_1d(y, warn=True)
        return column

    def _outputs(self, table: Any) -> Array:
        check_is_fitted(self)
        return self.model_(self._encode(table, reset=False))

    def __getstate__(self) -> dict[str, Any]:
        # only one object may write to a ledger; copies keep the guarantee
        return {key: value for key, value in super().__getstate__().items() if key != "ledger_"}


@dataclass(repr=False, eq=False)
class PrivateClassifier(ClassifierMixin, _PrivateEstimator):  # type: ignore[misc]
    """Linear classifier or small network with a differentially private fit.

    Args:
        schema: Declared bounds and categories of the columns: `{"age": Numeric(low=0, high=100), ...}`,
            a list by position, or one `Numeric` for all columns.
        classes: All labels that may occur.
        epsilon: Epsilon of the budget.
        delta: Delta of the budget; by default 0.1 / the (public) number of records.
        solver: "least_squares" releases noisy sufficient statistics once, for linear models; "sgd" is
            DP-SGD on the cross-entropy; "auto" is "sgd", which was better in all measurements
            (docs/results/estimators.md).
        hidden_layer_sizes: Widths of hidden layers with tanh activations; empty for a linear model.
        steps: Number of DP-SGD steps.
        rate: Poisson sampling rate of DP-SGD.
        clip_norm: l2 clipping norm of DP-SGD.
        learning_rate: Learning rate of DP-SGD with momentum 0.9.
        ledger: Ledger file for several fits, which together stay within the budget; by default each fit
            has its own ledger in memory.
        fits: Number of fits on the ledger that share the budget equally; by default a fit spends the
            remaining budget. A search has candidates * folds fits, plus one for the refit.
        random_state: Seed of all draws, for tests; the guarantee then has `randomness: seeded`.

    Attributes:
        guarantee_: Guarantee of all charges on the ledger after the fit.
        ledger_: Closed ledger of the fit.
        classes_: Declared classes, sorted.
        solver_: Solver that was used.

    **Guarantee.** All fitted attributes satisfy `guarantee_` for zero-out neighbours. The number of
    records, the schema, the classes and all parameters are public: docs/guarantees/least-squares.md and
    poisson-gaussian.md. Scores on the training records are not covered.
    """

    classes: Sequence[Hashable] | None = None

    classes_: npt.NDArray[Any] = field(init=False)

    def fit(self, X: Any, y: Any, *, trial: TuningTrial | None = None) -> Self:  # noqa: N803
        """Fit the classifier within its budget.

        Args:
            X: Data frame or matrix with the columns of the schema.
            y: Labels, which must all be declared in `classes`.
            trial: Trial of `hush.tune`, with the plan, steps and ledger to use.
        """
        declared = np.unique(np.asarray(distinct("classes", self.classes, (0, 1))))
        encoded = self._encode(X, reset=True)
        labels = self._target_column(y)
        check_classification_targets(labels)
        check_consistent_length(encoded.numeric, labels)
        places = indices(labels, declared.tolist(), "y", "classes")
        self._fit(encoded, Targets(places, len(declared)), trial)
        self.classes_ = declared
        return self

    def decision_function(self, X: Any) -> Array:  # noqa: N803
        """Model outputs, one column per class; for two classes, the second minus the first output."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probabilities of the classes, one column per class, in the order of `classes_`.

        DP-SGD uses the softmax. Least-squares outputs are estimates of probabilities. Estimates below
        0.01 are mapped to (0, 0.01), and each row is normalised.
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
        """Class with the largest output for each record."""
        places = self._outputs(X).argmax(1)
        return np.asarray(self.classes_[places])


@dataclass(repr=False, eq=False)
class PrivateRegressor(RegressorMixin, _PrivateEstimator):  # type: ignore[misc]
    """Linear regression or small network with a differentially private fit.

    Args:
        schema: Declared bounds and categories of the columns, as in `PrivateClassifier`.
        target: Declared bounds of the target, which is clamped to them.
        solver: "auto" selects a solver by the budget and the numbers of records and columns
            (docs/results/estimators.md). DP-SGD minimises the squared error.
        learning_rate: Learning rate of DP-SGD with momentum 0.9.

    Other parameters, attributes and the guarantee are as in `PrivateClassifier`.
    """

    target: Numeric | None = None
    learning_rate: float = field(default=0.1, kw_only=True)

    def fit(self, X: Any, y: Any, *, trial: TuningTrial | None = None) -> Self:  # noqa: N803
        """Fit the regressor within its budget; `y` must be finite numbers."""
        target = self._target()
        encoded = self._encode(X, reset=True)
        values = numbers("y", self._target_column(y))
        check_consistent_length(encoded.numeric, values)
        return self._fit(encoded, Targets(target.scale(values)[:, None]), trial)

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Predicted target of each record, within the declared bounds."""
        return self._target().unscale(self._outputs(X)[:, 0])

    def _target(self) -> Numeric:
        if not isinstance(self.target, Numeric):
            text = (
                f"target={short_repr(self.target)} must declare the target's bounds: the largest value "
            )
            text += "among the records is private. Pass e.g. target=Numeric(low=0, high=100)."
            raise InvalidValue(text, key="target")
        return self.target


def _check_callers(estimator: _PrivateEstimator, trial: TuningTrial | None) -> None:
    """Check for resampled records and for several fits, by the call stack.

    Raises if scikit-learn has resampled the records, or if several fits share a ledger but do not split
    its budget. Warns if several fits have separate ledgers. The call stack is the only evidence: bagging
    passes sampled rows, and clones share only the path of a ledger.
    """
    several, frame = set(), sys._getframe(1).f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        ensemble = frame.f_locals.get("ensemble", frame.f_locals.get("self"))
        if module in _RESAMPLING and ensemble is not None and getattr(ensemble, "bootstrap", True):
            raise Unsupported(
                f"{module} draws records with replacement before this fit: one record then counts "
                "several times, and its privacy cost exceeds the charge. Pass bootstrap=False to a "
                "bagging ensemble, and ledger= to the estimator to limit all fits together."
            )
        package, _, part = module.partition(".")
        several |= {part.partition(".")[0]} & _SEVERAL_FITS if package == "sklearn" else set()
        frame = frame.f_back
    if not several or trial is not None:
        return
    if estimator.ledger is not None and estimator.fits is None:
        raise InvalidValue(
            f"sklearn.{several.pop()} fits the same records several times, and the first fit would "
            f"spend all of epsilon={short_repr(estimator.epsilon)} on the ledger. Pass fits=, the "
            "number of fits that share the budget: folds for a cross-validation, candidates * folds + 1 "
            "for a search with its refit.",
            key="fits",
        )
    if estimator.ledger is None:
        warnings.warn(
            f"sklearn.{several.pop()} fits the same records several times, each with a separate ledger: "
            f"epsilon={short_repr(estimator.epsilon)} covers one fit, not their sum or a selection "
            'by scores on private records. Pass ledger="ledger.jsonl" to limit all fits '
            "together; or search on public records, or with hush.tune, which charges a search once.",
            PrivacyWarning,
            stacklevel=4,
        )
