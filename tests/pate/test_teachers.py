"""Which teacher a record goes to depends on nothing but the record, or its owner."""

import copy
import math
import random
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import binom, norm
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, Unsupported
from hush.models import build
from hush.pate import teachers
from hush.pate.argmax import NoisyMax
from hush.pate.teachers import Lesson, new_network, predictions, teacher_of, train_teachers
from hush.training import checkpoint


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 4, 4, generator=generator), torch.arange(count) % 10


def test_removing_a_record_moves_no_other_one() -> None:
    x, y = records(200)
    before = teacher_of(x, y, 7)
    for gone in (0, 57, 199):
        remaining = torch.arange(200) != gone
        assert torch.equal(teacher_of(x[remaining], y[remaining], 7), before[remaining])
    shuffled = torch.randperm(200)
    assert torch.equal(teacher_of(x[shuffled], y[shuffled], 7), before[shuffled])


OWNERS = [f"user {number * number % 41}" for number in range(300)]
"""21 users with 8 to 15 records each, scattered over the data set."""
NETWORK = partial(build, "logistic", classes=10, shape=(1, 4, 4))


def trained(folder: Path, remaining: Tensor, *, owned: bool) -> tuple[list[bytes], Tensor]:
    """Weights and votes of ten teachers of the records that remain, by their owners or by themselves."""
    x, y = records(300)
    data = x[remaining], y[remaining]
    owners = [owner for owner, there in zip(OWNERS, remaining.tolist(), strict=True) if there]
    assigned = teacher_of(*data, 10, owners if owned else None)
    train_teachers(folder, NETWORK, data, assigned, 10, Lesson(epochs=2, rate=0.1))
    states = [checkpoint.load(path)["weights"] for path in sorted(folder.iterdir())]
    bits = [b"".join(state[name].numpy().tobytes() for name in sorted(state)) for state in states]
    return bits, predictions(folder, NETWORK, 10, x[:50])


@pytest.mark.parametrize("gone", ["user 0", "user 4", "user 40"])
def test_removing_a_user_changes_one_teacher_and_its_votes_alone(tmp_path: Path, gone: str) -> None:
    """Teachers' weights, bit for bit. Records that are shared out one by one change several teachers."""
    remaining = torch.tensor([owner != gone for owner in OWNERS])
    everyone = torch.ones(300, dtype=torch.bool)
    changed = {}
    for owned in (True, False):
        whole, votes = trained(tmp_path / f"whole {owned}", everyone, owned=owned)
        without, fewer = trained(tmp_path / f"without {owned}", remaining, owned=owned)
        changed[owned] = [a != b for a, b in zip(whole, without, strict=True)]
        differing = (votes != fewer).any(1).tolist()
        assert all(moved for moved, vote in zip(changed[owned], differing, strict=True) if vote)
    assert sum(changed[True]) == 1
    assert sum(changed[False]) > 2


@pytest.mark.parametrize(
    ("units", "teachers", "said"),
    [
        (["a"] * 299, 5, "300 records and units has 299 ids"),
        ([0.5] * 300, 5, "one integer or string per record"),
        ([["a", "b"]] * 300, 5, "give a record several users"),
        ([], 5, "units is empty"),
        (["a", "b", "c"] * 100, 5, "teachers=5 is more than the 3 users"),
    ],
)
def test_owners_that_do_not_fit_are_refused(units: list[str], teachers: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        teacher_of(*records(300), teachers, units)


class Body(nn.Module):
    """A classifier that also draws from the global generators of torch, Python and NumPy."""

    def __init__(self, body: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() + np.random.random()  # noqa: NPY002
        hidden = self.body(x.flatten(1)) * (1 + 0.1 * drawn)
        return torch.as_tensor(self.head(nn.functional.dropout(hidden, 0.3)))


PRETRAINED = nn.Linear(16, 8)


def test_networks_that_share_a_trained_body_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"share the parameter 'body.weight'.*deepcopy\(body\)"):
        new_network(lambda: Body(PRETRAINED))
    whole = Body(PRETRAINED)
    with pytest.raises(Unsupported, match="share the parameter"):
        new_network(lambda: whole)
    new_network(lambda: Body(copy.deepcopy(PRETRAINED)))
    frozen = copy.deepcopy(PRETRAINED).requires_grad_(False)
    new_network(lambda: Body(frozen))  # no teacher trains it


@pytest.mark.parametrize("shared", [True, False])
def test_a_teacher_depends_on_its_own_records_and_seed_alone(tmp_path: Path, shared: bool) -> None:
    """Whatever was trained and drawn before it; training leaves the pretrained body as it is."""
    x, y = records(60)
    assigned, before = torch.arange(60) % 3, PRETRAINED.weight.clone()

    def network() -> Body:
        return Body(PRETRAINED if shared else copy.deepcopy(PRETRAINED))

    def weights(name: str) -> list[dict[str, Tensor]]:
        train_teachers(tmp_path / name, network, (x, y), assigned, 3, Lesson(epochs=2, rate=0.1))
        return [checkpoint.load(path)["weights"] for path in sorted((tmp_path / name).iterdir())]

    whole = weights("whole")
    for draw in (random.random, np.random.random, partial(torch.rand, 1)):
        draw()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]  # noqa: NPY002
    x[assigned == 0] = 0.5
    changed = weights("changed")
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(PRETRAINED.weight, before)
    same = [
        all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(whole, changed, strict=True)
    ]
    assert same == [False, True, True]


