import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, Unsupported
from hush.gradients.losses import per_sample_loss
from hush.gradients.recording import NotVectorized, per_sample_losses, record
from tests.gradients.oracle import check_tape, one_at_a_time

LOSS = nn.CrossEntropyLoss(reduction="none")


def test_a_record_of_weight_zero_adds_exactly_zero_even_if_not_finite() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    inputs[1] = math.nan
    tape = record(model, LOSS, inputs, targets)
    total = tape.weighted_sum(torch.tensor([1.0, 0.0, 1.0]))
    without = record(model, LOSS, inputs[[0, 2]], targets[[0, 2]]).weighted_sum(torch.ones(2))
    for name in total:
        torch.testing.assert_close(total[name], without[name])


@pytest.mark.parametrize("records", [1, 2, 5])
def test_a_loss_of_the_batch_is_computed_record_by_record(records: int) -> None:
    inputs, targets, model = (
        torch.randn(records, 4),
        torch.zeros(records, dtype=torch.long),
        nn.Linear(4, 3),
    )
    reduced, by_record = (
        record(model, loss, inputs, targets) for loss in (nn.functional.cross_entropy, LOSS)
    )
    torch.testing.assert_close(reduced.norms(2.0), by_record.norms(2.0))


def influence(records: int, dtype: torch.dtype, autocast: bool) -> float:
    """How many clipping norms the last of so many equal records moves the clipped sum by."""
    width = 256
    ends = []
    for count in (records - 1, records):
        model = nn.Linear(width, 1, bias=False).to(dtype)
        nn.init.zeros_(model.weight)
        inputs = torch.full((count, width), 1 / 16, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            tape = record(model, lambda outputs, _: outputs[:, 0], inputs, torch.zeros(count))
            ends.append(hush.L2(1.0).clip(tape).total["weight"].double())
    return float((ends[1] - ends[0]).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_does_not_raise_a_records_influence(dtype: torch.dtype, autocast: bool) -> None:
    assert influence(4113, dtype, autocast) <= 1 + 1e-3


def test_a_regulariser_belongs_to_every_record() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs, targets = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        own: Tensor = LOSS(outputs, targets)
        total: Tensor = own + model.weight.square().sum() + outputs.norm(dim=1)
        return total

    check_tape(
        record(model, loss, inputs, targets), one_at_a_time(model, loss, inputs, targets, 5), 1e-10
    )


class Gain(torch.autograd.Function):
    """A product with a backward pass of its own, for which torch can make a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 3), nn.Parameter(torch.randn(3))
        self.idle = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = Gain.apply(self.linear(x), self.gain)  # type: ignore[no-untyped-call]
        return scores


def test_a_function_of_the_users_own_takes_part() -> None:
    model = Custom().double()
    inputs, targets = torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    expected = one_at_a_time(model, LOSS, inputs, targets, 3)
    check_tape(record(model, LOSS, inputs, targets), expected, 1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parameters_that_the_tape_does_not_see_are_named() -> None:
    model = torch.jit.script(nn.Linear(4, 3))
    with pytest.raises(Unsupported, match="gradients of weight, bias were not recorded"):
        record(model, LOSS, torch.randn(3, 4), torch.zeros(3, dtype=torch.long))


def test_nothing_stays_on_the_model_even_when_it_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    before = {name: id(value) for name, value in model.named_parameters()}
    with pytest.raises(DataError, match="out of range"):
        record(model, LOSS, torch.randn(3, 4), torch.full((3,), 7))
    record(model, LOSS, torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
    assert {name: id(value) for name, value in model.named_parameters()} == before
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, kind) for module in model.modules() for kind in hooks)
    assert all(value.grad is None and not value._backward_hooks for value in model.parameters())
    assert torch.vmap(lambda x: x.sum())(torch.ones(2, 3)).tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_gradients_are_close_and_not_summed_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.LayerNorm(16),
    )
    inputs, targets = torch.randn(6, 2, 5, 5), torch.randint(0, 16, (6,))
    full = record(model, LOSS, inputs, targets)
    with torch.autocast("cpu", dtype=dtype):
        low = record(model, LOSS, inputs, targets)
        norms, total = low.norms(2.0), low.weighted_sum(torch.ones(6))
    assert {part.dtype for part in total.values()} == {torch.float64}
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, full.norms(2.0), rtol=0.05, atol=0)


class Recurrent(nn.Module):
    """A layer for which torch has no batching rule."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(20, 4), nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.lstm(self.table(tokens))[0].mean(1)))


@pytest.mark.parametrize("trained", [True, False])
def test_losses_alone_use_the_rules_of_layers(trained: bool) -> None:
    torch.manual_seed(0)
    model = Recurrent().double().requires_grad_(trained)
    tokens, targets = torch.randint(0, 20, (6, 5)), torch.randint(0, 2, (6,))
    loss = nn.CrossEntropyLoss(reduction="none")
    losses = per_sample_losses(model, loss, tokens, targets)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, loss(model(tokens), targets).detach(), rtol=1e-12, atol=1e-12)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.LayerNorm(5), nn.GELU(), nn.Dropout(0.3), nn.Linear(5, 5))
    return nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3))


