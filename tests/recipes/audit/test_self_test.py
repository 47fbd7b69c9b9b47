"""The self-test passes a correct step, names the failed check of a broken one, leaves no trace."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.core.plan import Plan
from hush_recipes.audit.self_test import self_test
from tests.recipes.audit import sabotage
from tests.recipes.audit.sabotage import plan_of
from tests.recipes.audit.test_sabotage import MOMENTUM
from tests.training import helpers

RECORDS = 60
SELECTIVE = hush.Selective(rate=0.5, clip=1e-2, multiplier=1.0, threshold=0.0, test="mean")


def records(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(RECORDS, 8, generator=source), torch.arange(RECORDS) % 5


def step_of(plan: Plan) -> hush.PrivateStep:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 5))
    execution = hush.Execution(physical_batch=16)
    return helpers.step_of(model, plan, make=MOMENTUM, seed=1, records=RECORDS, execution=execution)


PLANS = {
    "plain": plan_of(),
    "selective": plan_of(release=SELECTIVE),
    "masks": plan_of(
        sampling=hush.Twice(rate=0.5, coordinate_rate=0.5), clipping=hush.L2Linf(l2=1.0, linf=0.2)
    ),
    "quantile": plan_of(clipping=hush.Quantile(1.0)),
    "banded": plan_of(
        sampling=hush.CyclicPoisson(rate=0.5, cycle=3),
        noise=hush.Banded(multiplier=1.0, strategy=(1.0, 0.5)),
    ),
    "allocation": plan_of(sampling=hush.RandomAllocation(steps=3)),
    "bounded": plan_of(clipping=hush.Linf(0.1), noise=hush.Rectified(scale=2.0, bound=9.0)),
}


def weights(step: hush.PrivateStep, steps: int) -> list[Tensor]:
    for batch in step.batches(records(), steps=steps):
        step(batch)
    return [value.detach().clone() for value in step.model.parameters()]


@pytest.mark.parametrize("name", PLANS)
def test_it_passes_and_the_run_is_the_one_without_it(name: str) -> None:
    expected = weights(step_of(PLANS[name]), 3)
    step = step_of(PLANS[name])
    state = copy.deepcopy(step.state_dict())
    self_test(step, records())
    assert torch.equal(step.state_dict()["generator"], state["generator"])
    assert not step.ledger.counts
    assert step.update is None
    actual = weights(step, 3)
    assert step.ledger.counts == {PLANS[name]: 3}
    assert all(map(torch.equal, actual, expected))


SLOW = pytest.mark.slow
"""Each check is tried by itself in test_sabotage.py; here, whether the self-test runs it."""


@pytest.mark.parametrize(
    ("broken", "name", "check"),
    [
        (sabotage.a_quarter_of_the_noise, "plain", "noise scale"),
        (sabotage.no_clipping_far_out, "plain", "sensitivity"),
        (sabotage.a_bare_number_in_a_buffer, "plain", "state"),
        (sabotage.a_quarter_of_the_noise_in_the_test, "selective", "noise of the verdict"),
        (sabotage.groups_of_chance, "banded", "sampling"),
        pytest.param(
            sabotage.noise_in_proportion_to_the_batch, "plain", "noise at any batch size", marks=SLOW
        ),
        pytest.param(sabotage.reseeded_every_step, "plain", "noise independence", marks=SLOW),
        pytest.param(sabotage.records_drawn_in_pairs, "plain", "sampling", marks=SLOW),
        pytest.param(sabotage.every_second_step_uncharged, "plain", "charges", marks=SLOW),
        pytest.param(
            sabotage.tested_on_the_training_batch, "selective", "sampling of the test", marks=SLOW
        ),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_it_names_the_failed_check_and_leaves_no_trace(
    broken: sabotage.Sabotage, name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(PLANS[name])
    before = [value.detach().clone() for value in step.model.parameters()]
    broken(monkeypatch)
    with pytest.raises(Unsupported, match=f"violates its guarantee: .*{check}"):
        self_test(step, records())
    assert "largest" not in dict(step.model.named_buffers())
    assert not step.ledger.counts
    assert all(map(torch.equal, before, step.model.parameters()))