def moved_by_one_record(*, copied: bool) -> tuple[int, int, int]:
    """Number of 50 votes that one record moves at most, and the votes for class 0 with and without it.

    The teachers' networks share a body, which all of them train unless it is copied. The votes are on
    the public input on which they move furthest.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 16, generator=generator)
    y = torch.randint(0, 2, (300,), generator=generator)
    public = torch.randn(400, 16, generator=generator)
    assigned, everyone = torch.arange(300) % 50, torch.arange(300) >= 0
    lesson, predicted = Lesson(epochs=5, rate=0.05), []
    for remaining in (everyone, torch.arange(300) > 0):
        with torch.random.fork_rng(), ExitStack() as broken:
            torch.manual_seed(1)
            body = nn.Linear(16, 8)
            if not copied:
                broken.enter_context(mock.patch("copy.deepcopy", lambda model: model))

            def network(body: nn.Module = body) -> nn.Module:
                return nn.Sequential(body, nn.Tanh(), nn.Linear(8, 2))

            own = [remaining & (assigned == teacher) for teacher in range(50)]
            trained = [teachers.trained(network, x[o], y[o], lesson, i) for i, o in enumerate(own)]
            predicted.append(torch.stack([teachers.predict(model, public) for model in trained]))
    before, after = predicted
    zeros = (before == 0).sum(0), (after == 0).sum(0)
    furthest = int((zeros[0] - zeros[1]).abs().argmax())
    return int((before != after).sum(0).max()), int(zeros[0][furthest]), int(zeros[1][furthest])


def exact_epsilon(first: int, second: int, multiplier: float, asked: int, delta: float) -> float:
    """Epsilon of the answers to one question, asked repeatedly: two binomial laws."""
    chances = [norm.cdf((2 * zeros - 50) / (math.sqrt(2) * multiplier)) for zeros in (first, second)]
    logs = [binom.logpmf(np.arange(asked + 1), asked, chance) for chance in chances]

    def excess(epsilon: float) -> float:
        pairs = ((logs[0], logs[1]), (logs[1], logs[0]))
        return max(float(np.maximum(np.exp(p) - np.exp(epsilon + q), 0).sum()) for p, q in pairs) - delta

    return float(brentq(excess, 0.0, 500.0))


def test_teachers_that_train_one_body_cost_more_than_is_charged() -> None:
    vote = NoisyMax.of_teachers(noise=hush.Gaussian(8.0))
    charge = vote.guarantee(queries=100, delta=1e-5).epsilon.upper
    shared, first, second = moved_by_one_record(copied=False)
    cost = exact_epsilon(first, second, 8.0, 100, 1e-5)
    assert shared >= 10
    assert cost > 5 * charge
    page = (Path(hush.__file__).parents[2] / "docs/pitfalls.md").read_text()
    printed = re.search(
        r"(\d+) of 50 votes, and 100 answers are charged epsilon ([\d.]+) at .* cost is (\d+)\.", page
    )
    assert printed
    assert [float(each) for each in printed.groups()] == pytest.approx([shared, charge, cost], rel=0.05)
    own, first, second = moved_by_one_record(copied=True)
    assert own == 1
    assert exact_epsilon(first, second, 8.0, 100, 1e-5) < charge
