"""Models that would let one record touch another, or slip past clipping, if they were let."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hush
from hush.core.errors import Unsupported
from hush.gradients.recording import record
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import Dense
from tests.gradients.oracle import check_tape, one_at_a_time


class Made(nn.Module):
    """A module of one function and its parameters."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.work = work
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    return flat.square().sum(1) + flat.sum(1)


def refused(model: nn.Module, reason: str, records: int = 4) -> None:
    with pytest.raises(Unsupported, match=reason):
        record(model, loss, torch.randn(records, 5), torch.zeros(records))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_without_a_batch_of_its_own_stays_within_the_record() -> None:
    torch.manual_seed(0)

    def work(self: Any, x: Tensor) -> Tensor:
        rows = functional.linear(x, self.w)
        return torch.stack([functional.scaled_dot_product_attention(r, r, r) for r in rows])

    model = Made(work, w=torch.randn(4, 5)).double()
    inputs, targets = torch.randn(3, 6, 5).double(), torch.zeros(3)
    expected = one_at_a_time(model, loss, inputs, targets, 3)
    check_tape(record(model, loss, inputs, targets), expected, 1e-10)


def test_a_decision_by_a_record_may_come_after_draws() -> None:
    """Whichever way the others go, a record draws what its place draws."""

    def work(self: Any, x: Tensor) -> Tensor:
        output: Tensor = functional.dropout(x * self.w)
        return output * 3 if (x > 0).all() else output

    model = Made(work, w=torch.ones(5))
    x = torch.ones(6, 5)
    norms = []
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        x[2] = sign
        norms.append(record(model, lambda out, _: out.sum(1), x, torch.zeros(6)).norms(2.0))
    others = torch.arange(6) != 2
    assert torch.equal(norms[0][others], norms[1][others])
    assert float(norms[0][2]) == pytest.approx(3 * float(norms[1][2]))


def test_a_generator_of_the_models_own_is_refused() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        noisy: Tensor = x * self.w * torch.randn(5, generator=torch.Generator().manual_seed(3))
        return noisy

    refused(Made(work, w=torch.ones(5)), "a generator of its own")


def test_a_buffer_is_not_written_by_way_of_a_number() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        self.seen.add_(x.sum().item())
        return functional.linear(x, self.w)

    model = Made(work, w=torch.randn(2, 5))
    model.register_buffer("seen", torch.zeros(()))
    refused(model, "that all records share", records=1)
    assert model.get_buffer("seen") == 0


def test_a_buffer_is_not_replaced_by_way_of_a_number() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        self.seen = torch.tensor(x.sum().item())
        return functional.linear(x, self.w)

    model = Made(work, w=torch.randn(2, 5))
    model.register_buffer("seen", torch.zeros(()))
    refused(model, "replaces its buffer", records=1)
    assert model.get_buffer("seen") == 0


def test_a_model_that_catches_errors_does_not_catch_decisions() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        try:
            times = int(x.sum() > 0)
        except Exception:
            times = 5
        kept: Tensor = x * self.w * (1 + times)
        return kept

    model = Made(work, w=torch.ones(5)).double()
    inputs, targets = torch.tensor([[1.0], [-1.0], [2.0]]).double().expand(3, 5), torch.zeros(3)
    expected = one_at_a_time(model, loss, inputs, targets, 3)
    check_tape(record(model, loss, inputs, targets), expected, 1e-10)


def test_inputs_are_not_written_twice() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        x.add_(1.0)
        kept: Tensor = x * self.w
        return kept * 2 if x.sum() > 0 else kept

    model = Made(work, w=torch.ones(5))
    with pytest.raises(Unsupported, match="writes into its inputs"):
        record(model, loss, torch.tensor([[3.0], [-30.0]]).repeat(1, 5), torch.zeros(2))


def test_a_parameter_that_only_some_records_use_is_no_reason_to_stop() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        kept: Tensor = x * self.w + (x * self.v if x.sum() > 0 else 0)
        return kept

    model = Made(work, w=torch.ones(5), v=torch.ones(5))
    tape = record(model, loss, torch.tensor([[1.0], [-1.0]]).expand(2, 5), torch.zeros(2))
    assert tape.unused_parameters == ()
    assert tape.norms_by_parameter(2.0)["v"].gt(0).tolist() == [True, False]


def test_parameters_do_not_change_under_way() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        hidden = functional.linear(functional.linear(x, self.w), self.v)
        with torch.no_grad():
            self.v.mul_(0.5)
        return hidden

    refused(Made(work, w=torch.randn(4, 5), v=torch.randn(3, 4)), "changes its parameters")


def test_backward_hooks_are_refused() -> None:
    model = nn.Linear(5, 2)
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    handle = model.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(Unsupported, match="backward hooks"):
        hush.PrivateStep(model, loss, torch.optim.SGD(model.parameters()), plan, records=4)
    handle.remove()
    model.register_full_backward_hook(lambda module, grads, outputs: None)
    with pytest.raises(Unsupported, match="backward hooks"):
        hush.PrivateStep(model, loss, torch.optim.SGD(model.parameters()), plan, records=4)


