"""Chains of stock layers, recorded without `torch.vmap`: the same numbers, bit for bit."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hush.gradients import recording
from hush.gradients.direct import direct_chain
from hush.gradients.losses import per_sample_loss
from hush.gradients.recording import record
from hush.gradients.tape import GradientTape, MaskedTape, unit_tape

RECORDS = 33


def _tied() -> nn.Module:
    layer = nn.Linear(12, 12)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(12, 5))


def _frozen(*layers: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 7), nn.ELU(), nn.Linear(7, 5))
    for number in layers:
        model[number].requires_grad_(False)
    return model


def _bias_only() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 5))
    for name, value in model.named_parameters():
        value.requires_grad_(name.endswith("bias"))
    return model


def _chain(*between: nn.Module, width: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(12, width), *between, nn.Linear(width, 5))


MODELS = {
    "linear": lambda: nn.Linear(12, 5),
    "without a bias": lambda: nn.Linear(12, 5, bias=False),
    "relu": lambda: _chain(nn.ReLU()),
    "gelu": lambda: _chain(nn.GELU("tanh"), width=41),
    "tanh": lambda: _chain(nn.Tanh()),
    "sigmoid": lambda: _chain(nn.Sigmoid(), nn.Identity()),
    "elu": lambda: _chain(nn.ELU(), width=13),
    "selu": lambda: _chain(nn.SELU()),
    "silu": lambda: _chain(nn.SiLU()),
    "mish": lambda: _chain(nn.Mish()),
    "leaky": lambda: _chain(nn.LeakyReLU()),
    "softplus": lambda: _chain(nn.Softplus(), width=37),
    "hard": lambda: _chain(nn.Hardtanh(), nn.Hardswish(), nn.ReLU6()),
    "layer norm": lambda: _chain(nn.LayerNorm(40), nn.ReLU()),
    "plain norm": lambda: _chain(nn.LayerNorm(40, elementwise_affine=False), nn.ReLU()),
    "group norm": lambda: _chain(nn.GroupNorm(4, 40), nn.ReLU()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), _chain_of(8)),
    "tied": _tied,
    "first frozen": lambda: _frozen(0),
    "middle frozen": lambda: _frozen(2),
    "last frozen": lambda: _frozen(4),
    "bias only": _bias_only,
}


def _chain_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(width, 5))


LOSSES: dict[str, Any] = {
    "cross entropy": nn.CrossEntropyLoss(),
    "mean square": nn.MSELoss(),
    "likelihood": nn.NLLLoss(reduction="sum"),
    "huber": nn.HuberLoss(),
    "smooth": nn.SmoothL1Loss(reduction="sum"),
    "absolute": nn.L1Loss(),
}


def _pair(loss: str, dtype: torch.dtype, shape: tuple[int, ...] = (12,)) -> tuple[Any, Any]:
    inputs = torch.randn(RECORDS, *shape, dtype=dtype)
    if loss in ("cross entropy", "likelihood"):
        return inputs, torch.randint(0, 5, (RECORDS,))
    return inputs, torch.rand(RECORDS, *shape[:-1], 5, dtype=dtype)


def _both(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> list[GradientTape]:
    loss = per_sample_loss(loss)
    assert direct_chain(model, loss) is not None
    direct = record(model, loss, inputs, targets)
    with mock.patch.object(recording, "direct_chain", return_value=None):
        return [direct, record(model, loss, inputs, targets)]


def _check_equal(direct: GradientTape, under_vmap: GradientTape) -> None:
    present = torch.arange(RECORDS) % 4 != 1
    counts = torch.tensor([1, 1, 1, 2, 2, 2, 4, 4, 4, 6, 6])
    weights = torch.rand(RECORDS).mul_(torch.arange(RECORDS) % 3 > 0)
    assert direct.unused_parameters == under_vmap.unused_parameters
    assert [type(term) for term in direct.terms.values()] == [
        type(term) for term in under_vmap.terms.values()
    ]
    for order in (1.0, 2.0):
        assert torch.equal(direct.norms(order), under_vmap.norms(order))
        masked = [MaskedTape(tape, present).norms(order) for tape in (direct, under_vmap)]
        assert torch.equal(*masked)
    units = [unit_tape(tape, counts, "mean", present) for tape in (direct, under_vmap)]
    assert torch.equal(units[0].norms(2.0), units[1].norms(2.0))
    for sums in (
        [tape.weighted_sum(weights) for tape in (direct, under_vmap)],
        [tape.weighted_sum(weights[: len(counts)]) for tape in units],
    ):
        assert sums[0].keys() == sums[1].keys()
        assert all(torch.equal(value, sums[1][name]) for name, value in sums[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_direct_gradients_are_those_of_vmap_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    for loss in LOSSES:
        _check_equal(*_both(model, LOSSES[loss], *_pair(loss, dtype)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", MODELS)
def test_direct_gradients_on_a_gpu_are_those_of_vmap(name: str) -> None:
    torch.manual_seed(0)
    model, weights = MODELS[name]().cuda(), torch.rand(RECORDS).cuda()
    for loss in LOSSES:
        inputs, targets = (value.cuda() for value in _pair(loss, torch.float32))
        direct, under_vmap = _both(model, LOSSES[loss], inputs, targets)
        torch.testing.assert_close(direct.norms(2.0), under_vmap.norms(2.0), rtol=1e-5, atol=1e-7)
        expected = under_vmap.weighted_sum(weights)
        for parameter, total in direct.weighted_sum(weights).items():
            torch.testing.assert_close(total, expected[parameter], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("between", [nn.ReLU(), nn.LayerNorm(40), nn.Flatten(2)])
def test_direct_gradients_of_several_positions_are_those_of_vmap(between: nn.Module) -> None:
    torch.manual_seed(0)
    inputs, targets = _pair("mean square", torch.float32, (7, 12))
    _check_equal(*_both(_chain(between), nn.MSELoss(), inputs, targets))


def test_direct_gradients_of_strided_inputs_are_those_of_vmap() -> None:
    torch.manual_seed(0)
    inputs, targets = _pair("cross entropy", torch.float32)
    _check_equal(*_both(_chain(nn.ReLU()), nn.CrossEntropyLoss(), inputs.T.contiguous().T, targets))


class _Subclass(nn.Linear):
    """A layer that may do anything."""


def _hooked() -> nn.Module:
    model = nn.Linear(12, 5)
    model.register_forward_hook(lambda module, inputs, output: output)
    return model


@pytest.mark.parametrize(
    "model",
    [
        _Subclass(12, 5),
        _hooked(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(12, 5)),
        nn.Sequential(nn.Linear(12, 5), nn.Dropout()),
        nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)),
        nn.Sequential(nn.Linear(12, 5), nn.Flatten(0)),
        nn.Sequential(nn.Linear(12, 5), nn.ReLU(inplace=True)),
    ],
)
def test_a_model_that_might_mix_records_is_not_direct(model: nn.Module) -> None:
    assert direct_chain(model, per_sample_loss(nn.MSELoss())) is None


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.ones(5)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.BCEWithLogitsLoss(),
        nn.functional.mse_loss,
    ],
)
def test_a_loss_of_other_kernels_is_not_direct(loss: Any) -> None:
    assert direct_chain(nn.Linear(12, 5), per_sample_loss(loss)) is None
