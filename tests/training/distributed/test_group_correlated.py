"""Correlated noise in two processes: each has the past noise of its slice, and a checkpoint has all."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import hush
from hush.training.step import PrivateStep
from tests.training.distributed import spawned
from tests.training.distributed.problems import data_of, plan_of, step_of, train
from tests.training.helpers import run, weights_of
from tests.training.test_correlated_noise import NOISE, covariance, expected_covariance, releases

PLAN = plan_of(sampling=hush.CyclicPoisson(rate=0.75, cycle=3), noise=NOISE)
SIZE = 20_001  # odd, so that the slices of the ranks differ


def quiet() -> tuple[PrivateStep, Any]:
    """A step whose clipped sums are zero, and its data."""
    model = nn.Linear(SIZE, 1, bias=False)
    step = step_of(model, plan=PLAN, loss=nn.MSELoss(), seed=0, records=12)
    return step, (torch.zeros(12, SIZE), torch.ones(12, 1))


def adds_noise(folder: Path) -> tuple[torch.Tensor, int]:
    step, data = quiet()
    rows = releases(step, data, 6)
    assert step.past_noise is not None
    return rows, step.past_noise.vectors.shape[1]


def goes_on(folder: Path) -> dict[str, Any]:
    """Runs of eight steps, with a checkpoint after four in one of them."""
    straight = run(step_of(plan=PLAN, seed=0), data_of(), 8)
    first = run(step_of(plan=PLAN, seed=0, ledger=folder / "ledger.jsonl"), data_of(), 4)
    state = first.state_dict()
    first.ledger.close()
    dist.barrier()
    second = step_of(plan=PLAN, seed=1, ledger=folder / "ledger.jsonl")
    second.load_state_dict(state)
    run(second, data_of(), 4)
    return {
        "same": torch.equal(weights_of(second.model), weights_of(straight.model)),
        "columns": state["past_noise"].shape[1],
        "counts": list(second.ledger.counts.values()),
    }


def resumes_a_directory(folder: Path) -> bool:
    """Whether a run in a directory that is resumed ends like one that was not stopped."""
    plan, reports = PLAN, hush.Logging(every=2)
    whole, _ = train(8, plan, logging=reports)
    for steps in (4, 8):
        checkpoints = hush.Checkpoints(directory=folder / "run", resume=steps == 8)
        resumed, _ = train(steps, plan, logging=reports, checkpoints=checkpoints)
        dist.barrier()
    return torch.equal(whole, resumed)


result = partial(spawned.result, __name__, 2)


def test_the_noise_of_all_slices_has_the_law_of_the_factorization() -> None:
    (rows, size), (others, other_size) = result("adds_noise")
    assert torch.equal(rows, others)
    assert size + other_size == SIZE
    expected = expected_covariance(6)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((covariance(rows) - expected) / scale).max() < 6 * (2 / SIZE) ** 0.5


def test_a_run_goes_on_bit_for_bit() -> None:
    for found in result("goes_on"):
        assert found["same"]
        assert found["columns"] == sum(value.numel() for value in step_of().model.parameters())
        assert found["counts"] == [9], "three periods"


def test_a_directory_is_resumed() -> None:
    assert result("resumes_a_directory") == [True, True]
