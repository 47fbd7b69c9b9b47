import copy

import pytest
import torch
from torch import nn

from hush.gradients.recording import record

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("norm", "sizes"),
    [
        *(
            (nn.GroupNorm(2, 8), (8, 5, 5)),
            (nn.GroupNorm(6, 6), (6, 7)),
            (nn.GroupNorm(1, 48), (48, 1, 3)),
        ),
        *((nn.GroupNorm(3, 6), (6, 50, 50)), (nn.GroupNorm(4, 12), (12, 3))),
        *((nn.GroupNorm(1, 96), (96, 1, 1)), (nn.LayerNorm(8), (8,)), (nn.LayerNorm(130), (7, 130))),
        *(
            (nn.LayerNorm((3, 50)), (17, 2, 3, 50)),
            (nn.LayerNorm(128), (64, 128)),
            (nn.LayerNorm(5), (1, 5)),
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_record_at_a_time(
    norm: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype, where: str
) -> None:
    """Of its scale, its shift, and through it of the shift of a norm below."""
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(norm), nn.Tanh(), copy.deepcopy(norm)).to(where, dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = (torch.randn(5, *sizes) + 1).to(where, dtype)
    target = torch.randn_like(x)
    tape = record(model, lambda o, t: (o * t).flatten(1).sum(1), x, target)
    exact = model.double()
    for i in range(5):
        value = (exact(x[i : i + 1].double()) * target[i : i + 1].double()).sum()
        expected = torch.autograd.grad(value, list(exact.parameters()))
        alone = tape.weighted_sum((torch.arange(5, device=where) == i).to(dtype))
        for ours, theirs in zip(alone.values(), expected, strict=True):
            tolerance = 1e-10 if dtype == torch.float64 else 1e-4
            assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm() + 1)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.BatchNorm1d(8).eval()], ids=str)
def test_a_norm_in_half_precision_keeps_its_input_as_it_came(norm: nn.Module, where: str) -> None:
    """And its gradients are those of autocast's own, one record at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), norm).to(where)
    x, target = torch.randn(5, 4, 9, device=where), torch.randn(5, 8, 7, device=where)
    kept: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
    with torch.autocast(where, torch.bfloat16), hooks:
        tape = record(model, lambda o, t: (o * t).flatten(1).sum(1), x, target)
    assert {each.dtype for each in kept if each.shape == (5, 8, 7)} == {torch.bfloat16}
    for i in range(5):
        with torch.autocast(where, torch.bfloat16):
            value = (model(x[i : i + 1]) * target[i : i + 1]).sum()
        expected = torch.autograd.grad(value, list(model.parameters()))
        alone = tape.weighted_sum((torch.arange(5, device=where) == i).double())
        for ours, theirs in zip(alone.values(), expected, strict=True):
            assert float((ours - theirs).norm()) <= 0.02 * float(theirs.norm() + 1)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.BatchNorm1d(8).eval()], ids=str)
def test_a_mean_far_from_zero_does_not_cost_precision(norm: nn.Module, where: str) -> None:
    """Under autocast too: the difference of two sums of products in bfloat16 was off by its own size."""
    torch.manual_seed(0)
    norm.to(where)
    for name, statistic in norm.named_buffers():
        nn.init.constant_(statistic, {"running_mean": 10.0, "running_var": 0.01}.get(name, 0))
    x = (10 + 0.1 * torch.randn(5, 8, 7, device=where)).bfloat16()
    target = torch.randn(5, 8, 7, device=where)
    with torch.autocast(where, torch.bfloat16):
        tape = record(norm, lambda o, t: (o.float() * t).flatten(1).sum(1), x, target)
    exact = copy.deepcopy(norm).double()
    for i in range(5):
        value = (exact(x[i : i + 1].double()) * target[i : i + 1].bfloat16().double()).sum()
        (expected,) = torch.autograd.grad(value, [exact.get_parameter("weight")])
        ours = tape.weighted_sum((torch.arange(5, device=where) == i).double())["weight"]
        assert float((ours - expected).norm()) <= 0.01 * float(expected.norm())


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=str)
def test_weights_in_half_precision_under_autocast_too(norm: nn.Module, where: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), copy.deepcopy(norm), nn.Linear(8, 3)).to(
        where, torch.bfloat16
    )
    x, target = torch.randn(5, 4, device=where).bfloat16(), torch.randn(5, 3, device=where)
    with torch.autocast(where, torch.bfloat16):
        tape = record(model, lambda o, t: (o.float() * t).sum(1), x, target)
        for i in range(5):
            value = (model(x[i : i + 1]).float() * target[i : i + 1]).sum()
            expected = torch.autograd.grad(value, list(model.parameters()))
            alone = tape.weighted_sum((torch.arange(5, device=where) == i).double())
            for ours, theirs in zip(alone.values(), expected, strict=True):
                assert float((ours - theirs).norm()) <= 0.02 * float(theirs.norm() + 1)
