"""Whole private steps one after another, for plans whose runs do not fit side by side.

A selective step has one verdict for all its numbers, and some noise is charged for one number alone.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from hush.accounting.epsilon import epsilon
from hush.audit.lower_bound import Audit, Draws, by_line, by_trees, epsilon_lower_bound
from hush.audit.mechanisms.copies import STRENGTH
from hush.audit.mechanisms.distinguisher import DELTA
from hush.clipping import Subspaces
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.training.data import Batch, Data
from hush.training.methods.adaptive import Adaptive, AdaptiveDescent
from hush.training.step import PrivateStep

_TURN = 1e6
"""How steeply a loss turns where the model moves: the test's clip decides what is left of it."""


def audit_steps(
    plan: Plan,
    *,
    touched: int = 1,
    dimension: int | None = None,
    runs: int = 400,
    public: Data | None = None,
    delta: float = DELTA,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """An attack on one step of `plan` by a record that pulls as hard as it may.

    Its loss falls where the model moves with the pull and rises where it moves against it; another
    record's loss does the opposite. So the test accepts most with the record what it accepts least
    without, on either side. The attacker sees the model if it moved, and learns from examples how to
    tell; of trials that are not public, nothing.
    """
    present = _step(plan, touched, runs, public, seed)
    absent = _step(plan, touched, runs, public, seed + 1)
    if public is not None:
        # public and the same with and without the record: bases of their own would tell the two apart
        present.clipped_sum(Batch(torch.arange(0), _records(touched, 0.0, 0.0), 1))
        absent.load_state_dict({**absent.state_dict(), "frame": present.state_dict()["frame"]})
    outputs = Draws(
        present=_released(present, _records(touched, STRENGTH, 2 * _TURN), runs),
        absent=_released(absent, _records(touched, 0.0, 0.0), runs),
    )
    learnt = by_trees if isinstance(plan.release, Selective) else by_line
    lower = epsilon_lower_bound(learnt(outputs), delta, confidence)
    charge = epsilon(plan, 1, delta, dimension=dimension).epsilon.upper
    return Audit(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=runs // 2)


def _step(plan: Plan, touched: int, runs: int, public: Data | None, seed: int) -> PrivateStep:
    """A step on a model of weights 0, whose learning rate undoes the divisor: it moves by noisy sums."""
    model = nn.Linear(touched, 1, bias=False)
    nn.init.zeros_(model.weight)
    return PrivateStep(
        model,
        _loss,
        torch.optim.SGD(model.parameters(), lr=plan.sampling.expected(2)),
        _with_one_frame(plan, runs),
        records=2,
        generator=torch.Generator().manual_seed(seed),
        physical_batch=2,
        public=public,
    )


def _records(touched: int, pull: float, turn: float) -> tuple[Tensor, Tensor]:
    """The record in question after one that turns the other way."""
    return torch.ones(2, touched), torch.tensor([[0.0, -_TURN], [pull, turn]])


def _released(step: PrivateStep, records: tuple[Tensor, Tensor], runs: int) -> np.ndarray:
    """For each run whether the model moved, and where to."""
    found = []
    for batch in step.batches(records, steps=runs):
        moved = step(batch)
        (weight,) = step.trainable().values()
        found.append([float(moved), *weight.detach()[0].tolist()])
        nn.init.zeros_(weight)
        step.adopt_weights()
    return np.array(found)


def _with_one_frame(plan: Plan, runs: int) -> Plan:
    """The plan with public bases that serve all the runs."""
    if not isinstance(plan.clipping, Subspaces) or plan.clipping.bases is None:
        return plan
    bases = replace(plan.clipping.bases, every=runs + 1)
    return replace(plan, clipping=replace(plan.clipping, bases=bases))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A pull of its own at 0 for each record, and a turn that is flat there."""
    return -targets[:, 0] * outputs[:, 0] - targets[:, 1] * outputs[:, 0] ** 3


def audit_descent(
    *, runs: int = 100, delta: float = DELTA, confidence: float = 0.95, seed: int = 0
) -> Audit:
    """An attack on whole runs of `AdaptiveDescent` with a budget of epsilon 3."""
    charges = []

    def descents(pull: float, turn: float, seed: int) -> np.ndarray:
        source, found = torch.Generator().manual_seed(seed), []
        for _ in range(runs):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            descent = AdaptiveDescent(
                model,
                _loss,
                (torch.ones(2, 1), torch.tensor([[0.0, -_TURN], [pull, turn]])),
                Budget(epsilon=3.0, delta=delta),
                Adaptive(clip=1.0, sizes=2, splits=1),
                generator=source,
                physical_batch=2,
            )
            moves = list(descent.run())
            charges.append(descent.spent(delta).epsilon.upper)
            found.append([float(len(moves)), float(model.weight.detach())])
        return np.array(found)

    outputs = Draws(present=descents(STRENGTH, 2 * _TURN, seed), absent=descents(0.0, 0.0, seed + 1))
    lower = epsilon_lower_bound(by_trees(outputs), delta, confidence)
    # what a descent spends is its budget, whatever happened
    return Audit(lower=lower, charge=min(charges), delta=delta, confidence=confidence, runs=runs // 2)
