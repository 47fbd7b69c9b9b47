"""Steps that a record stops before their charge, and how a run goes on from there."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError
from hush.training.step import PrivateStep
from tests.training.helpers import plan_of, randomness, step_of, train, weights_of

RECORDS, WORDS, BAD = 40, 10, 23
PLAN = plan_of(hush.Poisson(0.2))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(12, 3))


def data(word: int) -> tuple[Tensor, Tensor]:
    """Records of which one has this word."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (RECORDS, 3), generator=generator)
    words[BAD, 1] = word
    return words, torch.randint(0, 3, (RECORDS,), generator=generator)


def made(**options: Any) -> PrivateStep:
    return step_of(network(), PLAN, seed=3, records=RECORDS, **options)


def stopped(step: PrivateStep) -> Tensor:
    """Slots of the batch at which the record that does not fit stopped the step."""
    with pytest.raises(DataError, match="out of range") as raised:
        deque(map(step, step.batches(data(WORDS), steps=30)), maxlen=0)
    assert "step.batches(fixed)" in "".join(raised.value.__notes__)
    assert step.pending_batch is not None
    return step.pending_batch.indices


def test_a_run_goes_on_with_the_same_draw_once_the_data_is_mended() -> None:
    step = made()
    slots = stopped(step)
    taken = step.steps
    assert taken > 0, "so that the first draw is another one"
    assert sum(step.ledger.counts.values()) == taken
    assert BAD in slots
    drawn = []
    for batch in step.batches(data(0), steps=30 - taken):
        drawn.append(batch.indices)
        step(batch)
    assert torch.equal(drawn[0], slots)
    assert not all(torch.equal(later, slots) for later in drawn[1:])
    assert len(drawn) == 30 - taken
    assert step.ledger.counts == {PLAN: 30}


def test_a_draw_is_not_used_on_data_of_another_length() -> None:
    step = made(neighbours=hush.Neighbours.ADD_REMOVE)
    stopped(step)
    words, classes = data(0)
    fits = torch.arange(RECORDS) != BAD
    with pytest.raises(DataError, match=r"another length .* present="):
        next(step.batches((words[fits], classes[fits])))
    step(next(step.batches((words, classes), present=fits)))


def test_a_run_in_a_directory_resumes_on_mended_data(tmp_path: Path) -> None:
    """Its draws are those from the checkpoint on: it ends where it would have with mended data."""

    def run(folder: str, word: int, **options: Any) -> Tensor:
        model, path = network(), tmp_path / folder
        assert train(model, PLAN, data(word), steps=20, every=1, directory=path, **options).steps == 20
        return weights_of(model)

    whole = run("whole", 0, randomness=randomness(3))
    with pytest.raises(DataError, match="out of range"):
        run("stopped", WORDS, randomness=randomness(3))
    assert torch.equal(whole, run("stopped", 0, resume=True))
