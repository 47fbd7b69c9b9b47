"""Two processes run the step of one: draws, sums, noise, charge and refusals, in one start of them."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hush
from hush.training.data import Batch
from hush.training.fingerprint import fingerprint
from hush.training.step import PrivateStep
from tests.training.distributed import spawned
from tests.training.distributed.problems import RECORDS, data_of, model_of, plan_of, step_of
from tests.training.distributed.spawned import Raised
from tests.training.helpers import randomness, run, seeded, weights_of

STEPS = 6


def trains(folder: Path) -> dict[str, Any]:
    """A seeded run: what every rank has at the end, and what each drew, held and released."""
    step = step_of(ledger=folder / "ledger.jsonl", seed=0)
    draws, shares, updates = [], [], []
    for batch in step.batches(data_of(), steps=STEPS):
        draws.append(batch.indices)
        shares.append(step.reducer.share(batch).indices)
        assert step(batch)
        assert step.update is not None
        updates.append(step.update.clone())
    return {
        "weights": weights_of(step.model),
        "draws": draws,
        "shares": shares,
        "updates": updates,
        "charge": str(step.spent(1e-3)),
        "ledger": (step.ledger.identity, step.ledger.digest_at(step.run, STEPS), step.ledger.mirrored),
    }


def trains_without_noise(folder: Path) -> tuple[list[Tensor], Tensor]:
    """A run whose noise is exactly zero: the weights depend on the records alone."""
    with mock.patch.object(hush.Gaussian, "privatize", _location_itself):
        return _draws_and_weights(step_of(seed=4), STEPS)


def _draws_and_weights(step: PrivateStep, steps: int) -> tuple[list[Tensor], Tensor]:
    draws = []
    for batch in step.batches(data_of(), steps=steps):
        draws.append(batch.indices)
        step(batch)
    return draws, weights_of(step.model)


def _location_itself(self: hush.Gaussian, location: Tensor, **_: object) -> Tensor:
    return location


def clips_at_a_quantile(folder: Path) -> tuple[float | None, Tensor]:
    """The clipping norm after a run, and the weights."""
    step = run(step_of(plan=plan_of(clipping=hush.Quantile(1.0)), seed=0), data_of(), STEPS)
    return step.clip_norm, weights_of(step.model)


def noise_streams(folder: Path) -> list[tuple[bytes, bytes, bytes]]:
    step = step_of(seed=0)
    made = [step.reducer.streams(step.generator) for _ in range(3)]
    return [(each.masks.key, each.coordinates.key, each.noise.key) for each in made]


def another_plan(folder: Path) -> None:
    step_of(plan=plan_of(noise=hush.Gaussian(1.0 + dist.get_rank())))


def another_order(folder: Path) -> None:
    inputs, targets = data_of()
    order = torch.randperm(RECORDS, generator=seeded(dist.get_rank()))
    step_of().batches((inputs[order], targets[order]))


def another_loss(folder: Path) -> None:
    weight = torch.ones(5)
    weight[dist.get_rank()] = 2.0
    step_of(loss=torch.nn.CrossEntropyLoss(weight))


def a_ledger_of_its_own(folder: Path) -> None:
    with hush.Ledger(folder / f"{dist.get_rank()}.jsonl") as ledger:
        step_of(ledger=ledger)


def weights_moved(folder: Path) -> tuple[str | None, str | None]:
    """On rank 1, after a step: no rank may go on, and the ledger of rank 0 is void."""
    step = step_of(ledger=folder / "ledger.jsonl")
    try:
        between_steps(lambda step: torch.nn.init.ones_(next(step.model.parameters())), step)
    except hush.errors.HushError as error:
        return str(error), step.ledger.voided
    return None, None


def between_steps(change: Callable[[PrivateStep], object], step: PrivateStep | None = None) -> None:
    """Change rank 1 alone, and go on."""
    step = step or step_of()
    batches = step.batches(data_of(), steps=2)
    step(next(batches))
    if dist.get_rank():
        change(step)
    step(next(batches))


def scheduled_on_one_rank(folder: Path) -> None:
    between_steps(lambda step: step.optimizer.param_groups[0].update(lr=1.0))


def fails_on_one_rank(folder: Path) -> tuple[str, Tensor, int, bool]:
    """A record stops rank 1 in a step: error, movement, charges, and whether all ranks can repeat."""
    step, said = step_of(), ""
    before, batch = weights_of(step.model), next(step.batches(data_of()))
    if dist.get_rank():
        step.clip_physical_batch = _stops  # type: ignore[method-assign,assignment]
    try:
        step(batch)
    except (RuntimeError, hush.errors.ProcessFailed) as error:
        said = str(error)
    moved, charges = weights_of(step.model) - before, sum(step.ledger.counts.values())
    vars(step).pop("clip_physical_batch", None)
    again = next(step.batches(data_of()))
    return said, moved, charges, torch.equal(again.indices, batch.indices) and step(again)


def _stops(*_: Any) -> None:
    raise RuntimeError("a record that forward() does not take")


class Parting(PrivateStep):
    """A step whose noisy gradient comes out another one on rank 1."""

    seen: str = ""

    def private_gradient(self, batch: Any) -> Tensor:
        update = super().private_gradient(batch) * (1 + dist.get_rank())
        self.seen = fingerprint([update])
        return update


def other_releases(folder: Path) -> tuple[str, str, int]:
    return refused(plan_of())


def other_proposals(folder: Path) -> tuple[str, str, int]:
    return refused(plan_of(release=hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0)))


def refused(plan: hush.Plan) -> tuple[str, str, int]:
    """Text of the refusal, fingerprint of what was not released, and charges."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Any = {"records": RECORDS, "randomness": randomness()}
    step = Parting(model, nn.CrossEntropyLoss(), optimizer, plan, **settings)
    with pytest.raises(hush.errors.ProcessFailed) as error:
        run(step, data_of())
    return str(error.value), step.seen, sum(step.ledger.counts.values())


