import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.core.errors import CheckpointError, DataError, LedgerError, PrivacyWarning, Unsupported
from hush.core.randomness import source_for
from hush.training.step import PrivateStep
from tests.training import helpers
from tests.training.helpers import plan_of, seeded, step_of
from tests.training.helpers import weights_of as weights

LOSS = nn.CrossEntropyLoss()
RECORDS = 64


def plan(rate: float = 0.25, norm: float = 1.0, multiplier: float = 1.0) -> hush.Plan:
    sampling = hush.FullBatch() if rate == 1 else hush.Poisson(rate)
    return plan_of(sampling, hush.L2(norm), multiplier)


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    return model, (torch.randn(RECORDS, 5, dtype=dtype), torch.randint(0, 3, (RECORDS,)))


def begin(
    chosen: hush.Plan | None = None, model: nn.Module | None = None, **options: Any
) -> PrivateStep:
    return step_of(model or problem()[0], chosen or plan(), **{"records": RECORDS, **options})


def run(chosen: hush.Plan, steps: int, *, seed: int = 1, **options: Any) -> tuple[Tensor, PrivateStep]:
    step = helpers.run(begin(chosen, lr=0.5, seed=seed, **options), problem()[1], steps)
    return weights(step.model), step


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_without_noise_and_clipping_it_is_plain_training(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    model, (inputs, targets) = problem()
    plain = copy.deepcopy(model)
    theirs = make(plain.parameters(), lr=0.5)
    step = begin(plan(norm=1e9), model, make=make, lr=0.5)
    for batch in step.batches((inputs, targets), steps=30):
        rows = batch.indices
        theirs.zero_grad()
        total = nn.functional.cross_entropy(plain(inputs[rows]), targets[rows], reduction="sum")
        (total / (0.25 * RECORDS)).backward()
        step(batch)
        theirs.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("physical", [1, 3, 1000])
def test_physical_batches_change_nothing(physical: int) -> None:
    whole, _ = run(plan(norm=0.1), 10)
    parts, _ = run(plan(norm=0.1), 10, execution=hush.Execution(physical_batch=physical))
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-12)


def test_an_empty_draw_is_a_step_of_noise_alone() -> None:
    step = begin(plan(rate=1e-9))
    before = weights(step.model)
    batch = next(step.batches(problem()[1]))
    assert len(batch) == 0
    step(batch)
    moved = weights(step.model) != before
    assert moved.double().mean() > 0.9, "a draw rounds to zero once in some 40,000"
    assert step.ledger.counts == {step.plan: 1}


@pytest.mark.usefixtures("without_noise")
def test_the_divisor_is_fixed_whoever_takes_part() -> None:
    chosen = plan(rate=0.5, norm=1e9)
    model, (inputs, targets) = problem()
    for seed in range(5):
        rows = chosen.sampling.draw(RECORDS, source_for(torch.device("cpu"), seeded(seed)))
        clone = copy.deepcopy(model)
        nn.functional.cross_entropy(clone(inputs[rows]), targets[rows], reduction="sum").backward()
        expected = torch.cat([p.grad.reshape(-1) for p in clone.parameters() if p.grad is not None])
        moved, _ = run(chosen, 1, seed=seed)
        torch.testing.assert_close((weights(model) - moved) / 0.5, expected / (0.5 * RECORDS))


