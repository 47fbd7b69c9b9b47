"""Errors that a model catches, reductions over all records, operators and hooks: each record by itself.

Of every model here it is compared how far one record, there or not, moves the clipped sum.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.checks import rewind
from hush.gradients.checks.data_dependence import Path
from hush.gradients.forward.value_reads import VALUE_READS

RECORDS = 20
TARGETS = torch.arange(RECORDS) % 3


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3, bias=False)


class Root(Linear):
    """Does without the root of a matrix that is not positive definite."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            root = torch.linalg.cholesky(x[:, :1, None] * torch.eye(4) + 100 * torch.eye(4))
        except RuntimeError:
            return self.linear(x * 0)  # type: ignore[no-any-return]
        return self.linear(x * root[:, 0, :1])  # type: ignore[no-any-return]


class Lookup(Linear):
    """Takes another row of a table where there is none of the number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([[1.0] * 4, [-1.0] * 4]))

    def forward(self, x: Tensor) -> Tensor:
        place = (x[:, 0] < -100).long() * 9
        try:
            rows = nn.functional.embedding(place, self.get_buffer("table"))
        except IndexError:
            rows = nn.functional.embedding(place.clamp(max=1), self.get_buffer("table")) - 1
        return self.linear(rows * 50)  # type: ignore[no-any-return]


class AllTrue(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 50 * torch._is_all_true(x > -100))  # type: ignore[no-any-return]


class AnyTrue(Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch._is_any_true(x < -100):
            return self.linear(x * 0)  # type: ignore[no-any-return]
        return self.linear(x * 50)  # type: ignore[no-any-return]


class Validated(Linear):
    """torch.distributions looks at its arguments by these."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            torch.distributions.Normal(x, x[:, :1] + 100.0)
        except ValueError:
            return self.linear(x * 0)  # type: ignore[no-any-return]
        return self.linear(x * 50)  # type: ignore[no-any-return]


def step_of(model: nn.Module, sampling: Any = None, **options: Any) -> hush.PrivateStep:
    plan = hush.Plan(
        sampling=sampling or hush.FullBatch(),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=20.0),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(3)
    return hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        plan,
        records=RECORDS,
        randomness=hush.Randomness(generator=source),
        **options,
    )


def moved(make: Callable[[], nn.Module]) -> float:
    """How far the first record, there or not, moves the clipped sum."""
    inputs = torch.ones(RECORDS, 4)
    sums = []
    for there in (True, False):
        inputs[0] = -1e3 if there else 0.0
        step = step_of(make())
        present = torch.ones(RECORDS, dtype=torch.bool)
        present[0] = there
        batch = next(step.batches((inputs, TARGETS), steps=1, present=present))
        sums.append(step.clipped_sum(batch).clone())
    return float((sums[0] - sums[1]).norm())


MODELS: list[type[nn.Module]] = [Root, Lookup, AllTrue, AnyTrue, Validated]


@pytest.mark.parametrize("make", MODELS)
def test_one_record_decides_for_itself_alone(make: type[nn.Module]) -> None:
    assert moved(make) < 1.001


@pytest.mark.parametrize("make", [Root, Lookup])
def test_an_error_of_one_record_that_is_caught_for_all_moves_them_all(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "note_error", lambda self, records: None)
    assert moved(make) > 5


