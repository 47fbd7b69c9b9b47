"""Trials: what is proposed, tested, kept and taken back, and what is left on disk."""

import copy
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.accounting.ledger import Ledger
from hush.core.errors import InvalidPlan, InvalidValue, LedgerError
from hush.training.data import Batch
from hush.training.fingerprint import fingerprint
from hush.training.methods.selective import Trials
from hush.training.rehearsal import Snapshot
from hush.training.step import PrivateStep
from hush_recipes.audit.draws import trials_of
from tests.recipes.audit import sabotage
from tests.training import helpers
from tests.training.helpers import plan_of, randomness, run, seeded, step_of

RECORDS = 60
NO_NOISE = 1e-12


def plan(noise: float = 1.0, **release: Any) -> hush.Plan:
    chosen = {"rate": 0.5, "clip": 0.01, "multiplier": 1.0, "test": "mean", **release}
    return plan_of(hush.Poisson(0.3), noise=noise, release=hush.Selective(**chosen))


class Counting(nn.Module):
    """A layer that remembers how often it was used."""

    uses: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("uses", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.uses += 1
        return x


def problem(buffer: bool = False) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    extra = Counting() if buffer else nn.Identity()
    model = nn.Sequential(nn.Linear(5, 4), extra, nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 3))
    return model.double(), (torch.randn(RECORDS, 5).double(), torch.randint(0, 3, (RECORDS,)))


def begin(
    chosen: hush.Plan,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    seed: int = 1,
    buffer: bool = False,
    **options: Any,
) -> tuple[PrivateStep, tuple[Tensor, Tensor]]:
    model, data = problem(buffer)
    options = {"records": RECORDS, **options}
    options["randomness"] = hush.Randomness(generator=seeded(seed))
    if make is torch.optim.SGD:
        return step_of(model, chosen, lr=0.5, make=partial(make, momentum=0.9), **options), data
    return step_of(model, chosen, lr=0.05, make=make, **options), data


def everything(step: PrivateStep) -> dict[str, Any]:
    """A deep copy of the state that a trial may change."""
    parameters = list(step.model.parameters())
    state = {"weights": parameters, "gradients": [value.grad for value in parameters]}
    state |= {"buffers": list(step.model.buffers()), "optimizer": step.optimizer.state_dict()}
    return copy.deepcopy(state)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("test", ["mean", "summed"])
def test_a_rejected_trial_leaves_nothing(make: Callable[..., torch.optim.Optimizer], test: str) -> None:
    step, data = begin(plan(test=test, threshold=-1e9), make, buffer=True)
    batches = step.batches(data, steps=3)
    first = next(batches)
    before = everything(step)
    for batch in itertools.chain([first], batches):
        assert not step(batch)
        assert same(everything(step), before)
    assert (step.steps, step.accepted) == (3, 0)
    assert step.ledger.counts == {step.plan: 3}


def test_an_accepted_trial_is_a_plain_step() -> None:
    step, data = begin(plan(threshold=1e9))
    plain, _ = begin(plan_of(step.plan.sampling))
    for batch in step.batches(data, steps=4):
        plain.generator.set_state(step.generator.get_state())
        twin = Batch(batch.indices, data, batch.physical)
        plain.pending_batch = twin
        assert plain(twin)
        assert step(batch)
        assert same(everything(step)["weights"], everything(plain)["weights"])
        assert same(everything(step)["optimizer"], everything(plain)["optimizer"])


def after_a_rejection() -> tuple[Any, Any]:
    """The state after an accepted trial that follows rejected ones, and without these."""
    step, data = begin(plan(multiplier=0.7), seed=3)
    weights, optimizer = _copies(step)
    rejected = 0
    batches = step.batches(data)
    while True:
        generator = step.generator.get_state()
        moved = step(next(batches))
        if moved and rejected >= 2 and optimizer["state"]:
            break
        rejected = 0 if moved else rejected + 1
        if moved:
            weights, optimizer = _copies(step)
    fresh, _ = begin(plan(multiplier=0.7))
    fresh.model.load_state_dict(weights)
    fresh.optimizer.load_state_dict(optimizer)
    fresh.generator.set_state(generator)
    fresh.adopt_weights()
    accepted = fresh(next(fresh.batches(data)))
    return everything(step) | {"accepted": True}, everything(fresh) | {"accepted": accepted}