def test_a_dimension_that_is_not_there_is_no_index_of_a_record() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        output: Tensor = (x * self.w).flatten(2)
        return output

    with pytest.raises(IndexError, match="Dimension out of range"):
        record(Made(work, w=torch.ones(5)), loss, torch.randn(3, 5), torch.zeros(3))


def test_functions_of_what_autograd_saves_are_refused() -> None:
    """They see all records: here one scale for all, by which each record's activations are rounded."""

    def compress(x: Tensor) -> Tensor:
        return (x / x.abs().max() * 7).round()

    def work(self: Any, x: Tensor) -> Tensor:
        with saved_tensors_hooks(compress, lambda x: x):
            return functional.linear(x, self.w).tanh()

    refused(Made(work, w=torch.randn(5, 5)), "saved_tensors_hooks")


def test_activations_may_be_kept_on_the_cpu() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        with save_on_cpu():
            return functional.linear(x, self.w).tanh()

    model = Made(work, w=torch.randn(4, 5)).double()
    inputs, targets = torch.randn(3, 5).double(), torch.zeros(3)
    expected = one_at_a_time(model, loss, inputs, targets, 3)
    check_tape(record(model, loss, inputs, targets), expected, 1e-10)


@pytest.mark.parametrize("again", [False, True])
def test_a_branch_does_not_take_back_its_random_numbers(again: bool) -> None:
    """Set back to before the branch, records of both branches would draw the same numbers."""

    def work(self: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            more = bool(torch.rand(()) < 0.5)
        noise = torch.rand(10)[5:] if more else torch.rand(5)
        if again:
            noise = noise * (1.0 if torch.rand(()) < 0.5 else 2.0)
        output: Tensor = x * self.w * noise
        return output

    torch.manual_seed(0)
    refused(Made(work, w=torch.ones(5)), "fork_rng", records=16)


def test_a_model_does_not_seed_torch() -> None:
    def work(self: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        output: Tensor = x * self.w * torch.rand(5)
        return output

    torch.manual_seed(1)
    refused(Made(work, w=torch.ones(5)), "seeds torch")


def test_long_sums_that_cancel_do_not_understate_a_norm() -> None:
    """Two positions of 50,000 equal entries that cancel to one part in thirty."""
    value = 1.0721975564956665
    left = torch.tensor([[[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7]])
    right = torch.stack([torch.full((50_000,), value), torch.full((50_000,), value * (1 - 1 / 30))])[
        None
    ]
    term = OuterFactors(left, right, torch.Size((8, 50_000)))
    exact = (left.double().mT @ right.double()).norm()
    assert -1e-7 < term.norms(2.0)[0].double() / exact - 1 < 2e-5


def test_millions_of_equal_entries_do_not_understate_a_norm() -> None:
    gradients = torch.full((1, 2**22), 1.3)
    for order in (1.0, 2.0):
        exact = torch.linalg.vector_norm(gradients.double(), ord=order)
        assert abs(Dense(gradients).norms(order)[0].double() / exact - 1) < 1e-5


def test_small_numbers_in_high_powers_do_not_vanish() -> None:
    assert Dense(torch.full((1, 5), 1e-3)).norms(16.0)[0] == pytest.approx(
        1e-3 * 5 ** (1 / 16), rel=1e-5
    )
    tiny = OuterFactors(
        torch.full((1, 100, 50), 2e-23), torch.full((1, 100, 50), 5e17), torch.Size((50, 50))
    )
    assert tiny.norms(2.0)[0] == pytest.approx(float(tiny.dense().double().norm()), rel=1e-5)


def branching(self: Any, x: Tensor) -> Tensor:
    hidden: Tensor = x * self.w
    return hidden if x.sum() > 0 else hidden.sin()


def checkpointed(self: Any, x: Tensor) -> Tensor:
    """The term of the last product holds the graph of the segment before it."""
    hidden = checkpoint(lambda x: x * self.w.tanh(), x, use_reentrant=False)
    return functional.linear(hidden, self.v)


@pytest.mark.few(1)
@pytest.mark.parametrize("forward", [lambda self, x: x * self.w, branching, checkpointed])
def test_memory_does_not_grow_with_the_steps(forward: Callable[..., Tensor]) -> None:
    model = Made(forward, w=torch.ones(5), v=torch.ones(5, 5))
    for _ in range(3):
        record(model, loss, torch.randn(4, 5), torch.zeros(4))
    gc.collect()
    before = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    for _ in range(20):
        record(model, loss, torch.randn(4, 5), torch.zeros(4))
    gc.collect()
    assert sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()) <= before + 2


def test_a_recurrent_layer_under_autocast_keeps_its_precision() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.lstm(x)[0]
            return outputs[:, -1]

    model, inputs = Last(), torch.randn(3, 6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = record(model, loss, inputs, torch.zeros(3))
    full = record(model, loss, inputs, torch.zeros(3))
    torch.testing.assert_close(low.norms(2.0), full.norms(2.0), rtol=0.02, atol=0)
