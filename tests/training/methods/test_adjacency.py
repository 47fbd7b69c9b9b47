"""Statistics of records and a ledger that protects others: refused before anything is drawn or released.

Each method clips or counts records one by one and divides by their number. Charged to a ledger of users
or of add/remove neighbours, its release would be part of a guarantee that it does not satisfy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import LedgerError
from hush.core.guarantee import Adjacency, Neighbours
from hush.training.methods.least_squares import NoisyLeastSquares
from hush_recipes.bounded.linear import LinearDescent
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent
from tests.training.helpers import plan_of

PLAN = plan_of(noise=5.0)
ENTRYWISE = plan_of(clipping=hush.Linf(norm=0.1), noise=50.0)
X, Y = torch.ones(20, 3, 2), torch.zeros(20, dtype=torch.int64)
PROTECTED = [Adjacency(per_unit=2), Adjacency(neighbours=Neighbours.ADD_REMOVE)]


def descend(ledger: hush.Ledger, generator: torch.Generator) -> None:
    descent = LinearDescent(
        X.flatten(1), Y, ENTRYWISE, classes=2, lr=1.0, ledger=ledger, generator=generator
    )
    next(descent.run(steps=1))


def adapt(ledger: hush.Ledger, generator: torch.Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    budget = hush.Budget(epsilon=3.0, delta=1e-5)
    descent = AdaptiveDescent(
        model,
        nn.CrossEntropyLoss(),
        (X, Y),
        budget,
        Adaptive(clip=0.1),
        ledger=ledger,
        generator=generator,
    )
    next(descent.run())


METHODS: dict[str, Callable[[hush.Ledger, torch.Generator], Any]] = {
    "moments": lambda ledger, generator: hush.NoisyMoments(multiplier=9.0)(
        X, ledger, generator=generator
    ),
    "whitening": lambda ledger, generator: hush.NoisyWhitening(multiplier=9.0)(
        X, ledger, generator=generator
    ),
    "quantile": lambda ledger, generator: hush.NoisyQuantile(multiplier=9.0)(
        X[:, :, 0], 0.5, ledger, generator=generator
    ),
    "linear": descend,
    "adaptive": adapt,
    "least squares": lambda ledger, generator: NoisyLeastSquares(multiplier=9.0, row_norm=1.5)(
        X[:, 0], X[:, 0], ledger, generator=generator
    ),
}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    return METHODS[request.param]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every use of Gaussian noise, and every sum of clipped gradients, while a test runs."""
    seen: list[str] = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(hush.Gaussian, "privatize")
    watch(hush.L2, "clip")
    watch(hush.PrivateStep, "clipped_sum")
    watch(LinearDescent, "_clamped")
    watch(NoisyLeastSquares, "_clipped_sum")
    watch(hush.NoisyQuantile, "_counts")
    return seen


@pytest.mark.parametrize("adjacency", PROTECTED, ids=str)
def test_a_ledger_of_others_is_refused_before_anything_is_drawn(
    method: Any, adjacency: Adjacency, draws: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x", adjacency=adjacency)
        before = path.read_bytes()
        with pytest.raises(LedgerError, match="do not add up") as refused:
            method(ledger, torch.Generator().manual_seed(0))
        assert path.read_bytes() == before
    assert draws == []
    for part in (f"protects {adjacency}", "for one record (zero-out)", "separate ledger"):
        assert part in str(refused.value)


def test_a_ledger_of_records_is_charged(method: Any, draws: list[str]) -> None:
    ledger = hush.Ledger()
    ledger.charge(PLAN, run="a", step=1, release="x")
    method(ledger, torch.Generator().manual_seed(0))
    assert draws != []
    assert sum(ledger.counts.values()) > 1