def _copies(step: PrivateStep) -> tuple[Any, Any]:
    return copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))


def test_after_a_rejection_it_goes_on_as_if_it_had_never_been() -> None:
    assert same(*after_a_rejection())


def test_momentum_kept_on_rejection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage.momentum_kept(monkeypatch)
    assert not same(*after_a_rejection())


def verdicts(chosen: hush.Plan, trials: int = 12) -> list[tuple[bool, float]]:
    """Each verdict of a run with hardly any noise, and how much the test batch's loss rose by hand."""
    step, (inputs, targets) = begin(chosen)
    tests: list[Tensor] = []
    release = chosen.release
    assert isinstance(release, hush.Selective)
    sampling = trials_of(step).sampling
    draw = type(sampling).draw

    def noted(self: Any, records: int, generator: Any, step: int = 0) -> Tensor:
        actual = draw(self, records, generator, step)
        if self.rate == release.rate:
            tests.append(actual)
        return actual

    actual = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sampling), "draw", noted)
        for batch in step.batches((inputs, targets), steps=trials):
            old = copy.deepcopy(step.model).eval()
            proposed: list[nn.Module] = []
            move = step.apply

            def moved(update: Tensor, move: Any = move, proposed: list[nn.Module] = proposed) -> None:
                move(update)
                proposed.append(copy.deepcopy(step.model).eval())

            step.apply = moved  # type: ignore[method-assign]
            accepted = step(batch)
            step.apply = move  # type: ignore[method-assign]
            total = 0.0
            for row in tests[-1].tolist():  # one record at a time
                rise = 0.0
                for model, sign in ((proposed[0], 1), (old, -1)):
                    value = nn.functional.cross_entropy(model(inputs[row][None]), targets[row][None])
                    rise += sign * float(value.detach())
                clip = release.clip
                total += min(max(rise, -clip), clip) if release.test == "summed" else rise
            expected = release.rate * RECORDS
            actual.append((accepted, total if release.test == "summed" else total / expected))
    return actual


@pytest.mark.parametrize("test", ["mean", "summed"])
def test_the_verdict_is_that_of_the_same_records_on_both_models(test: str) -> None:
    release = {"test": test, "multiplier": NO_NOISE, "clip": 0.05, "threshold": -0.1, "rate": 0.47}
    actual = verdicts(plan(noise=2.0, **release))
    bound = 0.05 if test == "mean" else math.inf
    for accepted, rise in actual:
        assert accepted == (min(max(rise, -bound), bound) < -0.1 * 0.05)
    assert {accepted for accepted, _ in actual} == {True, False}


def accepts_as_charged(test: str, multiplier: float, charged: float) -> bool:
    """Whether the share of accepted trials fits the chance at both ends of the clip."""
    step, _ = begin(plan(test=test, multiplier=multiplier, threshold=-0.5))
    trials, release = trials_of(step), step.plan.release
    assert isinstance(release, hush.Selective)
    repeats, fits = 4000, True
    for end in (-1.0, 1.0):
        number = torch.tensor(end * 0.01, dtype=torch.float64)
        observed = sum(trials.noisy_verdict(number.clone()) for _ in range(repeats))
        lowest, highest = replace(release, multiplier=charged).acceptance(1.0)
        chance = highest if end < 0 else lowest
        fits &= bool(1e-4 < stats.binom.cdf(observed, repeats, chance) < 1 - 1e-4)
    return fits


@pytest.mark.few(1)
@pytest.mark.parametrize("test", ["mean", "summed"])
def test_the_noise_of_the_test_is_the_noise_that_is_charged(test: str) -> None:
    assert accepts_as_charged(test, 1.1, 1.1)
    assert not accepts_as_charged(test, 1.1, 1.4)


