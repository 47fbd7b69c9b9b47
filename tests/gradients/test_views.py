"""Several views of a record, averaged before clipping, against autograd on the views themselves."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import CheckpointError, InvalidValue
from hush.data import flips_and_shifts
from hush.gradients.recording import record
from hush.gradients.tree import Views, expand_views
from tests.gradients.oracle import flat

LOSS = nn.CrossEntropyLoss(reduction="none")
RECORDS = 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 1), nn.GroupNorm(4, 16, affine=False), nn.Conv2d(16, 8, 1, bias=False)),
        *(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 20), nn.Linear(20, 4)),
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(RECORDS, 3, 8, 8), torch.randint(0, 4, (RECORDS,))


def both_ways(image: Tensor) -> Tensor:
    return torch.stack([image, image.flip(-1), 2 * image])


def averaged(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Each record's mean gradient over its views, computed in double precision."""
    exact, rows = copy.deepcopy(model).double(), []
    for x, y in zip(inputs.double(), targets, strict=True):
        value = LOSS(exact(both_ways(x)), y.expand(3)).mean()
        parts = torch.autograd.grad(value, list(exact.parameters()))
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(rows).float()


def test_a_record_has_the_mean_of_its_views() -> None:
    model, (inputs, targets) = network(), batch()
    rows = averaged(model, inputs, targets)
    tape = record(model, LOSS, inputs, targets, both_ways)
    torch.testing.assert_close(tape.norms(2.0), rows.norm(dim=1), rtol=1e-5, atol=0)
    clip = float(rows.norm(dim=1).median())
    total = flat(hush.L2(clip).clip(tape).total, 0)
    weights = (clip / rows.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(total, (weights @ rows).double(), rtol=1e-4, atol=1e-6)
    # clipping each view on its own is something else
    alone = record(model, LOSS, *expand_views(both_ways, inputs, targets))
    each = flat(hush.L2(clip).clip(alone).total, 0) / 3
    assert not torch.allclose(total, each, rtol=1e-2, atol=1e-3)


def test_views_of_one_record_move_the_sum_by_one_clip() -> None:
    model, (inputs, targets) = network(), batch()
    ends = []
    for size in (1.0, 100.0):
        inputs[-1] *= size
        ends.append(flat(hush.L2(0.1).clip(record(model, LOSS, inputs, targets, both_ways)).total, 0))
    assert 0 < float((ends[0] - ends[1]).norm()) <= 0.2 * (1 + 1e-5)


@pytest.mark.usefixtures("without_noise")
def test_a_step_trains_on_views() -> None:
    model, data = network(), batch()
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1e9), noise=hush.Gaussian(1.0))
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        records=RECORDS,
        views=both_ways,
    )
    expected = averaged(model, *data).mean(0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for chosen in step.batches(data, steps=1):
        step(chosen)
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(before - after, expected, rtol=1e-4, atol=1e-6)


def test_other_views_are_not_taken_for_the_same_on_resuming() -> None:
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))

    def step(views: Views | None) -> hush.PrivateStep:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hush.PrivateStep(model, LOSS, optimizer, plan, records=RECORDS, views=views)

    state = step(flips_and_shifts(2, shift=1)).state_dict()
    step(flips_and_shifts(2, shift=1)).load_state_dict(state)
    for changed in (flips_and_shifts(3, shift=1), flips_and_shifts(2, shift=2), both_ways, None):
        with pytest.raises(CheckpointError, match=r"views was flips_and_shifts\(2, shift=1\)"):
            step(changed).load_state_dict(state)


def test_a_number_of_views_without_a_view_is_refused() -> None:
    with pytest.raises(InvalidValue, match="count=0 must be a whole number >= 1"):
        flips_and_shifts(0)
