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
from hush.core.errors import (
    CheckpointError,
    DataError,
    LedgerError,
    PrivacyWarning,
    Unsupported,
)
from hush.core.randomness import source_for
from hush.training.step import PrivateStep

LOSS = nn.CrossEntropyLoss()
RECORDS = 64


def plan(rate: float = 0.25, norm: float = 1.0, multiplier: float = 1.0) -> hush.Plan:
    return hush.Plan(
        sampling=hush.FullBatch() if rate == 1 else hush.Poisson(rate=rate),
        clipping=hush.L2(norm=norm),
        noise=hush.Gaussian(multiplier=multiplier),
    )


def problem(
    dtype: torch.dtype = torch.float64, hidden: int = 4
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3)).to(dtype)
    return model, (torch.randn(RECORDS, 5, dtype=dtype), torch.randint(0, 3, (RECORDS,)))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def run(
    chosen: hush.Plan,
    steps: int,
    *,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    seed: int = 1,
    hidden: int = 4,
    **options: object,
) -> tuple[Tensor, PrivateStep]:
    model, data = problem(hidden=hidden)
    step = hush.PrivateStep(
        model,
        LOSS,
        make(model.parameters(), lr=0.5),
        chosen,
        records=RECORDS,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(seed)),
        **options,  # type: ignore[arg-type]
    )
    for batch in step.batches(data, steps=steps):
        step(batch)
    return weights(model), step


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_without_noise_and_clipping_it_is_plain_training(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    model, (inputs, targets) = problem()
    plain = copy.deepcopy(model)
    ours = make(model.parameters(), lr=0.5)
    theirs = make(plain.parameters(), lr=0.5)
    step = hush.PrivateStep(model, LOSS, ours, plan(norm=1e9), records=RECORDS)
    for batch in step.batches((inputs, targets), steps=30):
        rows = batch.indices
        theirs.zero_grad()
        total = nn.functional.cross_entropy(plain(inputs[rows]), targets[rows], reduction="sum")
        (total / (0.25 * RECORDS)).backward()
        step(batch)
        theirs.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("physical", [1, 3, 16, 1000])
def test_physical_batches_change_nothing(physical: int) -> None:
    whole, _ = run(plan(norm=0.1), 10)
    parts, _ = run(plan(norm=0.1), 10, execution=hush.Execution(physical_batch=physical))
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-12)


def test_an_empty_draw_is_a_step_of_noise_alone() -> None:
    model, data = problem()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = hush.PrivateStep(model, LOSS, optimizer, plan(rate=1e-9), records=RECORDS)
    batch = next(step.batches(data))
    assert len(batch) == 0
    step(batch)
    assert (weights(model) != before).all()
    assert step.ledger.counts == {step.plan: 1}


def updates(chosen: hush.Plan, repeats: int, hidden: int) -> Tensor:
    """The updates of `repeats` independent steps from the same weights, one a row."""
    rows, before = [], weights(problem(hidden=hidden)[0])
    for seed in range(repeats):
        moved, _ = run(chosen, 1, seed=seed, hidden=hidden)
        rows.append((before - moved) / 0.5)
    return torch.stack(rows)


def noise_fits(rows: Tensor, deviation: float) -> bool:
    """Whether the rows spread normally with this deviation: its shape, and its scale by chi-square."""
    centred = (rows - rows.mean(0)) / deviation
    freedom = (len(rows) - 1) * rows.shape[1]
    scale = stats.chi2.cdf(float(centred.square().sum()), freedom)
    shape = stats.kstest(centred.flatten().numpy() * math.sqrt(len(rows) / (len(rows) - 1)), "norm")
    return bool(1e-4 < scale < 1 - 1e-4 and shape.pvalue > 1e-4)


def test_the_noise_is_the_noise_that_is_charged() -> None:
    # Every record every step: what varies between repeats is the noise alone.
    chosen = plan(rate=1.0, norm=0.3, multiplier=2.0)
    rows = updates(chosen, 40, hidden=24)
    assert rows.numel() > 8000, "so that a few percent are seen"
    charged = 2.0 * 0.3 / RECORDS
    assert noise_fits(rows, charged)
    for wrong in (0.95, 1.05):
        assert not noise_fits(rows, charged * wrong), f"a scale of {wrong} must be noticed"


