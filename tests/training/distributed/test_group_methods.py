"""Every plan and method in four processes: sums as of one process, the same weights, or a refusal."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hush
from hush.training.data import Batch
from hush_recipes.audit.draws import trials_of
from hush_recipes.audit.noise import noise_scale, observe
from hush_recipes.statistics.moments import NoisyMoments
from hush_recipes.statistics.quantile import NoisyQuantile
from tests.training.distributed import spawned
from tests.training.distributed.problems import RECORDS, data_of, model_of, plan_of, step_of
from tests.training.helpers import run, weights_of

RANKS = 4
OWNERS = [f"user {number % 11}" for number in range(RECORDS)]
UNITS = hush.Units(owners=OWNERS, per_unit=3)
SIZE = weights_of(model_of()).numel()
PLANS: dict[str, dict[str, Any]] = {
    "laplace": {"clipping": hush.Lp(p=1.0, norm=1.0), "noise": hush.Laplace(1.0)},
    "full batch": {"sampling": hush.FullBatch()},
    "box in blocks": {
        "clipping": hush.Subspaces(ranks=(20, SIZE - 20), l2=(1.0, 0.5)),
        "noise": hush.BlockGaussian(multipliers=(1.0, 2.0)),
    },
    "rectified": {"noise": hush.Rectified(scale=1.0, bound=3.0)},
    "truncated": {"noise": hush.Truncated(scale=1.0, bound=3.0)},
    "signs": {"noise": hush.StochasticSign(scale=1.0)},
    "quantized": {"noise": hush.Quantized(scale=1.0, bound=3.0, levels=5)},
    "coordinates": {"sampling": hush.Twice(rate=0.5, coordinate_rate=0.5)},
}


def trained(step: hush.PrivateStep, steps: int = 3) -> Tensor:
    return weights_of(run(step, data_of(), steps).model)


def plans(folder: Path) -> dict[str, Any]:
    """Weights of a run under each plan."""
    return {name: trained(step_of(plan=plan_of(**parts), seed=0)) for name, parts in PLANS.items()}


def blocks_have_their_noise(folder: Path) -> bool:
    """Slices cut blocks of different multipliers."""
    step = step_of(plan=plan_of(**PLANS["box in blocks"]), seed=4)
    return noise_scale(observe(step, data_of(), 30)).passed


def owners(folder: Path) -> dict[str, Any]:
    step = step_of(records=None, units=UNITS, seed=5)
    batch = next(step.batches(data_of()))
    own = step.reducer.share(batch)
    return {
        "drawn": (batch.indices, batch.counts),
        "share": (own.indices, own.counts),
        "sum": step.clipped_sum(batch).clone(),
    }


def views(folder: Path) -> Tensor:
    return trained(step_of(views=lambda inputs: torch.stack([inputs, inputs.flip(-1)])))


def public_basis(folder: Path) -> Tensor:
    clipping = hush.Subspaces(
        ranks=(8, SIZE - 8), l2=(1.0, 1.0), bases=hush.Principal(groups=1, every=2)
    )
    noise = hush.BlockGaussian(multipliers=(1.0, 1.0))
    return trained(
        step_of(plan=plan_of(clipping=clipping, noise=noise), public=data_of(seed=9)), steps=5
    )


SELECTIVE = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=0.0)


def selective(folder: Path) -> dict[str, Any]:
    step = step_of(plan=plan_of(release=SELECTIVE), seed=6)
    moved = [step(batch) for batch in step.batches(data_of(), steps=10)]
    return {"weights": weights_of(step.model), "moved": moved, "accepted": step.accepted}


def rises(folder: Path) -> float:
    """Rise of the loss over the whole data, as every rank measures it."""
    step = step_of(plan=plan_of(release=SELECTIVE), seed=8)
    step.batches(data_of())
    whole = Batch(torch.arange(RECORDS), data_of(), 5)
    tested = list(step.reducer.share(whole).physical_batches(None))
    new = trials_of(step).losses(tested)
    return float(trials_of(step).bounded_rise(new, torch.zeros_like(new)))


def noisy_means_elsewhere(folder: Path) -> None:
    NoisyMoments(norm=1.0, square_norm=1.0, multiplier=1.0)(torch.ones(9, 2, 4), hush.Ledger())


def a_quantile_by_rank_0(folder: Path) -> dict[str, Any]:
    """A release that rank 0 makes on the ledger of the step, between two steps."""
    with hush.Ledger(folder / "ledger.jsonl" if dist.get_rank() == 0 else None) as ledger:
        step = step_of(ledger=ledger)
        batches = step.batches(data_of(), steps=2)
        step(next(batches))
        if dist.get_rank() == 0:
            NoisyQuantile(multiplier=5.0, low=0.1, high=10.0)(torch.rand(9, 1), 0.5, ledger)
        step(next(batches))
        return {"charges": sum(ledger.counts.values()), "epsilon": step.spent(1e-3).epsilon.upper}


result = partial(spawned.result, __name__, RANKS)


def same(values: list[Any]) -> bool:
    return all(torch.equal(values[0], value) for value in values[1:])


def test_every_plan_gives_every_rank_the_same_weights() -> None:
    ranks = result("plans")
    for name in PLANS:
        assert same([each[name] for each in ranks]), name
    assert same(result("views"))
    assert same(result("public_basis"))


def test_slices_of_blocks_have_their_blocks_noise() -> None:
    assert result("blocks_have_their_noise") == [True] * RANKS


def test_no_owner_is_split_between_ranks() -> None:
    ranks = result("owners")
    drawn, counts = ranks[0]["drawn"]
    assert torch.equal(torch.cat([each["share"][0] for each in ranks]), drawn)
    assert torch.equal(torch.cat([each["share"][1] for each in ranks]), counts)
    assert all(int(each["share"][1].sum()) == len(each["share"][0]) for each in ranks)
    one = step_of(records=None, units=UNITS, distributed=hush.Distributed(processes=False))
    one.batches(data_of())
    batch = Batch(drawn, data_of(), 5, counts=counts)
    torch.testing.assert_close(ranks[0]["sum"], one.clipped_sum(batch), rtol=1e-6, atol=1e-7)


def test_a_verdict_is_one_for_all_ranks() -> None:
    ranks = result("selective")
    assert same([each["weights"] for each in ranks])
    assert all(each["moved"] == ranks[0]["moved"] for each in ranks)
    assert 0 < ranks[0]["accepted"] < 10


def test_the_test_of_a_proposal_is_that_of_one_process() -> None:
    step = step_of(plan=plan_of(release=SELECTIVE), distributed=hush.Distributed(processes=False))
    step.batches(data_of())
    new = trials_of(step).losses(list(Batch(torch.arange(RECORDS), data_of(), 5).physical_batches()))
    one = float(trials_of(step).bounded_rise(new, torch.zeros_like(new)))
    assert result("rises") == pytest.approx([one] * RANKS, rel=1e-9)


def test_what_one_process_releases_is_released_by_rank_0_alone() -> None:
    first, *others = result("noisy_means_elsewhere")
    assert first is None
    for raised in others:
        assert raised.kind == "Unsupported"
        assert "Call it on rank 0 only" in raised.text


def test_a_release_of_rank_0_is_on_every_copy_of_the_ledger() -> None:
    ranks = result("a_quantile_by_rank_0")
    assert ranks == [ranks[0]] * RANKS
    assert ranks[0]["charges"] == 3
