"""Two processes that run a step in five wrong ways: a check that passes on the step as it is fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hush.audit.draws import Check, draws_independent
from hush.audit.noise import noise_fresh, noise_scale, observe
from hush.audit.run_self_test import charged
from hush.training.options import Randomness
from tests.training.distributed import sabotage, spawned
from tests.training.distributed.problems import data_of, seeded, step_of


def scale() -> Check:
    return noise_scale(observe(step_of(randomness=Randomness(generator=seeded(1))), data_of(), 12))


def fresh() -> Check:
    return noise_fresh(observe(step_of(randomness=Randomness(generator=seeded(1))), data_of(), 12))


def draws() -> Check:
    return draws_independent(step_of(randomness=Randomness(generator=seeded(1))), data_of(), 60)


def charges() -> Check:
    return charged(step_of(), data_of(), 3)


CAUGHT: list[tuple[sabotage.Sabotage, Callable[[], Check]]] = [
    (sabotage.noise_per_rank, scale),
    (sabotage.sampling_per_rank, draws),
    (sabotage.divisor_per_rank, scale),
    (sabotage.ledger_per_rank, charges),
    (sabotage.shared_noise_stream, fresh),
]


def as_it_is(folder: Path) -> dict[str, bool]:
    return {check.__name__: check().passed for check in (scale, fresh, draws, charges)}


def sabotaged(folder: Path) -> dict[str, bool]:
    found = {}
    for broken, check in CAUGHT:
        with broken():
            found[broken.__name__] = check().passed
    return found


def other_draws(folder: Path) -> None:
    with sabotage.sampling_per_rank():
        step = step_of(ledger=folder / "ledger.jsonl")
        for batch in step.batches(data_of(), steps=1):
            step(batch)


def result(name: str) -> list[Any]:
    return spawned.run(__name__, 2)[name]


def test_the_checks_pass_on_the_step_as_it_is() -> None:
    assert result("as_it_is") == [dict.fromkeys(("scale", "fresh", "draws", "charges"), True)] * 2


@pytest.mark.parametrize("broken", [broken.__name__ for broken, _ in CAUGHT])
def test_it_is_caught(broken: str) -> None:
    assert [each[broken] for each in result("sabotaged")] == [False, False]


def test_a_step_of_ranks_that_drew_for_themselves_is_not_charged() -> None:
    for raised in result("other_draws"):
        assert raised.kind == "ProcessFailed"
        assert "differ in the slots drawn" in raised.text