@pytest.mark.usefixtures("without_noise")
def test_the_divisor_is_fixed_whoever_takes_part() -> None:
    chosen = plan(rate=0.5, norm=1e9)
    model, (inputs, targets) = problem()
    for seed in range(5):
        source = source_for(torch.device("cpu"), torch.Generator().manual_seed(seed))
        rows = chosen.sampling.draw(RECORDS, source)
        clone = copy.deepcopy(model)
        nn.functional.cross_entropy(clone(inputs[rows]), targets[rows], reduction="sum").backward()
        expected = torch.cat([p.grad.reshape(-1) for p in clone.parameters() if p.grad is not None])
        moved, _ = run(chosen, 1, seed=seed)
        torch.testing.assert_close((weights(model) - moved) / 0.5, expected / (0.5 * RECORDS))


@pytest.mark.usefixtures("without_noise")
def test_one_record_moves_the_sum_by_the_clipping_norm_at_most() -> None:
    chosen = plan(rate=1.0, norm=0.2)
    model, (inputs, targets) = problem()
    inputs[0] *= 1e6
    ends = []
    for zeroed in (False, True):
        clone = copy.deepcopy(model)
        each = nn.CrossEntropyLoss(reduction="none")

        def without_first(
            outputs: Tensor, labels: Tensor, zeroed: bool = zeroed, each: nn.Module = each
        ) -> Tensor:
            keep = labels != -1 if zeroed else torch.ones_like(labels, dtype=torch.bool)
            values: Tensor = each(outputs, labels.clamp(min=0))
            return values * keep

        labels = targets.clone()
        labels[0] = -1
        optimizer = torch.optim.SGD(clone.parameters(), lr=1.0)
        step = hush.PrivateStep(clone, without_first, optimizer, chosen, records=RECORDS)
        for batch in step.batches((inputs, labels), steps=1):
            step(batch)
        ends.append(weights(clone))
    influence = float((ends[0] - ends[1]).norm()) * RECORDS
    assert influence == pytest.approx(0.2, rel=1e-9)


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_without_a_finite_gradient_adds_nothing_and_is_counted(bad: float) -> None:
    model, (inputs, targets) = problem(torch.float32)
    chosen = plan(rate=1.0)
    clone = copy.deepcopy(model)
    damaged = inputs.clone()
    damaged[:3] = bad
    step = hush.PrivateStep(
        model, LOSS, torch.optim.SGD(model.parameters(), lr=1.0), chosen, records=RECORDS
    )
    for batch in step.batches((damaged, targets), steps=2):
        step(batch)
    assert step.skipped == 6
    assert weights(model).isfinite().all()

    labels = targets.clone()
    labels[:3] = -100  # cross entropy ignores these: a gradient of zero
    step = hush.PrivateStep(
        clone, LOSS, torch.optim.SGD(clone.parameters(), lr=1.0), chosen, records=RECORDS
    )
    for batch in step.batches((inputs, labels), steps=2):
        step(batch)
    torch.testing.assert_close(weights(model), weights(clone), rtol=1e-5, atol=1e-6)