def other_momentum(folder: Path) -> None:
    step = step_of()
    for value in step.model.parameters():
        step.optimizer.state[value]["momentum_buffer"] = torch.full_like(value, dist.get_rank())
    run(step, data_of(), 2)


def evaluation_mode_on_one_rank(folder: Path) -> None:
    between_steps(lambda step: step.model.eval())


def weights_adopted_on_one_rank(folder: Path) -> None:
    def halve(step: PrivateStep) -> None:
        with torch.no_grad():
            next(step.model.parameters()).mul_(0.5)
        step.adopt_weights()

    between_steps(halve)


def another_private_number(folder: Path) -> None:
    step = step_of(neighbours=hush.Neighbours.ADD_REMOVE)
    step.batches(data_of(records=40 + dist.get_rank()))


def other_seeds(folder: Path) -> None:
    step_of(seed=dist.get_rank())


SIZE = weights_of(model_of()).numel()
SLICE = -(-SIZE // 2)
MESSAGE = 4096
BATCHES = (1, 7, RECORDS)
"""Records of a physical batch: forty physical batches a step, six, and one."""


class Collectives(TorchDispatchMode):
    """Name of each collective that torch runs, and how many bytes this rank gives it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append((func._opname, args[1].nbytes))
        return func(*args, **(kwargs or {}))


def traffic(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """Collectives of the second step, by size of the physical batch."""
    seen = {}
    for size in BATCHES:
        step = step_of(
            plan=plan_of(sampling=hush.FullBatch()), execution=hush.Execution(physical_batch=size)
        )
        batches = step.batches(data_of(), steps=2)
        step(next(batches))
        batch = next(batches)
        with Collectives() as collectives:
            step(batch)
        seen[size] = collectives.seen
    return seen


result = partial(spawned.result, __name__, 2)


def test_every_rank_has_the_weights_draws_charge_and_ledger_of_one_run() -> None:
    first, second = result("trains")
    assert torch.equal(first["weights"], second["weights"])
    assert not torch.equal(first["weights"], weights_of(model_of()))
    for k in range(STEPS):
        assert torch.equal(first["updates"][k], second["updates"][k])
        assert torch.equal(first["draws"][k], second["draws"][k])
        assert torch.equal(torch.cat([first["shares"][k], second["shares"][k]]), first["draws"][k])
        assert abs(len(first["shares"][k]) - len(second["shares"][k])) <= 1
    one = run(step_of(seed=0), data_of(), STEPS)
    assert first["charge"] == second["charge"] == str(one.spent(1e-3))
    (*name, mirrored), (*other, copy) = first["ledger"], second["ledger"]
    assert name == other
    assert (mirrored, copy) == (False, True)


def test_weights_are_those_of_one_process_with_the_same_draws(without_noise: None) -> None:
    (draws, weights), (_, others) = result("trains_without_noise")
    drawn = iter(draws)

    class Repeating(hush.PrivateStep):
        def draw(self, like: Batch, sampling: Any = None) -> Batch:
            return replace(like, indices=next(drawn))

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run(Repeating(model, nn.CrossEntropyLoss(), optimizer, plan_of(), records=RECORDS), data_of(), STEPS)
    assert torch.equal(weights, others)
    torch.testing.assert_close(weights, weights_of(model), rtol=1e-5, atol=1e-6)


def test_ranks_have_the_same_quantile() -> None:
    (first, weights), (second, others) = result("clips_at_a_quantile")
    assert first == second != 1.0
    assert torch.equal(weights, others)


def test_no_two_ranks_steps_or_uses_share_a_stream() -> None:
    keys = [key for rank in result("noise_streams") for made in rank for key in made]
    assert len(set(keys)) == len(keys) == 2 * 3 * 3


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (another_plan, ["plan", "multiplier = "]),
        (another_order, ["which record is in which slot (it is private and not shown)"]),
        (another_loss, ["loss", "CrossEntropyLoss", "with weight of hash"]),
        (scheduled_on_one_rank, ["settings of the optimizer"]),
        (other_momentum, ["states of the optimizer"]),
        (evaluation_mode_on_one_rank, ["train() and eval() modes"]),
        (weights_adopted_on_one_rank, ["adopted weights"]),
        (another_private_number, ["the number of records"]),
        (other_seeds, ["the seed"]),
    ],
)
def test_a_rank_that_differs_is_refused_on_every_rank(scenario: Any, words: list[str]) -> None:
    for raised in result(scenario.__name__):
        assert isinstance(raised, Raised), raised
        assert raised.kind == "ProcessFailed"
        for word in ("ranks 0 and 1 differ in", *words):
            assert word in raised.text
        if scenario is another_private_number:
            assert not re.search("4[01]", raised.text)
        if scenario is other_seeds:
            assert not re.search("[0-9a-f]{8}", raised.text)


def test_a_second_ledger_is_refused() -> None:
    first, second = result("a_ledger_of_its_own")
    assert (first.kind, second.kind) == ("ProcessFailed", "LedgerError")
    assert "1.jsonl has charges or a file of its own" in first.text


def test_weights_moved_on_one_rank_void_the_ledger_of_all() -> None:
    for text, void in result("weights_moved"):
        assert "changed outside of the private step" in text
        assert void is not None


def test_an_error_on_one_rank_stops_all_before_the_charge() -> None:
    (told, *first), (own, *second) = result("fails_on_one_rank")
    assert "rank 1 stopped (RuntimeError: a record that forward() does not take)" in told
    assert own == "a record that forward() does not take"
    for moved, charges, repeated in (first, second):
        assert not moved.any()
        assert charges == 0
        assert repeated


@pytest.mark.parametrize("scenario", [other_releases, other_proposals])
def test_other_gradients_are_not_charged_and_their_fingerprints_not_shown(scenario: Any) -> None:
    ranks = result(scenario.__name__)
    assert len({seen for _, seen, _ in ranks}) == 2
    for text, _, charges in ranks:
        assert "ranks 0 and 1 differ in the" in text
        assert charges == 0
        assert not any(seen in text for _, seen, _ in ranks)


def test_a_step_reduces_one_gradient_once_in_as_many_messages() -> None:
    """Each rank sends the others' slices of its sum, and then its own slice with its noise.

    Messages are about the sum and the weights, and of the charge before and after it is on disk.
    """
    double = torch.float64.itemsize
    sums = [("alltoall_base_", 2 * SLICE * double), ("_allgather_base_", SLICE * double)]
    for seen in result("traffic"):
        assert all(
            [each for each in seen[n] if each != ("_allgather_base_", MESSAGE)] == sums for n in seen
        )
        (count,) = {each.count(("_allgather_base_", MESSAGE)) for each in seen.values()}
        assert count >= 3
