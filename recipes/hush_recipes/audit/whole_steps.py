"""Attack on whole private steps one after another, for plans whose runs do not fit side by side.

A selective step has one verdict for all its numbers, and some noise is charged for one number alone.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from hush.accounting.epsilon import epsilon
from hush.clipping import Subspaces
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.training.data import Batch, Data
from hush.training.options import Execution, Randomness
from hush.training.step import PrivateStep
from hush_recipes.audit.copies import STRENGTH
from hush_recipes.audit.distinguisher import DELTA
from hush_recipes.audit.scores import Audit, Draws, by_line, by_trees

TURN = 1e6
"""Coefficient of a loss's cubic part: what remains of it after the test's clip is the clip."""


def attack_steps(
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
    """Attack on one step of `plan` by a record that pulls as hard as it may.

    Its loss falls where the model moves with the pull and rises where it moves against it; another
    record's loss does the opposite. So the test accepts most with the record what it accepts least
    without, on either side. The attacker sees the model if it moved, and learns from examples how to
    tell; of trials that are not public, nothing.
    """
    present = _step(plan, touched, runs, public, seed)
    absent = _step(plan, touched, runs, public, seed + 1)
    if public is not None:
        # public and the same with and without the record: bases of their own would tell the two apart
        present.clipped_sum(Batch(torch.arange(0), opposed_records(touched, 0.0, 0.0), 1))
        absent.load_state_dict({**absent.state_dict(), "frame": present.state_dict()["frame"]})
    outputs = Draws(
        present=_released(present, opposed_records(touched, STRENGTH, 2 * TURN), runs),
        absent=_released(absent, opposed_records(touched, 0.0, 0.0), runs),
    )
    score = by_trees if isinstance(plan.release, Selective) else by_line
    charge = epsilon(plan, 1, delta, dimension=dimension).epsilon.upper
    return Audit.of(score(outputs), charge, delta, confidence)


def _step(plan: Plan, touched: int, runs: int, public: Data | None, seed: int) -> PrivateStep:
    """A step on a model of weights 0, whose learning rate undoes the divisor: it moves by noisy sums."""
    model = nn.Linear(touched, 1, bias=False)
    nn.init.zeros_(model.weight)
    return PrivateStep(
        model,
        opposed_loss,
        torch.optim.SGD(model.parameters(), lr=plan.sampling.expected(2)),
        _with_one_basis(plan, runs),
        records=2,
        randomness=Randomness(generator=torch.Generator().manual_seed(seed)),
        execution=Execution(physical_batch=2),
        public=public,
    )


def opposed_records(touched: int, pull: float, turn: float) -> tuple[Tensor, Tensor]:
    """The attacked record after one whose cubic part has the opposite sign."""
    return torch.ones(2, touched), torch.tensor([[0.0, -TURN], [pull, turn]])


def _released(step: PrivateStep, records: tuple[Tensor, Tensor], runs: int) -> np.ndarray:
    """A row a run: whether the model moved, and its weights."""
    outputs = []
    for batch in step.batches(records, steps=runs):
        moved = step(batch)
        (weight,) = step.trainable().values()
        outputs.append([float(moved), *weight.detach()[0].tolist()])
        nn.init.zeros_(weight)
        step.adopt_weights()
    return np.array(outputs)


def _with_one_basis(plan: Plan, runs: int) -> Plan:
    """The plan with public bases that serve all the runs."""
    if not isinstance(plan.clipping, Subspaces) or plan.clipping.bases is None:
        return plan
    bases = replace(plan.clipping.bases, every=runs + 1)
    return replace(plan, clipping=replace(plan.clipping, bases=bases))


def opposed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per-sample loss with a slope of its own at 0, and a cubic part that is flat there."""
    return -targets[:, 0] * outputs[:, 0] - targets[:, 1] * outputs[:, 0] ** 3