def test_the_charge_is_on_disk_before_the_model_moves(tmp_path: Path) -> None:
    model, data = problem()
    before = weights(model)
    path = tmp_path / "ledger.jsonl"
    observed: list[tuple[int, bool]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            observed.append((path.read_text().count('"charge"'), torch.equal(weights(model), before)))

    step = hush.PrivateStep(
        model, LOSS, Watched(model.parameters()), plan(), records=RECORDS, ledger=path
    )
    for batch in step.batches(data, steps=3):
        step(batch)
    assert observed == [(1, True), (2, True), (3, True)]


def test_a_step_that_cannot_be_charged_is_not_applied(tmp_path: Path) -> None:
    model, data = problem()
    before = weights(model)
    ledger = hush.Ledger(tmp_path / "ledger.jsonl")
    step = hush.PrivateStep(
        model, LOSS, torch.optim.SGD(model.parameters()), plan(), records=RECORDS, ledger=ledger
    )
    ledger.close()
    with pytest.raises(LedgerError, match="must not be applied"):
        step(next(step.batches(data)))
    assert torch.equal(weights(model), before)
    assert step.steps == 0


def test_only_a_fresh_draw_may_be_used() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = hush.PrivateStep(model, LOSS, optimizer, plan(), records=RECORDS)
    other = hush.PrivateStep(model, LOSS, optimizer, plan(), records=RECORDS)
    batch = next(step.batches(data))
    with pytest.raises(DataError, match="not drawn by"):
        other(batch)
    step(batch)
    with pytest.raises(DataError, match="used before"):
        step(batch)
    with pytest.raises(DataError, match="not drawn by"):
        step(None)  # type: ignore[arg-type]
    assert step.ledger.counts == {step.plan: 1}


def test_a_draw_may_not_be_left_out() -> None:
    model, data = problem()
    step = hush.PrivateStep(model, LOSS, torch.optim.SGD(model.parameters()), plan(), records=RECORDS)
    draws = step.batches(data)
    next(draws)
    with pytest.raises(DataError, match="drawn and not used"):
        next(draws)


def test_the_data_has_the_number_of_records_that_was_said() -> None:
    model, (inputs, targets) = problem()
    step = hush.PrivateStep(model, LOSS, torch.optim.SGD(model.parameters()), plan(), records=RECORDS)
    with pytest.raises(DataError, match=r"63 records .* records=64"):
        next(step.batches((inputs[1:], targets[1:])))


@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.cross_entropy,
        lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="sum"),
    ],
)
def test_a_reduced_loss_is_computed_record_by_record(loss: Any) -> None:
    sums = []
    for each in (loss, nn.CrossEntropyLoss()):
        torch.manual_seed(0)
        model, data = problem()
        step = hush.PrivateStep(
            model, each, torch.optim.SGD(model.parameters()), plan(1), records=RECORDS
        )
        sums.append(step.clipped_sum(next(step.batches(data))).clone())
        assert step.arithmetic == "proved"
    torch.testing.assert_close(*sums)


