"""Two processes whose models would part, or that would say what is not charged, in one start."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hush
from hush.training.fingerprint import fingerprint
from hush.training.step import PrivateStep
from tests.training.distributed import spawned
from tests.training.distributed.problems import data_of, model_of, plan_of, seeded, step_of
from tests.training.distributed.spawned import Raised


class Parting(PrivateStep):
    """A step whose noisy gradient comes out another one on rank 1."""

    seen: str = ""

    def private_gradient(self, batch: Any) -> Tensor:
        update = super().private_gradient(batch) * (1 + dist.get_rank())
        self.seen = fingerprint([update])
        return update


def parting(plan: hush.Plan) -> Parting:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Parting(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        plan,
        records=40,
        randomness=hush.Randomness(generator=seeded()),
    )


def other_releases(folder: Path) -> tuple[str, str, int]:
    return refused(parting(plan_of()))


def other_proposals(folder: Path) -> tuple[str, str, int]:
    release = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0)
    return refused(parting(plan_of(release=release)))


def refused(step: Parting) -> tuple[str, str, int]:
    """Text of the refusal, fingerprint of what was not released, and charges."""
    with pytest.raises(hush.errors.ProcessFailed) as error:
        train(step)
    return str(error.value), step.seen, sum(step.ledger.counts.values())


def train(step: PrivateStep, steps: int = 2) -> None:
    for batch in step.batches(data_of(), steps=steps):
        step(batch)


def other_momentum(folder: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for value in model.parameters():
        optimizer.state[value]["momentum_buffer"] = torch.full_like(value, dist.get_rank())
    train(step_of(model, optimizer=optimizer))


def evaluation_mode_on_one_rank(folder: Path) -> None:
    step = step_of()
    batches = step.batches(data_of())
    step(next(batches))
    if dist.get_rank():
        step.model.eval()
    step(next(batches))


def weights_adopted_on_one_rank(folder: Path) -> None:
    step = step_of()
    batches = step.batches(data_of())
    step(next(batches))
    if dist.get_rank():
        halve(step)
    step(next(batches))


def halve(step: PrivateStep) -> None:
    with torch.no_grad():
        next(step.model.parameters()).mul_(0.5)
    step.adopt_weights()


def another_private_number(folder: Path) -> None:
    step = step_of(neighbours=hush.Neighbours.ADD_REMOVE)
    step.batches(data_of(records=40 + dist.get_rank()))


def other_seeds(folder: Path) -> None:
    step_of(randomness=hush.Randomness(generator=seeded(dist.get_rank())))


def result(scenario: Any) -> list[Any]:
    return spawned.run(__name__, 2)[scenario.__name__]


@pytest.mark.parametrize("scenario", [other_releases, other_proposals])
def test_other_gradients_are_not_charged_and_their_fingerprints_not_shown(scenario: Any) -> None:
    ranks = result(scenario)
    assert len({seen for _, seen, _ in ranks}) == 2
    for text, _, charges in ranks:
        assert "ranks 0 and 1 differ in the" in text
        assert charges == 0
        assert not any(seen in text for _, seen, _ in ranks)


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (other_momentum, "ranks 0 and 1 differ in states of the optimizer"),
        (evaluation_mode_on_one_rank, "differ in train() and eval() modes"),
        (weights_adopted_on_one_rank, "differ in adopted weights"),
        (another_private_number, "differ in the number of records"),
    ],
)
def test_what_would_part_the_models_is_refused_on_every_rank(scenario: Any, text: str) -> None:
    for rank in result(scenario):
        assert isinstance(rank, Raised)
        assert text in rank.text


def test_a_private_number_of_records_is_not_shown() -> None:
    for rank in result(another_private_number):
        assert not re.search("4[01]", rank.text)


def test_no_hash_of_a_seed_is_shown() -> None:
    for rank in result(other_seeds):
        assert "ranks 0 and 1 differ in the seed" in rank.text
        assert not re.search("[0-9a-f]{8}", rank.text)