@pytest.mark.parametrize("make", [AllTrue, AnyTrue])
def test_a_reduction_over_all_records_lets_one_decide(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (torch._is_all_true, torch._is_any_true):
        monkeypatch.delitem(VALUE_READS, function)
    assert moved(make) > 5


@torch.library.custom_op("hush_tests::of_all", mutates_args=())
def of_all(x: Tensor) -> Tensor:
    return x * 1.0


def of_all_records(info: Any, in_dims: Any, x: Tensor) -> Any:
    return x * (x.abs().max() < 100), in_dims[0]


torch.library.register_vmap(of_all, of_all_records)


@pytest.mark.parametrize("call", [torch.ops.hush_tests.of_all, torch.ops.hush_tests.of_all.default])
def test_an_operator_that_is_given_all_records_is_refused_however_it_is_called(call: Any) -> None:
    class Model(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(call(x))  # type: ignore[no-any-return]

    with pytest.raises(Unsupported, match="of_all has a batching rule of its own"):
        moved(Model)


def test_an_operator_that_keeps_a_value_is_noticed() -> None:
    """Its body runs outside of the recording, on plain tensors."""
    kept: list[Any] = []

    @torch.library.custom_op("hush_tests::keeping", mutates_args=())
    def keeping(x: Tensor) -> Tensor:
        model = kept[-1]
        model.largest = max(model.largest, x.abs().max().item())
        return x / float(model.largest)

    class Model(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.largest = 100.0
            kept.append(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.ops.hush_tests.keeping(x))  # type: ignore[no-any-return]

    with pytest.raises(Unsupported, match="keeps largest from its forward pass"):
        moved(Model)


class Lazy(Linear):
    """Installs a hook in its first pass, and notes that it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.inner.register_forward_hook(lambda *_: None)
            self.installed = True
        return self.linear(self.inner(x))  # type: ignore[no-any-return]


def test_hooks_that_a_pass_installs_are_there_once_whoever_was_drawn() -> None:
    model = Lazy()
    step = step_of(model, hush.Poisson(rate=0.1), execution=hush.Execution(physical_batch=1))
    drawn = set()
    for batch in step.batches((torch.randn(RECORDS, 4), TARGETS), steps=5):
        step(batch)
        drawn.add(len(batch))
        assert len(model.inner._forward_hooks) == 1
    assert len(drawn) > 1


def test_hooks_pile_up_where_they_are_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewind, "HOOKS", frozenset())
    model = Lazy()
    step = step_of(model, execution=hush.Execution(physical_batch=1))
    step(next(step.batches((torch.randn(RECORDS, 4), TARGETS), steps=1)))
    assert len(model.inner._forward_hooks) > RECORDS


@pytest.mark.parametrize("name", ["loss", "clipped_share"])
def test_sensitive_metrics_move_no_state(name: str) -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda *_: (model.get_buffer("calls").add_(1), None)[1])
    counts = []

    def note(step: int, metrics: Any) -> None:
        metrics.sensitive(name)
        counts.append(float(model.get_buffer("calls")))

    hush.train(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        hush.Plan(
            sampling=hush.Poisson(rate=0.3),
            clipping=hush.L2(norm=1.0),
            noise=hush.Gaussian(multiplier=2.0),
        ),
        (torch.randn(RECORDS, 4), TARGETS),
        budget=hush.Budget(epsilon=50.0, delta=1e-3),
        steps=4,
        execution=hush.Execution(physical_batch=2),
        callbacks=[note],
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(0)),
    )
    assert counts == [counts[0] + step for step in range(4)]


def test_the_probe_leaves_nothing_of_a_record_in_evaluation_mode() -> None:
    class Stash(Linear):
        """Takes positive entries alone, so that the data's own records are tried, and keeps scores."""

        scores: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if bool((x <= 0).any()):
                raise ValueError("positive entries alone")
            scores: Tensor = self.linear(x)
            if not self.training:
                self.scores = scores
            return scores

    model = Stash()
    step_of(model).batches((torch.rand(RECORDS, 4) + 0.1, TARGETS))
    assert model.scores is None


def test_views_that_are_a_module_are_watched() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.stack([x, -x])

    views = Twice()
    step = step_of(
        nn.Linear(4, 3), hush.Poisson(rate=0.1), execution=hush.Execution(physical_batch=1), views=views
    )
    for number, batch in enumerate(step.batches((torch.randn(RECORDS, 4), TARGETS), steps=5), 1):
        step(batch)
        assert views.calls == number