@pytest.mark.usefixtures("without_noise")
def test_one_record_moves_the_sum_by_the_clipping_norm_at_most() -> None:
    model, (inputs, targets) = problem()
    inputs[0] *= 1e6
    labels = targets.clone()
    labels[0] = -1
    each = nn.CrossEntropyLoss(reduction="none")
    ends = []
    for zeroed in (False, True):

        def without_first(outputs: Tensor, labels: Tensor, zeroed: bool = zeroed) -> Tensor:
            keep = labels != -1 if zeroed else torch.ones_like(labels, dtype=torch.bool)
            values: Tensor = each(outputs, labels.clamp(min=0))
            return values * keep

        step = begin(plan(rate=1.0, norm=0.2), copy.deepcopy(model), loss=without_first, lr=1.0)
        ends.append(weights(helpers.run(step, (inputs, labels)).model))
    influence = float((ends[0] - ends[1]).norm()) * RECORDS
    assert influence == pytest.approx(0.2, rel=1e-9)


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_without_a_finite_gradient_adds_nothing_and_is_counted(bad: float) -> None:
    model, (inputs, targets) = problem(torch.float32)
    damaged, labels = inputs.clone(), targets.clone()
    damaged[:3] = bad
    labels[:3] = -100  # cross entropy ignores these: a gradient of zero
    steps = [begin(plan(rate=1.0), copy.deepcopy(model), lr=1.0) for _ in range(2)]
    helpers.run(steps[0], (damaged, targets), 2)
    helpers.run(steps[1], (inputs, labels), 2)
    assert steps[0].skipped == 6
    assert weights(steps[0].model).isfinite().all()
    torch.testing.assert_close(weights(steps[0].model), weights(steps[1].model), rtol=1e-5, atol=1e-6)


def test_the_charge_is_on_disk_before_the_model_moves(tmp_path: Path) -> None:
    model, data = problem()
    before = weights(model)
    path = tmp_path / "ledger.jsonl"
    observed: list[tuple[int, bool]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            observed.append((path.read_text().count('"charge"'), torch.equal(weights(model), before)))

    helpers.run(begin(model=model, make=Watched, ledger=path), data, 3)
    assert observed == [(1, True), (2, True), (3, True)]


def test_a_step_that_cannot_be_charged_is_not_applied(tmp_path: Path) -> None:
    ledger = hush.Ledger(tmp_path / "ledger.jsonl")
    step = begin(ledger=ledger)
    before = weights(step.model)
    ledger.close()
    with pytest.raises(LedgerError, match="must not be applied"):
        step(next(step.batches(problem()[1])))
    assert torch.equal(weights(step.model), before)
    assert step.steps == 0


def test_only_a_fresh_draw_may_be_used() -> None:
    model, data = problem()
    step, other = begin(model=model), begin(model=model)
    batch = next(step.batches(data))
    with pytest.raises(DataError, match="drawn by another step"):
        other(batch)
    step(batch)
    with pytest.raises(DataError, match="used before"):
        step(batch)
    for other_value, kind in ((None, "a NoneType"), (data, "a tuple")):
        with pytest.raises(DataError, match=f"{kind} is not a batch of `step.batches`"):
            step(other_value)  # type: ignore[arg-type]
    assert step.ledger.counts == {step.plan: 1}


def test_a_batch_and_a_step_print_nothing_private_and_a_batch_is_not_read() -> None:
    step = begin()
    assert repr(step) == f"PrivateStep({plan()}, steps=0, ledger=in memory)"
    for batch in step.batches(problem()[1], steps=1):
        assert repr(batch) == "Batch(private)"
        with pytest.raises(DataError, match=r"a batch is private: pass it to step\(batch\)"):
            batch[0]
        with pytest.raises(DataError, match="a batch is private"):
            _, _ = batch
        with pytest.raises(AttributeError, match=r"it is private\. Pass it to step\(batch\)"):
            _ = batch.inputs  # type: ignore[attr-defined]
        step(batch)


def test_a_draw_may_not_be_left_out() -> None:
    draws = begin().batches(problem()[1])
    next(draws)
    with pytest.raises(DataError, match="drawn and not used"):
        next(draws)


def test_the_data_has_the_number_of_records_that_was_said() -> None:
    _, (inputs, targets) = problem()
    with pytest.raises(DataError, match=r"63 records.* records=64"):
        next(begin().batches((inputs[1:], targets[1:])))


def sum_of(step: PrivateStep, data: Any) -> Tensor:
    return step.clipped_sum(next(step.batches(data))).clone()


@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.cross_entropy,
        lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="sum"),
    ],
)
def test_a_reduced_loss_is_computed_record_by_record(loss: Any) -> None:
    steps = [begin(plan(1), loss=each) for each in (loss, LOSS)]
    torch.testing.assert_close(*(sum_of(step, problem()[1]) for step in steps))
    assert all(step.arithmetic == "proved" for step in steps)


