from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, Unsupported
from hush.gradients.checks.module_state import ModuleState

PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
)
INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12) % 3


class Stateful(nn.Module):
    """A linear layer that keeps something between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)


class PythonMaximum(Stateful):
    largest = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, x.abs().max().item())
        return self.linear(x / self.largest)  # type: ignore[no-any-return]


class TensorMaximum(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.scale = torch.tensor(max(float(self.scale), float(x.abs().max())))
        return self.linear(x / self.scale)  # type: ignore[no-any-return]


class Filled(TensorMaximum):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.fill_(float(x.abs().max()))
        return self.linear(x / self.scale)  # type: ignore[no-any-return]


class RunningMean(Stateful):
    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return self.linear(x - self.mean)  # type: ignore[no-any-return]


class LastActivations(Stateful):
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        previous, self.kept = self.kept, scores.detach()
        return scores if previous is None else scores + 0 * scores.detach()


class Listed(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.mean().item())
        return self.linear(x)  # type: ignore[no-any-return]


class Statistics:
    total = 0.0


class InAnObject(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.total += x.sum().item()
        return self.linear(x)  # type: ignore[no-any-return]


class BufferBehindItsBack(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").numpy()[0] = x.sum().item()
        return self.linear(x)  # type: ignore[no-any-return]


KEPT: dict[type[Stateful], str] = {
    PythonMaximum: "largest",
    TensorMaximum: "scale",
    Filled: "scale",
    RunningMean: "mean",
    LastActivations: "kept",
    Listed: "means",
    InAnObject: "statistics",
    BufferBehindItsBack: "seen",
}


def step_of(model: nn.Module, loss: Any = None, **options: Any) -> hush.PrivateStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hush.PrivateStep(
        model, loss or nn.CrossEntropyLoss(), optimizer, PLAN, records=len(INPUTS), **options
    )


def run(model: nn.Module, loss: Any = None, steps: int = 3) -> hush.PrivateStep:
    step = step_of(model, loss)
    for batch in step.batches((INPUTS, TARGETS), steps=steps):
        step(batch)
    return step


@pytest.mark.parametrize("kind", list(KEPT), ids=lambda kind: kind.__name__)
def test_python_state_that_follows_the_records_is_refused_by_name(kind: type[Stateful]) -> None:
    model = kind()
    before = ModuleState(model)
    before.begin()
    with pytest.raises(Unsupported, match=rf"(keeps {KEPT[kind]} from|all records share)"):
        step_of(model).batches((INPUTS, TARGETS))
    before.check()  # nothing of the records stays behind


def test_what_two_records_do_not_show_is_refused_before_it_is_released() -> None:
    class Late(Stateful):
        """Keeps the largest value, once there is one that the first two records do not have."""

        largest = 1e3

        def forward(self, x: Tensor) -> Tensor:
            self.largest = max(self.largest, x.abs().max().item())
            return self.linear(x / self.largest)  # type: ignore[no-any-return]

    inputs = INPUTS.clone()
    inputs[7] = 1e4
    model = Late()
    step = step_of(model)
    before = model.linear.weight.clone()
    batch = next(step.batches((inputs, TARGETS), steps=1))
    with pytest.raises(Unsupported, match="keeps largest from its forward pass"):
        step(batch)
    assert not step.ledger.counts
    assert torch.equal(model.linear.weight, before)
    # it was put back, and shows again when the step is run again
    assert model.largest == 1e3
    with pytest.raises(Unsupported, match="keeps largest from"):
        step(batch)
    step(next(step.batches((INPUTS, TARGETS), steps=1)))
    assert list(step.ledger.counts.values()) == [1]


def test_what_a_stopped_pass_left_is_refused_in_the_next() -> None:
    class Flipping(Stateful):
        """Turns its sign for good at a record, and stops."""

        sign = 1.0

        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 1e3).any()):
                self.sign = -1.0
                raise IndexError("out of range")
            return self.sign * self.linear(x)  # type: ignore[no-any-return]

    inputs = INPUTS.clone()
    inputs[7] = 1e4
    model = Flipping()
    step = step_of(model)
    with pytest.raises(DataError, match="out of range"):
        step(next(step.batches((inputs, TARGETS), steps=1)))
    inputs[7] = 0.0
    for ask in (lambda: step(next(step.batches((inputs, TARGETS), steps=1))), lambda: step.spent(1e-5)):
        with pytest.raises(Unsupported, match=r"keeps sign from .* put back what was there before"):
            ask()
    assert not step.ledger.counts


def test_a_record_s_trace_is_noticed_though_the_next_pass_begins_without_it() -> None:
    class Late(Stateful):
        """Sets a scale in every pass, and keeps to another one after a large record."""

        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.scale = max(self.scale, 2.0 if bool((x > 1e3).any()) else 1.0)
            return self.linear(x) / self.scale  # type: ignore[no-any-return]

    inputs = INPUTS.clone()
    inputs[2] = 1e4
    step = step_of(Late(), execution=hush.Execution(physical_batch=3))
    with pytest.raises(Unsupported, match="keeps scale from"):
        step(next(step.batches((inputs, TARGETS), steps=1)))
    assert not step.ledger.counts


class InSlots:
    __slots__ = ("seen",)


@pytest.mark.parametrize("holder", [InSlots(), bytearray(4)], ids=["slots", "bytearray"])
def test_slots_and_bytes_are_read(holder: Any) -> None:
    model = Stateful()
    model.holder = holder
    state = ModuleState(model)
    state.begin()
    state.check()
    state.begin()
    if isinstance(holder, bytearray):
        holder[0] = 1
    else:
        holder.seen = 3.0
    with pytest.raises(Unsupported, match="keeps holder from"):
        state.check()


def test_a_loss_module_is_watched_too() -> None:
    class Weighing(nn.Module):
        reduction = "mean"
        seen = 0.0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.seen += outputs.detach().sum().item()
            return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(Unsupported, match=r"keeps loss\.seen"):
        run(nn.Linear(4, 3), Weighing())


class CachedMask(Stateful):
    """A cache by shape, as positions and masks are kept."""

    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.shapes:
            self.shapes[x.shape[1]] = torch.ones(x.shape[1])
        self.mask = torch.ones(x.shape[1])
        return self.linear(x * self.mask * self.shapes[x.shape[1]])  # type: ignore[no-any-return]


class Counted(Stateful):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)  # type: ignore[no-any-return]


def weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 3))


@pytest.mark.parametrize(
    "make",
    [
        CachedMask,
        Counted,
        weight_normed,
        lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    ],
    ids=["cache", "counter", "weight norm", "spectral norm", "parametrized", "parametrized spectral"],
)
def test_state_that_does_not_follow_the_records_is_allowed(make: Callable[[], nn.Module]) -> None:
    assert run(make()).steps == 3


def test_what_is_set_between_steps_is_no_matter() -> None:
    class Tempered(Stateful):
        temperature = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) / self.temperature  # type: ignore[no-any-return]

    model = Tempered()
    step = step_of(model)
    for batch in step.batches((INPUTS, TARGETS), steps=3):
        model.temperature *= 0.9
        step(batch)
    assert step.steps == 3


class Scaled(torch.autograd.Function):
    """Divides by the largest value of all it is given: under its own rule, of the whole batch."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / x.abs().max()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return Scaled.apply(x), in_dims[0]  # type: ignore[no-untyped-call]


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@torch.library.custom_op("hush_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x / x.abs().max()


@scaled.register_vmap
def _(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, Any]:
    return scaled(x), in_dims[0]


class Applied(Stateful):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [Scaled.apply, scaled], ids=["autograd.Function", "custom_op"])
def test_a_batching_rule_of_its_own_is_refused(function: Any) -> None:
    with pytest.raises(Unsupported, match="batching rule of its own"):
        run(Applied(function))


def test_a_generated_batching_rule_keeps_records_apart() -> None:
    assert run(Applied(Doubled.apply)).steps == 3