def test_the_work_of_a_trial_does_not_depend_on_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    work: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            work[f"{owner.__name__}.{name}"] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (Snapshot, "__init__"),
        (Snapshot, "restore"),
        (nn.Linear, "forward"),
        (torch.optim.SGD, "step"),
        (torch, "randn"),
        (torch, "rand"),
        (Tensor, "copy_"),
        (Tensor, "clone"),
        (Ledger, "_append"),
    ):
        counted(owner, name)
    by_verdict: dict[bool, set[tuple[tuple[str, int], ...]]] = {True: set(), False: set()}
    # exact draws take as many calls as it takes, whatever the verdict
    torch.manual_seed(0)

    def plain(self: hush.Gaussian, location: Tensor, *, norm: float, generator: Any) -> Tensor:
        return location + self.multiplier * norm * torch.randn(location.shape)

    monkeypatch.setattr(hush.Gaussian, "privatize", plain)
    step, data = begin(plan(rate=1.0), seed=5)
    step.plan.sampling.__dict__["rate"] = 1.0  # so that all trials work on the same records
    for number, batch in enumerate(step.batches(data, steps=12)):
        work.clear()
        moved = step(batch)
        if number > 2:  # the first ones make the optimizer's state
            by_verdict[moved].add(tuple(sorted(work.items())))
    assert len(by_verdict[True]) == len(by_verdict[False]) == 1
    assert by_verdict[True] == by_verdict[False]
    assert "Snapshot.restore" in dict(next(iter(by_verdict[True])))


def test_the_charge_is_on_disk_before_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    step, data = begin(plan(), ledger=path)
    observed = []
    losses = Trials.losses

    def watched(self: Trials, parts: Any) -> Tensor:
        observed.append(path.read_text().count('"charge"'))
        return losses(self, parts)

    monkeypatch.setattr(Trials, "losses", watched)
    run(step, data, 2)
    assert observed == [1, 1, 2, 2]

    def broken(self: Trials, parts: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trials, "losses", broken)
    before = everything(step)
    with pytest.raises(KeyboardInterrupt):
        step(next(step.batches(data)))
    assert same(everything(step), before)
    assert path.read_text().count('"charge"') == 3


def test_the_ledger_does_not_name_a_rejected_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    step, data = begin(plan(threshold=-1e9))
    names = []
    private_gradient = step.private_gradient

    def noted(batch: Batch) -> Tensor:
        update = private_gradient(batch)
        names.append(fingerprint([update]))
        return update

    monkeypatch.setattr(step, "private_gradient", noted)
    run(step, data, 3)
    assert not {*names} & {*step.ledger.releases}
    # the mask changes with the generator, so the name of the same proposal does
    parts: list[tuple[Any, Any, Tensor | None, Tensor | None]] = [(*data, None, None)]
    update = torch.ones(3)
    named = trials_of(step).masked_fingerprint
    assert named(update, parts) != named(update, parts)


def test_repeating_a_trial_on_other_records_is_refused() -> None:
    step, (inputs, targets) = begin(plan(threshold=1e9))
    state = copy.deepcopy(step.state_dict())
    run(step, (inputs, targets))
    step.load_state_dict(state)
    run(step, (inputs, targets))
    assert step.ledger.counts == {step.plan: 1}, "the same trial again costs nothing"
    step.load_state_dict(state)
    with pytest.raises(LedgerError, match="already released with another value"):
        step(next(step.batches((inputs + 1e-9, targets))))


