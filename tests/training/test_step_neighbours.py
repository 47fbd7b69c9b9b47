"""True neighbours of each relation through the whole step: the law of the update is what is charged.

One number is trained, and the gradient of a record is the record itself: 1 for the one that differs, and
small for the others. So the update is (sum + noise) / divisor, and neighbours under one seed show
whether they differ by one clipped record over a divisor that both share, and in nothing else.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, InvalidValue, LedgerError, PrivacyWarning
from tests.training.helpers import plan_of

RATE, SIGMA, CONSTANT = 0.4, 1.5, 10
ADD_REMOVE, REPLACE = hush.Neighbours.ADD_REMOVE, hush.Neighbours.REPLACE
PLAN = plan_of(hush.Poisson(RATE), noise=SIGMA)


class Number(nn.Module):
    """Output w x: with the loss w x, a record's gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight


def step_of(seed: int | None, step_class: Any = hush.PrivateStep, **options: Any) -> Any:
    model = Number()
    settings = {"records": CONSTANT, "neighbours": ADD_REMOVE, **options}
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return step_class(
        model,
        lambda outputs, targets: outputs[:, 0],
        torch.optim.SGD(model.parameters(), lr=0.0),
        PLAN,
        randomness=hush.Randomness(generator=generator),
        **settings,
    )


def updates(step: Any, values: list[float], steps: int, present: Tensor | None = None) -> np.ndarray:
    data = torch.tensor(values, dtype=torch.float64)[:, None], torch.zeros(len(values))
    released = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        for batch in step.batches(data, steps=steps, present=present):
            step(batch)
            released.append(float(step.update))
    return np.array(released)


OTHERS = [0.0] * 8
"""Records that both neighbours have: their gradients are zero, and the law of the update is known."""


def law(change: float, divisor: float) -> Any:
    """Distribution function of (b change + sigma Z) / divisor, where b is 1 with the sampling rate."""

    def cdf(x: np.ndarray) -> np.ndarray:
        without, with_it = (stats.norm.cdf(divisor * x, shift, SIGMA) for shift in (0.0, change))
        return np.asarray((1 - RATE) * without + RATE * with_it)

    return cdf


class DividesByLength(hush.PrivateStep):
    """Broken: the divisor follows the number of records."""

    def batches(self, data: Any, *settings: Any, **options: Any) -> Any:
        self.records = len(data[0])
        return super().batches(data, *settings, **options)


@pytest.mark.parametrize("relation", ["zero-out", "add/remove", "replace"])
def test_the_law_of_the_update_is_that_of_the_charge(relation: str) -> None:
    """A Kolmogorov-Smirnov test of 250 updates of each neighbour, at one in a million."""
    first, second = [*OTHERS, 1.0], [*OTHERS, -1.0]
    options = {"records": 9, "neighbours": relation} if relation != "add/remove" else {}
    divisor = RATE * (9 if options else CONSTANT)
    present = None if relation != "zero-out" else torch.tensor([True] * 8 + [False])
    if relation == "add/remove":
        second = OTHERS
    laws = [law(1.0, divisor), law(-1.0 if relation == "replace" else 0.0, divisor)]
    for seed, (values, cdf) in enumerate(zip([first, second], laws, strict=True)):
        own = present if seed else None
        released = updates(step_of(seed, **options), values, 250, own)
        assert stats.kstest(released, cdf).pvalue > 1e-6


def test_neighbours_differ_by_one_clipped_record_and_share_the_divisor() -> None:
    others = [0.3, -0.2, 0.9, -1.0, 0.1]
    with_it, without = updates(step_of(3), [*others, 5.0], 40), updates(step_of(3), others, 40)
    change = (with_it - without) * RATE * CONSTANT
    drawn = np.abs(change) > 0.5
    assert 5 < drawn.sum() < 30
    np.testing.assert_allclose(change[drawn], 1.0, atol=0.01)
    np.testing.assert_allclose(change[~drawn], 0.0, atol=0.01)
    # a divisor that follows the length scales the noise and all other records as well
    with_it = updates(step_of(3, DividesByLength), [*others, 5.0], 40)
    without = updates(step_of(3, DividesByLength), others, 40)
    assert np.abs((with_it - without)[~drawn]).max() > 0.05


