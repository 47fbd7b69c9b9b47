"""Parameters, budget and fit that the estimators share."""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from hush.accounting.ledger.ledger import Ledger
from hush.clipping.norms import NORM
from hush.core.errors import InvalidValue, PrivacyWarning, Unsupported, short_repr
from hush.core.guarantee import Budget, Guarantee, advised_delta, check_delta
from hush.core.value import check_count, number
from hush.integrations.sklearn.fitting import FittedModel, fit
from hush.integrations.sklearn.schema import Array, Encoded, Schema, encode
from hush.integrations.sklearn.solvers import Descent, NumberTargets, Targets, precise_statistics
from hush.training.tuning.trial import TuningTrial

_LEARNING_RATE = number(
    above=0, at_most=1e6, why="it is the length of a step along the noisy gradient", example=0.5
)["range"]


_SEVERAL_FITS = (
    "model_selection",
    "ensemble",
    "multiclass",
    "multioutput",
    "calibration",
    "feature_selection",
)
"""Parts of scikit-learn that fit clones of an estimator to the same records, several times."""


class PrivateEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Parameters and fit that both estimators share."""

    schema: Schema | None
    epsilon: float
    delta: float | None
    solver: Literal["auto", "least_squares", "sgd"]
    scaling: Literal["bounds", "paid"]
    hidden_layer_sizes: Sequence[int]
    steps: int
    rate: float
    clip_norm: float
    learning_rate: float
    ledger: str | os.PathLike[str] | None
    random_state: int | np.random.RandomState | None

    guarantee_: Guarantee
    ledger_: Ledger
    model_: FittedModel

    def _fit(self, encoded: Encoded, targets: Targets, trial: TuningTrial | None) -> Self:
        """Fit within the budget; everything that is kept may be published with the guarantee."""
        if trial is not None:
            return self._fit_trial(encoded, targets, trial)
        if self.ledger is None:
            _warn_of_other_fits(short_repr(self.epsilon))
        records = len(encoded.numeric)
        delta = advised_delta(records) if self.delta is None else self.delta
        budget = Budget(epsilon=self.epsilon, delta=delta)
        check_delta(budget.delta, records)
        descent = self._descent()
        solver = self._chosen_solver(encoded, targets, budget, descent.hidden)
        _check_choice("scaling", self.scaling, "bounds", "paid")
        generator = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            generator = torch.Generator().manual_seed(seed)
        with Ledger(self.ledger) as ledger:
            self.model_ = fit(
                encoded,
                targets,
                descent=descent if solver == "sgd" else None,
                paid=self.scaling == "paid",
                budget=budget,
                ledger=ledger,
                generator=generator,
            )
            self.guarantee_ = ledger.epsilon(budget.delta)
        self.ledger_, self.solver_ = ledger, solver
        return self

    def _fit_trial(self, encoded: Encoded, targets: Targets, trial: TuningTrial) -> Self:
        """Fit one trial of a selection: DP-SGD by its plan, for as many steps, on its ledger."""
        if self.solver == "least_squares" or self.scaling == "paid":
            raise Unsupported(
                f"solver={self.solver!r} and scaling={self.scaling!r} in a trial of hush.tune: a trial "
                "is charged for its steps of DP-SGD and for nothing else. Leave both at their defaults."
            )
        self.model_ = fit(
            encoded,
            targets,
            descent=replace(self._descent(), steps=trial.steps),
            paid=False,
            budget=trial.budget,
            ledger=trial.ledger,
            generator=trial.generator,
            plan=trial.plan,
        )
        self.guarantee_ = trial.ledger.epsilon(trial.budget.delta)
        self.ledger_, self.solver_ = trial.ledger, "sgd"
        return self

    def _chosen_solver(
        self, encoded: Encoded, targets: Targets, budget: Budget, hidden: tuple[int, ...]
    ) -> str:
        """Solver by the parameters, the budget and the numbers of records and columns, all public."""
        _check_choice("solver", self.solver, "auto", "least_squares", "sgd")
        if self.solver == "least_squares" and hidden:
            raise InvalidValue(
                f"hidden_layer_sizes={short_repr(hidden)} with solver="
                '"least_squares": sufficient statistics are of linear models. Pass solver="sgd", or '
                "hidden_layer_sizes=().",
                key="solver",
            )
        if self.solver != "auto":
            return self.solver
        linear = isinstance(targets, NumberTargets) and not hidden
        precise = linear and precise_statistics(encoded, budget)
        return "least_squares" if precise else "sgd"

    def _descent(self) -> Descent:
        """Checked settings of DP-SGD."""
        sizes = self.hidden_layer_sizes
        if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence | np.ndarray):
            raise InvalidValue(
                f"hidden_layer_sizes={short_repr(sizes)} must be a list of widths, one a layer: none is "
                "a linear model. Pass e.g. hidden_layer_sizes=(16,).",
                key="hidden_layer_sizes",
            )
        widths = [check_count("hidden_layer_sizes", size, "it is a width", 1, 16) for size in sizes]
        return Descent(
            steps=check_count("steps", self.steps, "steps are counted", 1, 100),
            rate=self.rate,
            clip_norm=NORM["range"].check("clip_norm", self.clip_norm),
            learning_rate=_LEARNING_RATE.check("learning_rate", self.learning_rate),
            hidden=tuple(widths),
        )

    def _encode(self, table: Any, *, reset: bool) -> Encoded:
        """Features by the public schema; the number and names of columns are kept or compared."""
        encoded = encode(table, self.schema)
        validate_data(self, table, "no_validation", reset=reset, skip_check_array=True)
        return encoded

    def _outputs(self, table: Any) -> Array:
        """Outputs of the fitted model, of shape (records, outputs)."""
        check_is_fitted(self)
        return self.model_(self._encode(table, reset=False))

    def __getstate__(self) -> dict[str, Any]:
        # a ledger has one owner: copies keep the guarantee, and a ledger's file if it has one
        return {key: value for key, value in super().__getstate__().items() if key != "ledger_"}


def target_or_error(estimator: BaseEstimator, y: Any) -> Any:
    """The target, or an error where none was passed."""
    if y is None:
        raise ValueError(
            f"{type(estimator).__name__} requires y to be passed, but the target y is None: there is "
            "nothing to fit to."
        )
    return y


def _warn_of_other_fits(epsilon: str) -> None:
    """Warn of a search or a cross-validation whose fits nobody adds up.

    An estimator is told nothing of who fits it, and its clones share nothing but a ledger's file: the
    callers are what there is to see.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        package, _, part = str(frame.f_globals.get("__name__")).partition(".")
        if package == "sklearn" and part.partition(".")[0] in _SEVERAL_FITS:
            warnings.warn(
                f"this fit is one of several that sklearn.{part.partition('.')[0]} makes of the same "
                f"records, each on a ledger of its own: epsilon={epsilon} is of one of them, all of "
                "them add up, and what is chosen by scores on private records is charged to none. Pass "
                'ledger="ledger.jsonl", and epsilon is the limit of all fits together; or search on '
                "public records, or with hush.tune, which charges a search once.",
                PrivacyWarning,
                stacklevel=4,
            )
            return


def _check_choice(name: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise InvalidValue(
            f"{name}={short_repr(value)} must be one of {', '.join(map(repr, allowed))}.", key=name
        )