class WithLoss(nn.Module):
    """A model that returns its own mean loss, as those of the transformers library do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        scores = self.model(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, labels), logits=scores)


def test_the_loss_of_a_model_is_computed_record_by_record() -> None:
    sums = []
    for own in (True, False):
        torch.manual_seed(0)
        model, (x, y) = problem()
        loss: Any = (lambda outputs, _: outputs.loss) if own else nn.CrossEntropyLoss()
        wrapped = WithLoss(model) if own else model
        step = hush.PrivateStep(
            wrapped, loss, torch.optim.SGD(model.parameters()), plan(1), records=RECORDS
        )
        data = ({"x": x, "labels": y}, y) if own else (x, y)
        sums.append(step.clipped_sum(next(step.batches(data))).clone())
    torch.testing.assert_close(*sums)


def test_a_loss_that_compares_records_is_refused_before_anything_is_charged() -> None:
    model, data = problem()

    def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
        own = torch.arange(len(outputs))
        return nn.functional.cross_entropy(outputs @ outputs.mT, own, reduction="none")

    step = hush.PrivateStep(
        model, contrastive, torch.optim.SGD(model.parameters()), plan(), records=RECORDS
    )
    before = weights(model)
    with pytest.raises(Unsupported, match="who else is in the batch"):
        step(next(step.batches(data)))
    assert step.steps == 0
    assert torch.equal(weights(model), before)


def test_a_model_switched_back_to_batch_statistics_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model.eval()
    _, data = problem()
    step = hush.PrivateStep(model, LOSS, torch.optim.SGD(model.parameters()), plan(), records=RECORDS)
    draws = step.batches(data)
    step(next(draws))
    model.train()
    with pytest.raises(Unsupported, match="mixes the records"):
        step(next(draws))


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


def test_state_goes_on_exactly(tmp_path: Path) -> None:
    whole, _ = run(plan(), 8, make=torch.optim.Adam)
    _, step = run(plan(), 5, make=torch.optim.Adam)
    state = copy.deepcopy(step.state_dict())
    model, data = problem()
    repeated = hush.PrivateStep(
        model,
        LOSS,
        torch.optim.Adam(model.parameters(), lr=0.5),
        plan(),
        records=RECORDS,
        ledger=step.ledger,
    )
    repeated.load_state_dict(state)
    for batch in repeated.batches(data, steps=3):
        repeated(batch)
    assert torch.equal(weights(model), whole)
    assert step.ledger.counts == {plan(): 8}


def resumed(chosen: hush.Plan, records: int, ledger: hush.Ledger) -> PrivateStep:
    model, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return hush.PrivateStep(model, LOSS, optimizer, chosen, records=records, ledger=ledger)


def test_state_of_another_run_is_refused() -> None:
    _, step = run(plan(), 5)
    with pytest.raises(CheckpointError, match="plan"):
        resumed(plan(multiplier=2.0), RECORDS, step.ledger).load_state_dict(step.state_dict())
    with pytest.raises(CheckpointError, match="records"):
        resumed(plan(), RECORDS + 1, step.ledger).load_state_dict(step.state_dict())
    with pytest.raises(LedgerError, match="charges are missing"):
        resumed(plan(), RECORDS, hush.Ledger()).load_state_dict(step.state_dict())


def test_repeating_a_step_on_other_data_is_refused_and_reseeding_pays() -> None:
    _, step = run(plan(), 1)
    early = copy.deepcopy(step.state_dict())
    _, (inputs, targets) = problem()
    for batch in step.batches((inputs, targets), steps=2):
        step(batch)

    repeated = resumed(plan(), RECORDS, step.ledger)
    repeated.load_state_dict(early)
    with pytest.raises(LedgerError, match="same noise"):
        repeated(next(repeated.batches((inputs + 1, targets))))
    assert step.ledger.counts == {plan(): 3}

    repeated = resumed(plan(), RECORDS, step.ledger)
    repeated.load_state_dict(early)
    repeated.reseed()
    repeated(next(repeated.batches((inputs + 1, targets))))
    assert step.ledger.counts == {plan(): 4}


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
    step = resumed(plan(), RECORDS, hush.Ledger())
    batches = step.batches(problem()[1])
    step(next(batches))
    state = copy.deepcopy(step.state_dict())
    step(next(batches))
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(CheckpointError, match="damaged"):
        step.load_state_dict({**state, name: value})
    assert all(torch.equal(before[key], held) for key, held in step.model.state_dict().items())
    assert step.steps == 2


def test_layers_may_be_unfrozen_on_the_way() -> None:
    _, data = problem()
    early, late = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
    model = nn.Sequential(early, nn.Tanh(), late)
    early.requires_grad_(False)
    optimizer = torch.optim.SGD(late.parameters(), lr=0.5)
    step = hush.PrivateStep(model, LOSS, optimizer, plan(), records=RECORDS)
    draws = step.batches(data)
    before = weights(early)
    step(next(draws))
    assert torch.equal(weights(early), before)
    early.requires_grad_(True)
    batch = next(draws)
    with pytest.raises(Unsupported, match=r"does not hold 0\.weight"):
        step(batch)
    optimizer.add_param_group({"params": list(early.parameters())})
    step(batch)
    assert (weights(early) != before).all()


@pytest.mark.parametrize("beta", [2.33, 4.0])
def test_l_beta_clipping_above_two_trains_and_is_charged_for_its_dimension(beta: float) -> None:
    chosen = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.Lp(p=beta, norm=0.5),
        noise=hush.GeneralizedGaussian(beta=beta, multiplier=20.0),
    )
    after, step = run(chosen, 2)
    assert (after != weights(problem()[0])).all()
    assert step.dimension == 39
    assert step.spent(1e-5) == replace(
        hush.epsilon(chosen, steps=2, delta=1e-5, dimension=39), randomness="seeded"
    )
    # what a broken version would say: that the dimension does not matter
    one = hush.epsilon(chosen, steps=2, delta=1e-5, dimension=1).epsilon.upper
    assert step.spent(1e-5).epsilon.upper > 1.05 * one


def test_the_update_has_the_noise_that_is_charged() -> None:
    noise = hush.GeneralizedGaussian(beta=4.0, multiplier=3.0)
    chosen = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Lp(p=4.0, norm=0.5), noise=noise)
    torch.manual_seed(0)
    model = nn.Linear(100, 400)
    inputs, targets = torch.zeros(RECORDS, 100), torch.randint(0, 400, (RECORDS,))
    step = hush.PrivateStep(model, LOSS, torch.optim.SGD(model.parameters(), lr=1.0), chosen, records=64)
    before = model.weight.detach().clone()
    for batch in step.batches((inputs, targets), steps=1):
        step(batch)
    # no gradient flows to these weights: what moved them is the noise alone
    moved = ((before - model.weight.detach()) * RECORDS / (3.0 * 0.5)).flatten().numpy()
    assert stats.kstest(moved, stats.gennorm(4.0).cdf).pvalue > 1e-6
    assert stats.kstest(moved, stats.gennorm(4.0, scale=0.5).cdf).pvalue < 1e-6


def test_what_is_unfrozen_later_is_not_in_a_charge_that_grows_with_the_dimension() -> None:
    noise = hush.GeneralizedGaussian(beta=4.0, multiplier=20.0)
    chosen = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Lp(p=4.0, norm=0.5), noise=noise)
    model, data = problem()
    first = next(model.parameters()).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    step = hush.PrivateStep(model, LOSS, optimizer, chosen, records=RECORDS)
    assert step.dimension == 19
    batches = step.batches(data, steps=2)
    step(next(batches))
    first.requires_grad_(True)
    optimizer.add_param_group({"params": [first]})
    batch = next(batches)
    with pytest.raises(Unsupported, match=r"39 numbers are to be trained.*made for 19.*before"):
        step(batch)
    with pytest.raises(Unsupported, match="39 numbers"):
        step.batches(data)
    assert step.steps == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_would_charge_and_draw_what_the_original_does(duplicate: Callable[[Any], Any]) -> None:
    model, _ = problem()
    step = hush.PrivateStep(model, LOSS, torch.optim.SGD(model.parameters()), plan(), records=RECORDS)
    with pytest.raises(
        Unsupported, match=r"with it a PrivateStep, cannot be copied.*ledger=step\.ledger"
    ):
        duplicate(step)


@pytest.mark.parametrize("arithmetic", ["proved", "assumed"])
def test_two_steps_with_one_seed_on_one_ledger_do_not_share_their_noise(
    arithmetic: Any, tmp_path: Path
) -> None:
    """Released under one noise, the difference of two sums is that of the records."""

    def update(ledger: hush.Ledger) -> Tensor:
        model, data = problem()
        step = hush.PrivateStep(
            model,
            LOSS,
            torch.optim.SGD(model.parameters(), lr=0.1),
            plan(rate=1.0),
            records=RECORDS,
            ledger=ledger,
            randomness=hush.Randomness(
                generator=torch.Generator().manual_seed(1), arithmetic=arithmetic
            ),
        )
        step(next(step.batches(data)))
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

    def begin(ledger: hush.Ledger) -> tuple[hush.PrivateStep, Any]:
        model, data = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        step = hush.PrivateStep(
            model,
            LOSS,
            optimizer,
            plan(),
            records=RECORDS,
            ledger=ledger,
            randomness=hush.Randomness(generator=generator),
        )
        return step, data

    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        state = begin(ledger)[0].state_dict()
    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        begin(ledger)[0].load_state_dict(state)
        step, data = begin(ledger)
        step(next(step.batches(data)))
        with pytest.raises(CheckpointError, match="same noise"):
            begin(ledger)[0].load_state_dict(state)


def test_an_interrupted_step_leaves_no_bare_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, LOSS, optimizer, plan(), records=RECORDS)
    batches = step.batches(data)
    step(next(batches))
    monkeypatch.setattr(type(step), "private_gradient", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(next(batches))
    assert step.update is None


def test_weights_of_another_run_are_trained_on_with_a_warning() -> None:
    model, data = problem()

    def run_on(model: nn.Module, ledger: hush.Ledger | None = None) -> hush.PrivateStep:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = hush.PrivateStep(model, LOSS, optimizer, plan(), records=RECORDS, ledger=ledger)
        for batch in step.batches(data, steps=2):
            step(batch)
        return step

    first = run_on(model)
    run_on(model, first.ledger)
    with pytest.warns(PrivacyWarning, match=r"two charges add up.*ledger=ledger"):
        run_on(model)
    run_on(problem()[0])  # fresh weights
