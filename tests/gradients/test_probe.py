"""Mistakes that the probe finds on two synthetic records, and properties that it reports."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, PrivacyWarning, Unsupported
from hush.gradients.probe import Probed, buffers_restored, check_independent_losses, probe
from hush.gradients.recording import per_sample_losses, record
from tests.gradients.oracle import check_tape, one_at_a_time

LOSS = nn.CrossEntropyLoss(reduction="none")
INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.zeros(3, dtype=torch.long)
PAIR = INPUTS[:2], TARGETS[:2]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Network(nn.Module):
    """A linear layer with whatever a subclass does beside it."""

    seen: Tensor

    def __init__(self, beside: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(4))
        self.hidden: Any = None
        self.history: list[Any] = []
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        extra = None if self.beside is None else self.beside(self, x)
        return scores if extra is None else scores + extra * torch.arange(3.0).to(scores)


def running_mean(model: Any, x: Tensor) -> None:
    model.seen.mul_(0.9).add_(x.detach().mean(0))


def replaced_buffer(model: Any, x: Tensor) -> None:
    model.seen = 0.9 * model.seen + x.detach().mean(0)


def by_way_of_a_number(model: Any, x: Tensor) -> None:
    model.seen.data[:1].fill_(x.max().item())


def recurrent_state(model: Any, x: Tensor) -> Any:
    before = torch.zeros_like(x[:, :1]) if model.hidden is None else model.hidden
    model.hidden = torch.tanh(before + x[:, :1])
    return before


def number(model: Any, x: Tensor) -> Any:
    before, model.hidden = model.hidden or 0.0, float(x.sum())
    return torch.full((1, 1), before)


def history(model: Any, x: Tensor) -> Any:
    model.history.append(x)
    return model.history[0][:, :1]


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        (running_mean, "seen"),
        (replaced_buffer, "seen"),
        (by_way_of_a_number, "seen"),
        (recurrent_state, "hidden"),
        (number, "hidden"),
        (history, "of the records"),
    ],
)
def test_a_module_that_keeps_something_of_a_record_is_refused(
    beside: Callable[[Any, Tensor], Any], name: str
) -> None:
    model = Network(beside)
    with pytest.raises(Unsupported, match=f"the model keeps .*{name}"):
        probe(model, LOSS, *PAIR)
    assert model.seen.tolist() == [0, 0, 0, 0], "nothing of the records stays behind"
    assert (model.hidden, model.history) == (None, [])


def test_a_tensor_kept_outside_of_modules_is_found() -> None:
    kept = [torch.zeros(1)]

    def global_state(model: Any, x: Tensor) -> Tensor:
        before = kept[-1].sum()
        kept.append(x.detach())
        return before

    with pytest.raises(Unsupported, match="the model keeps something of the records"):
        probe(Network(global_state), LOSS, *PAIR)


def test_buffers_that_change_in_the_same_way_for_all_records_are_named_and_restored() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    names = tuple(f"0.parametrizations.weight.0.{name}" for name in ("_u", "_v"))
    # the power iteration may have converged when the layer is made
    model.get_buffer(names[0]).copy_(torch.tensor([1.0, 0.0, 0.0]))
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = probe(model, LOSS, *PAIR)
    assert found == Probed(changing_buffers=names)
    with buffers_restored(model, names):
        record(model, LOSS, *PAIR)
        assert not torch.equal(model.get_buffer(names[0]), before[names[0]])
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name])


def branching(model: Any, x: Tensor) -> Any:
    return model.linear(-x) if x.sum() > 0 else None


def item(model: Any, x: Tensor) -> Any:
    return model.linear(x) * x.max().item()


def shape(model: Any, x: Tensor) -> Any:
    return model.linear(x[x > 0].sum() * x)


def written_constant(model: Any, x: Tensor) -> Any:
    values = torch.zeros(1, 4, dtype=x.dtype)
    values += x
    return model.linear(values)


def through_numpy(model: Any, x: Tensor) -> Any:
    return model.linear(torch.from_numpy(x.numpy() ** 2))


def derived_in_place(model: Any, x: Tensor) -> Any:
    weight = model.linear.weight * 2
    scores = nn.functional.linear(x, weight)
    return scores + nn.functional.linear(x, weight.mul_(3))


@pytest.mark.parametrize(
    "beside", [branching, item, shape, written_constant, through_numpy, derived_in_place]
)
def test_what_vmap_cannot_run_is_computed_one_record_at_a_time(
    beside: Callable[[Any, Tensor], Any],
) -> None:
    model = Network(beside).double()
    inputs = INPUTS.double()
    found = probe(model, LOSS, inputs[:2], TARGETS[:2])
    assert found == Probed(one_by_one=True)
    expected = one_at_a_time(model, LOSS, inputs, TARGETS, 3)
    check_tape(record(model, LOSS, inputs, TARGETS, one_by_one=True), expected, 1e-10)
    losses = per_sample_losses(model, LOSS, inputs, TARGETS, one_by_one=True)
    torch.testing.assert_close(losses, torch.cat([LOSS(model(x[None]), TARGETS[:1]) for x in inputs]))


def test_draws_of_a_record_alone_do_not_depend_on_the_others() -> None:
    def drawing(model: Any, x: Tensor) -> Tensor:
        for _ in range(int(x.sum().abs()) + 1):
            noise = torch.rand(1, 3)
        return noise

    model = Network(drawing)
    values = []
    for scale in (1.0, 9.0):
        torch.manual_seed(0)
        inputs = torch.stack([INPUTS[0] * scale, INPUTS[1]])
        values.append(per_sample_losses(model, LOSS, inputs, TARGETS[:2], one_by_one=True)[1])
    assert torch.equal(*values)


def test_parameters_that_the_loss_does_not_reach_are_reported_with_a_warning() -> None:
    model = Network()
    model.unused.requires_grad_(True)
    assert probe(model, LOSS, *PAIR).unused == ("unused.weight", "unused.bias")
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, LOSS, optimizer, plan, records=3)
    with pytest.warns(PrivacyWarning, match=r"does not depend on unused\.weight"):
        next(step.batches((INPUTS, TARGETS)))


def test_a_layer_without_a_shape_is_named() -> None:
    with pytest.raises(Unsupported, match="is not initialised"):
        probe(nn.Sequential(nn.LazyLinear(3)), LOSS, *PAIR)


def test_rows_that_are_rescaled_in_place_are_refused() -> None:
    class Rescaling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.embedding((x[:, 0] > 0).long(), self.weight, max_norm=0.1)

    named = pytest.raises(Unsupported, match="changes its parameters")
    with pytest.warns(UserWarning, match="performance drop"), named:
        probe(Rescaling(4, 3), LOSS, *PAIR)


def test_random_states_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    before = torch.get_rng_state()
    probe(model, LOSS, *PAIR)
    assert torch.equal(torch.get_rng_state(), before)


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(inputs - inputs.mean(0))
        return scores


def test_ordinary_models_pass_and_keep_their_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    check_independent_losses(model, LOSS, INPUTS, TARGETS)
    assert model.training
    assert model[1].training
    check_independent_losses(model, LOSS, torch.full((2, 4), torch.nan), TARGETS)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_of_a_model_that_draws_for_each_place_is_taken(reduction: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction=reduction)

    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        check_independent_losses(model, loss, INPUTS, TARGETS)
        with pytest.raises(Unsupported, match="depends on the other records"):
            check_independent_losses(nn.Sequential(Centred(), model[1]), loss, INPUTS, TARGETS)


class Autoencoder(nn.Module):
    """A variational one, which draws in evaluation mode as well."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)
        self.mixing = mixing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x - x.mean(0) if self.mixing else x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def evidence_bound(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    decoded, mean, log_variance = outputs
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (decoded - targets).square().sum(1) + divergence


def test_a_model_that_draws_is_compared_under_the_same_draws() -> None:
    check_independent_losses(Autoencoder(), evidence_bound, INPUTS, INPUTS)
    with pytest.raises(Unsupported, match="depends on the other records"):
        check_independent_losses(Autoencoder(mixing=True), evidence_bound, INPUTS, INPUTS)


@pytest.mark.parametrize("outputs", [1, 3])
def test_targets_that_broadcast_over_records_are_named_for_any_number_of_outputs(outputs: int) -> None:
    def squared(scores: Tensor, targets: Tensor) -> Tensor:
        return (scores - targets).square().mean()

    with pytest.raises(Unsupported, match="outputs and targets with different shapes"):
        probe(nn.Linear(4, outputs), squared, INPUTS[:2], torch.rand(2))


class Standardised(nn.Linear):
    """Batch normalisation written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return (scores - scores.mean(0)) / (scores.std(0) + 1e-5)


def test_batch_statistics_written_by_hand_are_refused_without_a_warning_of_torch() -> None:
    for classes in [2] * 10 + [5]:  # of two records, two classes often have equal scores
        with pytest.raises(Unsupported, match="depends on the other records"):
            probe(Standardised(4, classes), LOSS, *PAIR)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_no_layer_with_batch_statistics_is_missed(autocast: bool) -> None:
    """Whatever its weights, and though some change a loss by little; low precision hides none."""
    for seed in range(60):
        torch.manual_seed(seed)
        model, inputs = Centred(), torch.randn(2, 4)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            pytest.raises(Unsupported, match="depends on the other records"),
        ):
            check_independent_losses(model, LOSS, inputs, TARGETS)


class Positions(nn.Linear):
    """Numbers the positions of a sequence from a buffer that is too short, as BERT does."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("positions", torch.arange(3.0)[None])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions.expand(x.shape))


@pytest.mark.parametrize(
    ("model", "loss", "inputs", "targets", "reason"),
    [
        (nn.Linear(4, 3), LOSS, INPUTS.double(), TARGETS, r"inputs\.to\(torch\.float32\)"),
        (nn.Linear(4, 3), LOSS, INPUTS.long(), TARGETS, r"inputs\.to\(torch\.float32\)"),
        (nn.LayerNorm(4), LOSS, INPUTS.double(), TARGETS, r"inputs\.to\(torch\.float32\)"),
        (nn.Linear(4, 3), LOSS, INPUTS, TARGETS.to(torch.uint8), r"targets\.long\(\)"),
        (nn.Linear(5, 3), LOSS, INPUTS, TARGETS, "do not fit each other or the model"),
        (
            nn.Linear(4, 1),
            lambda o, t: nn.functional.binary_cross_entropy_with_logits(o, t, reduction="none"),
            INPUTS,
            TARGETS.float(),
            r"targets\.unsqueeze\(1\)",
        ),
        (
            nn.Embedding(9, 3),
            LOSS,
            TARGETS.float(),
            TARGETS,
            r"indices of an embedding .*inputs\.long\(\)",
        ),
        (Positions(), LOSS, INPUTS, TARGETS, "do not fit each other or the model .*expanded size"),
        (nn.Conv1d(4, 3, 5), LOSS, INPUTS[:, :, None], TARGETS, "do not fit .*Kernel size"),
    ],
    ids=[
        *("float64", "integers", "layer norm", "bytes", "sizes", "broadcast"),
        *("float tokens", "too long a sequence", "too short a signal"),
    ],
)
def test_types_and_shapes_that_do_not_fit_are_named(
    model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        record(model, loss, inputs, targets)