class WithLoss(nn.Module):
    """A model that returns its own mean loss, as those of the transformers library do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.model(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, labels), logits=scores)


def test_the_loss_of_a_model_is_computed_record_by_record() -> None:
    model, (x, y) = problem()
    own = begin(plan(1), WithLoss(model), loss=lambda outputs, _: outputs.loss)
    actual = sum_of(own, ({"x": x, "labels": y}, y))
    torch.testing.assert_close(actual, sum_of(begin(plan(1)), (x, y)))


def test_a_loss_that_compares_records_is_refused_before_anything_is_charged() -> None:
    def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
        own = torch.arange(len(outputs))
        return nn.functional.cross_entropy(outputs @ outputs.mT, own, reduction="none")

    step = begin(loss=contrastive)
    before = weights(step.model)
    with pytest.raises(Unsupported, match="depends on the other records"):
        step(next(step.batches(problem()[1])))
    assert step.steps == 0
    assert torch.equal(weights(step.model), before)


def test_a_model_switched_back_to_batch_statistics_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    step = begin(model=model.eval())
    draws = step.batches(problem()[1])
    step(next(draws))
    model.train()
    with pytest.raises(Unsupported, match="mixes the records"):
        step(next(draws))


def test_earlier_charges_on_a_ledger_passed_as_a_path_are_reported_once(tmp_path: Path) -> None:
    path, data = tmp_path / "ledger.jsonl", problem()[1]
    _, first = run(plan(), 2, ledger=path)
    state = first.state_dict()
    first.ledger.close()
    again = begin(ledger=path)
    with pytest.warns(PrivacyWarning, match=r"already has 2 charges.*Pass another"):
        helpers.run(again, data)
    helpers.run(again, data)
    again.ledger.close()
    assert again.ledger.counts == {plan(): 4}
    resumed = begin(ledger=path, lr=0.5, seed=1)
    resumed.load_state_dict(state)
    helpers.run(resumed, data)
    resumed.ledger.close()
    helpers.run(begin(ledger=hush.Ledger(path)), data)


def test_a_ledger_of_another_plan_is_refused_unless_opened_on_purpose(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    _, step = run(plan(), 2, ledger=path)
    step.ledger.close()
    with pytest.raises(LedgerError, match=r"another plan.*hush\.Ledger"):
        run(plan(multiplier=2.0), 2, ledger=path)
    with hush.Ledger(path) as ledger:
        _, step = run(plan(multiplier=2.0), 3, ledger=ledger)
        assert ledger.counts == {plan(): 2, plan(multiplier=2.0): 3}
    with hush.Ledger(path) as ledger:
        assert sum(ledger.counts.values()) == 5


def test_state_goes_on_exactly() -> None:
    whole, _ = run(plan(), 8, make=torch.optim.Adam)
    _, step = run(plan(), 5, make=torch.optim.Adam)
    repeated = begin(make=torch.optim.Adam, lr=0.5, ledger=step.ledger)
    repeated.load_state_dict(copy.deepcopy(step.state_dict()))
    helpers.run(repeated, problem()[1], 3)
    assert torch.equal(weights(repeated.model), whole)
    assert step.ledger.counts == {plan(): 8}


def test_state_of_another_run_is_refused() -> None:
    _, step = run(plan(), 5)
    state = step.state_dict()
    with pytest.raises(CheckpointError, match="plan"):
        begin(plan(multiplier=2.0), lr=0.5, ledger=step.ledger).load_state_dict(state)
    with pytest.raises(CheckpointError, match="records"):
        begin(lr=0.5, records=RECORDS + 1, ledger=step.ledger).load_state_dict(state)
    with pytest.raises(LedgerError, match="charges are missing"):
        begin(lr=0.5, ledger=hush.Ledger()).load_state_dict(state)


def test_repeating_a_step_on_other_data_is_refused_and_reseeding_pays() -> None:
    _, step = run(plan(), 1)
    early = copy.deepcopy(step.state_dict())
    _, (inputs, targets) = problem()
    helpers.run(step, (inputs, targets), 2)

    repeated = begin(lr=0.5, ledger=step.ledger)
    repeated.load_state_dict(early)
    with pytest.raises(LedgerError, match="same noise"):
        repeated(next(repeated.batches((inputs + 1, targets))))
    assert step.ledger.counts == {plan(): 3}

    repeated = begin(lr=0.5, ledger=step.ledger)
    repeated.load_state_dict(early)
    repeated.reseed()
    repeated(next(repeated.batches((inputs + 1, targets))))
    assert step.ledger.counts == {plan(): 4}


def test_a_pending_batch_is_not_released_under_new_randomness() -> None:
    step = begin()
    batches = step.batches(problem()[1])
    step(next(batches))
    next(batches)
    with pytest.raises(DataError, match="a batch is pending, which was drawn from the old randomness"):
        step.reseed()
    # two releases of one draw are one step with less noise: docs/guarantees/ledger.md, 7
    once, twice = (hush.plans.dpsgd(rate=0.01, multiplier=m) for m in (1.0, 0.5**0.5))
    assert round(hush.epsilon(twice, 1, 1e-5).epsilon.upper, 3) == 0.816
    assert round(hush.epsilon(once, 2, 1e-5).epsilon.upper, 3) == 0.245


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generator", None),
        ("generator", torch.zeros(3, dtype=torch.uint8)),
        ("model", None),
        ("optimizer", {}),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, value: object) -> None:
    step = begin()
    batches = step.batches(problem()[1])
    step(next(batches))
    state = copy.deepcopy(step.state_dict())
    step(next(batches))
    before = weights(step.model)
    with pytest.raises(CheckpointError, match="damaged"):
        step.load_state_dict({**state, name: value})
    assert torch.equal(weights(step.model), before)
    assert step.steps == 2


def test_layers_may_be_unfrozen_on_the_way() -> None:
    early = nn.Linear(5, 4).double().requires_grad_(False)
    step = begin(model=nn.Sequential(early, nn.Tanh(), nn.Linear(4, 3).double()))
    draws = step.batches(problem()[1])
    before = weights(early)
    step(next(draws))
    assert torch.equal(weights(early), before)
    early.requires_grad_(True)
    batch = next(draws)
    with pytest.raises(Unsupported, match=r"does not hold 0\.weight"):
        step(batch)
    step.optimizer.add_param_group({"params": list(early.parameters())})
    step(batch)
    assert (weights(early) != before).all()


def test_l_beta_clipping_above_two_trains_and_is_charged_for_its_dimension() -> None:
    noise = hush.GeneralizedGaussian(beta=2.33, multiplier=20.0)
    chosen = plan_of(clipping=hush.Lp(p=2.33, norm=0.5), noise=noise)
    after, step = run(chosen, 2)
    assert (after != weights(problem()[0])).all()
    assert step.dimension == 39
    assert step.spent(1e-5) == replace(
        hush.epsilon(chosen, steps=2, delta=1e-5, dimension=39), randomness="seeded"
    )
    # what a broken version would say: that the dimension does not matter
    one = hush.epsilon(chosen, steps=2, delta=1e-5, dimension=1).epsilon.upper
    assert step.spent(1e-5).epsilon.upper > 1.05 * one


@pytest.mark.parametrize(
    ("beta", "noise"),
    [(4.0, hush.GeneralizedGaussian(beta=4.0, multiplier=3.0)), (2.0, hush.Gaussian(3.0))],
)
def test_the_update_has_the_noise_that_is_charged(beta: float, noise: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 600)
    inputs, targets = torch.zeros(RECORDS, 100), torch.randint(0, 600, (RECORDS,))
    before = model.weight.detach().clone()
    chosen = plan_of(clipping=hush.Lp(p=beta, norm=0.5) if beta > 2 else hush.L2(0.5), noise=noise)
    helpers.run(begin(chosen, model, lr=1.0), (inputs, targets))
    # no gradient flows to these weights: what moved them is the noise alone
    moved = ((before - model.weight.detach()) * RECORDS / (3.0 * 0.5)).flatten().numpy()
    law = stats.gennorm(4.0).cdf if beta > 2 else stats.norm.cdf
    assert stats.kstest(moved, law).pvalue > 1e-6
    for wrong in (0.95, 1.05):
        assert stats.kstest(moved * wrong, law).pvalue < 1e-6


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_rows_that_no_record_has_get_the_same_noise(sparse: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
    inputs, targets = torch.randint(0, 50, (RECORDS, 2)), torch.randint(0, 3, (RECORDS,))
    table: Any = model[0].weight
    before = table.detach().clone()
    helpers.run(begin(plan_of(noise=3.0), model, lr=1.0), (inputs, targets))
    moved = (before - table.detach()) * RECORDS / 3.0
    unused = moved[50:].flatten().numpy()
    assert stats.kstest(unused, stats.norm.cdf).pvalue > 1e-6
    # a version with noise on the rows of the batch alone is caught
    assert stats.kstest(0 * unused, stats.norm.cdf).pvalue < 1e-6


def test_what_is_unfrozen_later_is_not_in_a_charge_that_grows_with_the_dimension() -> None:
    noise = hush.GeneralizedGaussian(beta=4.0, multiplier=20.0)
    model, data = problem()
    first = next(model.parameters()).requires_grad_(False)
    step = begin(plan_of(clipping=hush.Lp(p=4.0, norm=0.5), noise=noise), model)
    assert step.dimension == 19
    batches = step.batches(data, steps=2)
    step(next(batches))
    first.requires_grad_(True)
    step.optimizer.add_param_group({"params": [first]})
    batch = next(batches)
    with pytest.raises(Unsupported, match=r"39 parameters are trainable.*made for 19.*before"):
        step(batch)
    with pytest.raises(Unsupported, match="39 parameters"):
        step.batches(data)
    assert step.steps == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_would_charge_and_draw_what_the_original_does(duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(
        Unsupported, match=r"with it a PrivateStep, cannot be copied.*ledger=step\.ledger"
    ):
        duplicate(begin())


def test_two_steps_with_one_seed_on_one_ledger_do_not_share_their_noise(tmp_path: Path) -> None:
    """Released under one noise, the difference of two sums is that of the records."""

    def update(ledger: hush.Ledger) -> Tensor:
        randomness = hush.Randomness(generator=seeded(1))
        step = begin(plan(rate=1.0), ledger=ledger, randomness=randomness)
        helpers.run(step, problem()[1])
        assert step.update is not None
        return step.update.clone()

    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        first, second = update(ledger), update(ledger)
    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        third = update(ledger)
    assert torch.equal(first, update(hush.Ledger())), "the seed still repeats a run"
    for one, other in ((first, second), (first, third), (second, third)):
        assert (one != other).all()


def test_a_state_of_no_charge_is_not_loaded_after_other_charges(tmp_path: Path) -> None:
    """A run of the same seed, begun after the ledger was opened again, has the key of that state."""
    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        state = begin(seed=1, ledger=ledger).state_dict()
    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        begin(seed=1, ledger=ledger).load_state_dict(state)
        helpers.run(begin(seed=1, ledger=ledger), problem()[1])
        with pytest.raises(CheckpointError, match="same noise"):
            begin(seed=1, ledger=ledger).load_state_dict(state)


def test_an_interrupted_step_leaves_no_bare_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    step = begin()
    batches = step.batches(problem()[1])
    step(next(batches))
    monkeypatch.setattr(type(step), "private_gradient", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(next(batches))
    assert step.update is None
