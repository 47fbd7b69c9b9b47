import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.checks.module_state import ModuleState

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "normal": np.random.standard_normal,
}


class Drawing(nn.Linear):
    """Leaves its input out by a coin of the host's."""

    def __init__(self, source: str) -> None:
        super().__init__(4, 3)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (DRAWS[self.source]() < 0.5))


@pytest.mark.parametrize("source", DRAWS)
def test_draws_of_the_host_are_refused_before_the_first_step(source: str) -> None:
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    model = Drawing(source)
    DRAWS[source]()  # some draw two at a time, and have one left
    step = hush.PrivateStep(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), plan, records=4
    )
    with pytest.raises(Unsupported, match="numpy or Python's random"):
        step(next(step.batches((torch.randn(4, 4), torch.zeros(4, dtype=torch.long)))))
    assert not step.ledger.counts


@pytest.mark.parametrize(
    "generator",
    [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)],
    ids=["Random", "Generator", "RandomState"],
)
def test_a_generator_that_a_module_keeps_is_refused(generator: object) -> None:
    """Its draws are seen by nobody: a coin of one in fifty passes the trial of two records."""
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].rng = generator  # type: ignore[assignment]
    step = hush.PrivateStep(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), plan, records=4
    )
    with pytest.raises(Unsupported, match="rng is a generator of its own"):
        step.batches((torch.randn(4, 4), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize("source", DRAWS)
def test_draws_are_seen_from_the_first_forward_pass_on(source: str) -> None:
    state = ModuleState(nn.Linear(4, 3))
    state.begin(later=True)
    assert state.before is not None
    DRAWS[source]()  # the program's own, while a graph is replayed
    state.check()
    state.expect_forward()
    state.check()
    state.begin(later=True)
    state.expect_forward()
    DRAWS[source]()
    with pytest.raises(Unsupported, match="numpy or Python's random"):
        state.check()
