"""Random legal plans run, are charged, written down and resumed; the number in a test's name makes it
again."""

import math
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hush
from hush.core.plan import plan_text, read_plan
from hush.training import checkpoint
from tests.fuzz.plans import STAGES, Case, kinds_of, legal

QUICK, ALL = range(50), range(1000)


@pytest.mark.few(12)
@pytest.mark.parametrize("seed", QUICK)
def test_a_legal_plan_runs_is_charged_and_resumes(seed: int, tmp_path: Path) -> None:
    holds(legal(seed, quick=True), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_any_legal_plan_runs_is_charged_and_resumes(seed: int, tmp_path: Path) -> None:
    holds(legal(seed, quick=False), tmp_path)


def test_every_part_of_the_library_is_in_some_legal_plan() -> None:
    plans = [legal(seed, quick=True).plan for seed in range(300)]
    drawn = {
        type(part).__name__ for plan in plans for part in (getattr(plan, f.name) for f in fields(plan))
    }
    # entries are for answers that change in a few numbers, as votes do, and not for gradients; the best
    # of several runs is no step of one
    assert {name for stage in STAGES for name in kinds_of(stage)} - drawn == {"BestOf", "Entries"}


def holds(case: Case, folder: Path) -> None:
    is_written_down(case, folder)
    ledger = runs_and_resumes(case, folder)
    period = case.plan.sampling.period
    assert ledger.counts == {case.plan: -(-3 // period) * period}
    guarantee = is_charged(case, ledger.dimensions.get(case.plan))
    assert ledger.epsilon(case.delta) == replace(guarantee, randomness="seeded")


def is_written_down(case: Case, folder: Path) -> None:
    """Plain data and plan files give the same plan again, with the same name."""
    plan = case.plan
    (folder / "plan.toml").write_text(plan_text(plan))
    for copied in (hush.Plan.from_plain(plan.to_plain()), read_plan(folder / "plan.toml")):
        assert copied == plan
        assert copied.digest == plan.digest
        assert hash(copied) == hash(plan)


def is_charged(case: Case, dimension: int | None) -> hush.Guarantee:
    """More steps cost no less, and nothing costs less than nothing; return the cost of three."""
    guarantees = [hush.epsilon(case.plan, steps, case.delta, dimension) for steps in (0, 1, 3)]
    for fewer, more in pairwise(guarantees):
        assert 0 <= more.epsilon.lower <= more.epsilon.upper
        assert fewer.epsilon.upper <= more.epsilon.upper * (1 + 1e-9)
    assert guarantees[0].epsilon.upper == 0
    assert not any(math.isnan(guarantee.epsilon.upper) for guarantee in guarantees)
    return guarantees[-1]


def runs_and_resumes(case: Case, folder: Path) -> hush.Ledger:
    """Three steps at once, and two, a checkpoint and one: the same to the last bit."""
    straight = case.step(ledger=folder / "straight.jsonl")
    take(straight, case, 3)
    first = case.step(ledger=folder / "ledger.jsonl")
    take(first, case, 2)
    checkpoint.save(folder / "checkpoint", {"step": first.state_dict()})
    first.ledger.close()
    model = case.model()
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    second = case.step(
        model,
        ledger=folder / "ledger.jsonl",
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(999)),
    )
    second.load_state_dict(checkpoint.load(folder / "checkpoint")["step"])
    take(second, case, 1)
    states = [step.state_dict() for step in (second, straight)]
    for state in states:
        for name in ("run", "charged_run", "ledger"):  # drawn anew for each run, and what follows
            del state[name]
    assert bits(states[0]) == bits(states[1])
    assert list(second.ledger.releases) == list(straight.ledger.releases)
    second.ledger.close()
    return hush.Ledger(folder / "ledger.jsonl", read_only=True)


def take(step: hush.PrivateStep, case: Case, steps: int) -> None:
    for batch in step.batches(case.data(), steps=steps):
        step(batch)


def bits(value: Any) -> Any:
    """Something that is equal where all numbers are, not-a-number included."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value
