"""No attack finds more than is charged; what is refused is refused; broken parts are found out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

import hush
from hush.core.parts import Clipping, Noise, Release, Sampling
from hush.training.methods.selective import Trials
from hush_recipes.audit.combinations import RELEASES, SAMPLINGS, Attack, attack_on, attacks, plans
from hush_recipes.audit.distinguisher import audit
from hush_recipes.audit.whole_steps import attack_steps

ATTACKS = attacks()
CONFIDENCE = 1 - 0.05 / len(ATTACKS)
"""All of them hold together with 95%."""
# their charges alone take as long as ten other attacks
LONG = {
    "Lp(p=3) x GeneralizedGaussian(beta=3), spread over 4 numbers",
    "Quantized for the records at hand, sum -1",
    "Quantized for the records at hand, sum +2",
}


def marked(attack: Attack) -> Any:
    # whole steps take as many seconds; one kind is tried by `..verdict_without_noise..`
    long = attack.name in LONG or attack.whole_steps
    return pytest.param(attack, id=attack.name, marks=(pytest.mark.slow,) if long else ())


@pytest.mark.few(50)
@pytest.mark.parametrize("attack", [marked(attack) for attack in ATTACKS])
def test_no_more_is_found_than_is_charged(attack: Attack) -> None:
    result = attack.attack(runs=attack.runs, confidence=CONFIDENCE)
    assert result.holds, result


def test_every_part_there_is_takes_part() -> None:
    # slots that compete: tests/accounting/test_limited_batches.py tries all neighbours
    limited: set[type[Sampling]] = {hush.TruncatedPoisson, hush.FixedSize}
    # several steps are charged as one: tests/training/test_correlated_noise.py and
    # tests/accounting/test_allocation.py
    limited |= {hush.CyclicPoisson, hush.RandomAllocation}
    audited = [
        (Sampling, {type(part) for part in SAMPLINGS} | limited),
        # charged like L2: tests/clipping checks that no record leaves the ball
        (
            Clipping,
            {type(plan.clipping) for plan, _ in plans()} | {hush.Normalized, hush.Quantile},
        ),
        (Noise, {type(plan.noise) for plan, _ in plans()} | {hush.Banded}),
        # a selection is not one step: tests/accounting/test_selection_bounds.py checks its charge
        (Release, {type(part) for part in RELEASES} | {hush.BestOf}),
    ]
    for kind, used in audited:
        defined = {part for part in kind.kinds.values() if part.__module__.startswith("hush.")}
        assert used == defined, "a new part needs an attack"


def plan(noise: Noise, sampling: Sampling | None = None, clipping: Clipping | None = None) -> hush.Plan:
    return hush.Plan(
        sampling=sampling or hush.FullBatch(), clipping=clipping or hush.L2(1.0), noise=noise
    )


def drawn() -> list[Any]:
    """A plan for each noise law, the first that is attacked on a full batch, and the entries changed."""
    first: dict[str, tuple[hush.Plan, int]] = {}
    for chosen, touched in plans():
        attack = attack_on(chosen, touched)
        # others are attacked by whole steps or by answers of one number
        if getattr(attack, "func", None) is audit and type(chosen.sampling) is hush.FullBatch:
            first.setdefault(type(chosen.noise).__name__, (chosen, touched))
    return [pytest.param(*case, id=name) for name, case in first.items()]


def quarter(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A draw with a quarter of the noise."""

    def privatize(self: Any, location: Tensor, *, norm: float, generator: Any) -> Tensor:
        multiplier = self.scale if hasattr(self, "scale") else self.multiplier
        return original(self.with_multiplier(multiplier / 4), location, norm=norm, generator=generator)

    return privatize


@pytest.mark.parametrize(("chosen", "touched"), drawn())
def test_a_quarter_of_the_noise_is_found_out(
    chosen: hush.Plan, touched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = partial(audit, chosen, confidence=CONFIDENCE, touched=touched, dimension=touched)
    assert attack().holds
    blocks = chosen.clipping.sensitivity(touched)
    for noise, _ in chosen.noise.per_block(blocks, chosen.clipping.reference_norm):
        monkeypatch.setattr(type(noise), "privatize", quarter(type(noise).privatize))
    assert not attack().holds


ANSWERS = ["argmax of votes, one replaced", "hush.mean", "quantile of norms", "moments of inputs"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_quarter_of_the_noise_on_answers_is_found_out(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (listed,) = (attack for attack in ATTACKS if attack.name == answer)
    monkeypatch.setattr(hush.Gaussian, "privatize", quarter(hush.Gaussian.privatize))
    assert not listed.attack(runs=5 * listed.runs, confidence=CONFIDENCE).holds


@pytest.mark.slow
def test_a_verdict_without_noise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model moves by noise alone, or nearly so: it is the verdict that tells."""
    release = hush.Selective(rate=1.0, clip=1e-3, multiplier=4.0, threshold=0.0, test="mean")
    chosen = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(8.0), release=release
    )
    assert attack_steps(chosen, runs=80).holds
    monkeypatch.setattr(Trials, "noisy_verdict", lambda self, number: bool(number < 0))
    assert not attack_steps(chosen, runs=80).holds


def test_the_charge_at_hand_is_found_out_where_it_is_for_another_place() -> None:
    """A sign tells most of a sum near 0: what is charged for a sum of 8 deviations is exceeded there."""
    chosen = plan(hush.StochasticSign(scale=0.5))
    far = audit(chosen, others=4, at_hand=True, confidence=CONFIDENCE)
    near = audit(chosen, others=-1, at_hand=True, confidence=CONFIDENCE)
    assert far.holds
    assert near.holds
    assert near.lower > far.charge