def no_compiler(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled code does not show how a parameter is used")


def compiled_whole() -> nn.Module:
    return cast(nn.Module, torch.compile(network(), backend=no_compiler, fullgraph=True))


def compiled_part() -> nn.Module:
    model = network()
    model[1] = cast(nn.Module, torch.compile(model[1], backend=no_compiler))
    return model


def compiled_in_place() -> nn.Module:
    model = network()
    model.compile(backend=no_compiler, fullgraph=True)
    return model


class CompiledFunction(nn.Module):
    """A compiled function of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.middle = torch.compile(lambda x: self.layers[1](x), backend=no_compiler, fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers[2](self.middle(self.layers[0](x))))


@pytest.mark.parametrize("make", [compiled_whole, compiled_part, compiled_in_place, CompiledFunction])
def test_compiled_modules_run_as_they_are_written(make: Callable[[], nn.Module]) -> None:
    inputs, targets = torch.randn(6, 4), torch.randint(0, 3, (6,))
    results = []
    for model in (network(), make()):
        torch.manual_seed(1)
        results.append(list(record(model, LOSS, inputs, targets).weighted_sum(torch.ones(6)).values()))
        torch.manual_seed(1)
        results[-1].append(per_sample_losses(model, LOSS, inputs, targets))
    assert all(map(torch.equal, *results))


def test_a_compiled_model_trains() -> None:
    data = torch.randn(20, 4), torch.randint(0, 3, (20,))
    results = []
    for model in (network(), compiled_in_place()):
        plan = hush.Plan(sampling=hush.Poisson(0.5), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(2)
        step = hush.PrivateStep(
            model, LOSS, optimizer, plan, records=20, randomness=hush.Randomness(generator=generator)
        )
        for batch in step.batches(data, steps=2):
            step(batch)
        results.append([value.detach() for value in model.parameters()])
    assert all(map(torch.equal, *results))


class Differentiated(nn.Module):
    """A trained layer inside of a transform that the model applies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.func.vjp(self.layer, x)[0]
        return output


def test_a_trained_layer_inside_of_a_transform_is_not_vectorized() -> None:
    with pytest.raises(NotVectorized, match=r"applies a torch\.func transform"):
        record(Differentiated(), LOSS, torch.randn(5, 4), torch.arange(5) % 3)


def test_losses_are_in_single_precision_under_autocast() -> None:
    """Cross-entropy of a confident model: in half precision the loss of most records would be zero."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(16, 3), torch.randn(6, 16)
    with torch.no_grad():
        model.weight.mul_(30)
        targets = model(inputs).argmax(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs)
        tape = record(model, LOSS, inputs, targets)
        assert per_sample_losses(model, LOSS, inputs, targets).dtype == torch.float32
    expected = torch.softmax(logits.double(), 1) - nn.functional.one_hot(targets, 3)
    norms = (expected.norm(dim=1) * (inputs.double().square().sum(1) + 1).sqrt()).float()
    torch.testing.assert_close(tape.norms(2.0), norms, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (5, 2)])
def test_ignored_positions_are_not_in_a_records_mean(shape: tuple[int, ...]) -> None:
    """Padding does not shrink a record's gradient; a record of padding alone has none."""
    torch.manual_seed(0)
    outputs = torch.randn(3, 4, *shape)
    targets = torch.randint(0, 4, (3, *shape))
    targets[0].view(-1)[:2] = -100
    targets[2] = -100
    loss = nn.CrossEntropyLoss()
    alone = torch.stack([loss(a[None], b[None]) for a, b in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(per_sample_loss(loss)(outputs, targets), alone.nan_to_num(0.0))


def test_a_bias_has_half_of_the_squared_norm_beside_inputs_of_length_one() -> None:
    inputs = nn.functional.normalize(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)))
    targets = torch.tensor([0, 1, 2, 0, 1])
    model = nn.Linear(7, 3)
    both = record(model, LOSS, inputs, targets).norms(2)
    model.bias.requires_grad_(False)
    weights = record(model, LOSS, inputs, targets).norms(2)
    torch.testing.assert_close(both**2, 2 * weights**2)