@pytest.mark.parametrize("test", ["mean", "summed"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_the_worst(test: str, bad: float) -> None:
    step, _ = begin(plan(test=test))
    number = trials_of(step).bounded_rise
    good, broken = torch.tensor([1.0]).double(), torch.tensor([bad]).double()
    assert number(broken, good) == 0.01
    assert number(good, broken) == -0.01
    assert number(broken, broken) == 0
    both = number(torch.tensor([bad, 1.0]).double(), torch.tensor([1.0, bad]).double())
    assert both == (0.01 if test == "mean" else 0.0)


def train(chosen: hush.Plan, **options: Any) -> Any:
    step, data = begin(chosen)
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 2, 0.9)
    options |= {"randomness": randomness(1), "scheduler": scheduler}
    done = helpers.train(step.model, chosen, data, optimizer=step.optimizer, **options)
    return done, step.model, scheduler


def test_a_run_counts_its_trials_and_the_schedule_its_updates() -> None:
    chosen = plan(noise=2.0)
    done, _, scheduler = train(chosen, steps=20, every=4)
    assert done.guarantee.epsilon == hush.epsilon(chosen, steps=20, delta=1e-5).epsilon
    assert done.steps == 20
    assert 0 < done.accepted < 20
    assert scheduler.last_epoch == done.accepted
    assert [line["accepted"] for line in done.metrics][-1] == done.accepted


def test_hidden_trials_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = []
    passes = Trials.noisy_verdict

    def noted(self: Trials, number: Tensor) -> bool:
        tests.append(passes(self, number))
        return tests[-1]

    monkeypatch.setattr(Trials, "noisy_verdict", noted)
    chosen = plan(noise=2.0, accounting="per-acceptance")
    done, _, scheduler = train(chosen, steps=6, directory=tmp_path / "run", every=2)
    assert sum(tests) == done.steps == scheduler.last_epoch == 6
    assert len(tests) > 6, "some were rejected"
    assert done.accepted is None
    assert done.guarantee.epsilon == hush.epsilon(chosen, steps=6, delta=1e-5).epsilon
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    assert len(lines) == 3 + 6  # its name, the delta and the plan come first
    stored = {"charge", "run", "step", "randomness", "release", "chain"}
    assert all(line.keys() == stored for line in lines[3:])
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line.keys() == {"step", "epsilon", "delta", "neighbours", "unit"} for line in metrics)


def test_a_crash_after_the_charge_is_repeated_not_paid_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = plan(noise=2.0)
    whole, *_ = train(chosen, steps=9, directory=tmp_path / "whole", every=3)
    calls = 0
    passes = Trials.noisy_verdict

    def crash(self: Trials, number: Tensor) -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return passes(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "noisy_verdict", crash)
        with pytest.raises(KeyboardInterrupt):
            train(chosen, steps=9, directory=tmp_path / "run", every=3)
    repeated, *_ = train(chosen, steps=9, directory=tmp_path / "run", every=3, resume=True)
    assert (repeated.guarantee, repeated.accepted) == (whole.guarantee, whole.accepted)
    name = "model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_impossible_acceptance_is_refused_beforehand(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"between m=.* and M=.*20 trials would most likely"):
        train(plan(multiplier=0.5, threshold=-8.0), steps=20, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidValue, match=r"between m=.* and M=.*hidden trials"):
        begin(plan(multiplier=0.1, accounting="per-acceptance"))


def test_what_is_not_proved_is_refused() -> None:
    with pytest.raises(InvalidValue, match="must be one of"):
        plan(accounting="free")
    with pytest.raises(InvalidValue, match="must be one of"):
        plan(test="median")
    with pytest.raises(InvalidPlan, match="is not proved for test"):
        plan(test="summed", accounting="per-acceptance")


def test_an_owners_loss_is_the_mean_over_the_records_that_are_present() -> None:
    """Owners of three slots each: two filled, none filled, all filled."""
    owners = [slot // 3 for slot in range(RECORDS)]
    step, (inputs, targets) = begin(plan(), records=None, units=hush.Units(owners=owners, per_unit=3))
    present = torch.tensor([True, False, True, False, False, False, True, True, True])
    part = (inputs[:9], targets[:9], present, torch.tensor([3, 3, 3]))
    found = trials_of(step).losses([part])
    each = nn.functional.cross_entropy(step.model.eval()(inputs[:9]), targets[:9], reduction="none")
    expected = torch.stack([(each[0] + each[2]) / 2, torch.zeros(()).double(), each[6:].mean()])
    torch.testing.assert_close(found, expected.detach())