def test_a_divisor_of_the_length_releases_more_than_is_charged() -> None:
    """Two records or one, at full noise: the scale of the noise alone tells them apart."""
    charged = hush.epsilon(PLAN, 60, 1e-3).epsilon.upper
    wide, narrow = (updates(step_of(5, DividesByLength), [0.0] * n, 60).std() for n in (1, 2))
    # their ratio is two, and under the charge it could be no more than chance allows
    assert wide / narrow > 1.7
    # likelihood ratio of 60 normal numbers of deviation wide, to those of deviation narrow
    loss = 60 * (np.log(narrow / wide) + 0.5 * (wide**2 / narrow**2 - 1))
    assert loss > charged
    honest = [updates(step_of(5), [0.0] * n, 60).std() for n in (1, 2)]
    assert honest[0] / honest[1] == pytest.approx(1.0, rel=0.01)


def test_nothing_that_is_written_follows_the_length(tmp_path: Path) -> None:
    texts = []
    for length in (9, 10):
        path = tmp_path / f"{length}.jsonl"
        step = step_of(None, ledger=hush.Ledger(path))
        updates(step, [0.0] * length, 3)
        guarantee = step.spent(1e-3)
        assert guarantee.neighbours is ADD_REMOVE
        assert guarantee.records == CONSTANT
        assert guarantee.arithmetic == "assumed"
        lines = [line for line in path.read_text().splitlines()[1:] if '"charge"' not in line]
        texts.append([line.split(', "digest"')[0] for line in lines])
        step.ledger.close()
    assert [_without_chain(text) for text in texts[0]] == [_without_chain(text) for text in texts[1]]


def _without_chain(line: str) -> str:
    """A line of the ledger without the hash that links it to the others."""
    return line[: line.rindex('"')][: line[: line.rindex('"')].rindex('"')]


def test_a_constant_that_is_far_off_warns_and_a_close_one_does_not() -> None:
    data = torch.zeros(11, 1, dtype=torch.float64), torch.zeros(11)
    with pytest.warns(PrivacyWarning, match="records=10"):
        step_of(0).batches(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(0, records=11).batches(data)


def test_another_length_is_refused_where_it_is_public() -> None:
    data = torch.zeros(11, 1, dtype=torch.float64), torch.zeros(11)
    for relation in ("zero-out", "replace"):
        with pytest.raises(DataError, match=r"neighbours=hush\.Neighbours\.ADD_REMOVE"):
            step_of(0, neighbours=relation).batches(data)
    with pytest.raises(InvalidValue, match="public estimate"):
        step_of(0, records=None)


def test_a_ledger_is_of_one_relation_and_one_unit(tmp_path: Path) -> None:
    ledger = hush.Ledger(tmp_path / "ledger.jsonl")
    updates(step_of(None, ledger=ledger), [0.0] * 10, 2)
    for options in (
        {"neighbours": "zero-out"},
        {"units": hush.Units(owners=list(range(10)), per_unit=1)},
    ):
        with pytest.raises(LedgerError, match="do not add up"):
            step_of(None, ledger=ledger, **options)
    ledger.close()
    reopened = hush.Ledger(tmp_path / "ledger.jsonl", read_only=True)
    assert reopened.epsilon(1e-3).neighbours is ADD_REMOVE


def test_a_replaced_record_costs_more_than_an_empty_slot() -> None:
    step = step_of(None, records=10, neighbours="replace")
    updates(step, [0.0] * 10, 2)
    guarantee = step.spent(1e-3)
    assert guarantee.neighbours is REPLACE
    assert guarantee.epsilon == hush.epsilon(PLAN, 2, 1e-3, neighbours=REPLACE).epsilon
    removed = step.spent(1e-3, neighbours=hush.Neighbours.ZERO_OUT)
    assert guarantee.epsilon.lower > 1.2 * removed.epsilon.upper
