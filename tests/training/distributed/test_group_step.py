"""Two processes run the step of one: draws, sums, noise, charge and refusals, in one start of them."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hush
from hush.audit.draws import draws_independent
from hush.audit.noise import noise_fresh, noise_law, noise_scale, observe
from hush.training.data import Batch
from tests.training.distributed import spawned
from tests.training.distributed.problems import (
    RECORDS,
    data_of,
    model_of,
    plan_of,
    seeded,
    step_of,
    weights_of,
)
from tests.training.distributed.spawned import Raised

STEPS = 6


def trains(folder: Path) -> dict[str, Any]:
    """A seeded run: what every rank has at the end, and what each drew, held and released."""
    step = step_of(ledger=folder / "ledger.jsonl", randomness=hush.Randomness(generator=seeded()))
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
        "state": {name: value for name, value in step.state_dict().items() if name != "optimizer"},
    }


def trains_securely(folder: Path) -> dict[str, Any]:
    step = step_of(randomness=hush.Randomness(secure=True))
    draws = []
    for batch in step.batches(data_of(), steps=3):
        draws.append(batch.indices)
        step(batch)
    return {"weights": weights_of(step.model), "draws": draws}


def trains_with_torch_s_generator(folder: Path) -> Tensor:
    step = step_of(randomness=hush.Randomness(arithmetic="assumed"))
    for batch in step.batches(data_of(), steps=3):
        step(batch)
    return weights_of(step.model)


def trains_without_noise(folder: Path) -> tuple[list[Tensor], Tensor]:
    """Draws and weights of a run whose noise is exactly zero: what is left is the records' part."""
    draws = []
    with mock.patch.object(hush.Gaussian, "privatize", _location_itself):
        step = step_of(randomness=hush.Randomness(generator=seeded(4)))
        for batch in step.batches(data_of(), steps=STEPS):
            draws.append(batch.indices)
            step(batch)
    return draws, weights_of(step.model)


def _location_itself(self: hush.Gaussian, location: Tensor, **_: object) -> Tensor:
    return location


def sums(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Sums of the whole batch, and who was drawn, without noise."""
    step = step_of(randomness=hush.Randomness(generator=seeded(3)))
    return [
        (batch.indices, step.clipped_sum(batch).clone())
        for batch in (next(_drawn(step)) for _ in range(4))
    ]


def _drawn(step: hush.PrivateStep) -> Any:
    step.pending_batch = None
    return step.batches(data_of())


def noise_streams(folder: Path) -> list[tuple[bytes, bytes, bytes]]:
    step = step_of(randomness=hush.Randomness(generator=seeded()))
    made = [step.reducer.streams(step.generator) for _ in range(3)]
    return [(each.masks.key, each.coordinates.key, each.noise.key) for each in made]  # type: ignore[union-attr]


def noise_is_that_of_one_process(folder: Path) -> list[bool]:
    step = step_of(randomness=hush.Randomness(generator=seeded(1)))
    observed = observe(step, data_of(), 30)
    return [check(observed).passed for check in (noise_scale, noise_law, noise_fresh)]


def draws_are_those_of_one_process(folder: Path) -> bool:
    step = step_of(randomness=hush.Randomness(generator=seeded(2)))
    return draws_independent(step, data_of()).passed


def empty_draws(folder: Path) -> tuple[Tensor, int]:
    """Nobody, or one record for two ranks, in almost every step."""
    step = step_of(
        plan=plan_of(sampling=hush.Poisson(rate=0.01)), randomness=hush.Randomness(generator=seeded())
    )
    sizes = []
    for batch in step.batches(data_of(), steps=8):
        sizes.append(len(batch))
        step(batch)
    return weights_of(step.model), min(sizes)


def few_parameters(folder: Path) -> Tensor:
    """Fewer numbers than ranks: a rank without a slice."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    step = hush.PrivateStep(
        model,
        lambda outputs, targets: outputs[:, 0] * targets,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan_of(),
        records=RECORDS,
    )
    data = torch.ones(RECORDS, 1), torch.ones(RECORDS)
    for batch in step.batches(data, steps=3):
        step(batch)
    return weights_of(model)


def another_plan(folder: Path) -> None:
    step_of(plan=plan_of(noise=hush.Gaussian(multiplier=1.0 + dist.get_rank())))


def other_weights(folder: Path) -> None:
    step_of(model_of(seed=dist.get_rank()))


def another_model(folder: Path) -> None:
    wide = torch.nn.Sequential(torch.nn.Linear(8, 5 + dist.get_rank()))
    step_of(wide)


def another_count(folder: Path) -> None:
    step_of(records=RECORDS + dist.get_rank())


def another_version(folder: Path) -> None:
    if dist.get_rank():
        hush.__version__ = "0.0.9"
    try:
        step_of()
    finally:
        hush.__version__ = "0.1.0"


def another_rate_of_learning(folder: Path) -> None:
    model = model_of()
    step_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank())))


def another_order(folder: Path) -> None:
    inputs, targets = data_of()
    order = torch.randperm(RECORDS, generator=seeded(dist.get_rank()))
    step_of().batches((inputs[order], targets[order]))


def another_loss(folder: Path) -> None:
    weight = torch.ones(5)
    weight[dist.get_rank()] = 2.0
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hush.PrivateStep(model, torch.nn.CrossEntropyLoss(weight), optimizer, plan_of(), records=RECORDS)


def another_smoothing(folder: Path) -> None:
    model = model_of()
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1 * dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hush.PrivateStep(model, loss, optimizer, plan_of(), records=RECORDS)


def another_end(folder: Path) -> None:
    step_of().batches(data_of(), steps=3 + dist.get_rank())


def a_path_on_rank_1_alone(folder: Path) -> bool:
    try:
        step_of(ledger=folder / "ledger.jsonl" if dist.get_rank() else None)
    finally:
        assert not list(folder.iterdir())
    return False


def a_ledger_of_its_own(folder: Path) -> None:
    with hush.Ledger(folder / f"{dist.get_rank()}.jsonl") as ledger:
        step_of(ledger=ledger)


def charged_beside_the_step(folder: Path) -> None:
    """A release of one rank alone, charged to its copy of the ledger."""
    step = step_of()
    if dist.get_rank():
        step.ledger.charge(plan_of(), run="own", step=1, release="0")


def weights_moved(folder: Path) -> tuple[str | None, str | None]:
    """On rank 1, after a step: no rank may go on, and the ledger of rank 0 is void."""
    step = step_of(ledger=folder / "ledger.jsonl")
    batches = step.batches(data_of(), steps=2)
    step(next(batches))
    if dist.get_rank():
        with torch.no_grad():
            next(step.model.parameters()).add_(1.0)
    try:
        step(next(batches))
    except hush.errors.HushError as error:
        return str(error), step.ledger.voided
    return None, None


def weights_set_differently(folder: Path) -> None:
    step = step_of()
    with torch.no_grad():
        next(step.model.parameters()).fill_(float(dist.get_rank()))
    step.adopt_weights()
    step.batches(data_of())


def frozen_on_one_rank(folder: Path) -> None:
    step = step_of()
    batches = step.batches(data_of(), steps=2)
    step(next(batches))
    if dist.get_rank():
        next(step.model.parameters()).requires_grad_(False)
    step(next(batches))


def scheduled_on_one_rank(folder: Path) -> None:
    step = step_of()
    batches = step.batches(data_of(), steps=2)
    step(next(batches))
    if dist.get_rank():
        step.optimizer.param_groups[0]["lr"] = 1.0
    step(next(batches))


def destroys_the_group(folder: Path) -> str:
    group = dist.new_group()
    step = step_of(distributed=hush.Distributed(processes=group))
    batches = step.batches(data_of(), steps=2)
    step(next(batches))
    batch = next(batches)
    dist.destroy_process_group(group)
    with pytest.raises(hush.errors.ProcessFailed) as failed:
        step(batch)
    return str(failed.value)


def leaves_a_batch_out(folder: Path) -> None:
    step = step_of()
    for batch in step.batches(data_of(), steps=3):
        if dist.get_rank() or step.steps == 0:
            step(batch)


def a_collective_of_its_own(folder: Path) -> tuple[str, str] | None:
    """On rank 0, as long as a message of the step that rank 1 goes on with."""
    step = step_of()
    if dist.get_rank() == 0:
        sent = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
        dist.all_gather([torch.empty_like(sent) for _ in range(2)], sent)
        return None
    said = []
    for _ in range(2):  # the second time without meeting the others
        with pytest.raises(hush.errors.ProcessFailed) as failed:
            step.batches(data_of())
        said.append(str(failed.value))
    return said[0], said[1]


def fails_on_one_rank(folder: Path) -> tuple[str, Tensor, int]:
    """A record that stops rank 1 in the middle of a step: others are told, nothing is charged."""
    step = step_of()
    before = weights_of(step.model)
    if dist.get_rank():
        step.clip_physical_batch = _stops  # type: ignore[method-assign,assignment]
    try:
        for batch in step.batches(data_of(), steps=1):
            step(batch)
    except (RuntimeError, hush.errors.ProcessFailed) as error:
        return str(error), weights_of(step.model) - before, sum(step.ledger.counts.values())
    raise AssertionError("it went on")


def goes_on_after_an_error(folder: Path) -> tuple[Tensor, int]:
    """The same batch, passed again on every rank once rank 1 can take its records."""
    step = step_of(ledger=folder / "ledger.jsonl")
    if dist.get_rank():
        step.clip_physical_batch = _stops  # type: ignore[method-assign,assignment]
    with suppress(RuntimeError, hush.errors.ProcessFailed):
        for batch in step.batches(data_of(), steps=1):
            step(batch)
    if dist.get_rank():
        del step.clip_physical_batch
    for batch in step.batches(data_of(), steps=2):
        step(batch)
    return weights_of(step.model), sum(step.ledger.counts.values())


def _stops(*_: Any) -> None:
    raise RuntimeError("a record that forward() does not take")


def alone(folder: Path) -> Tensor:
    """Two runs that have nothing to do with each other."""
    step = step_of(
        distributed=hush.Distributed(processes=False),
        randomness=hush.Randomness(generator=seeded(dist.get_rank())),
    )
    for batch in step.batches(data_of(), steps=1):
        step(batch)
    return weights_of(step.model)


SCENARIOS = (
    trains,
    trains_securely,
    trains_with_torch_s_generator,
    trains_without_noise,
    sums,
    noise_streams,
    noise_is_that_of_one_process,
    draws_are_those_of_one_process,
    empty_draws,
    few_parameters,
    another_plan,
    other_weights,
    another_model,
    another_count,
    another_version,
    another_rate_of_learning,
    another_order,
    another_loss,
    another_smoothing,
    another_end,
    a_path_on_rank_1_alone,
    a_ledger_of_its_own,
    charged_beside_the_step,
    weights_moved,
    weights_set_differently,
    frozen_on_one_rank,
    scheduled_on_one_rank,
    destroys_the_group,
    leaves_a_batch_out,
    a_collective_of_its_own,
    fails_on_one_rank,
    goes_on_after_an_error,
    alone,
)


def result(name: str) -> list[Any]:
    return spawned.run(SCENARIOS, 2)[name]


def test_every_rank_has_the_same_weights_bit_for_bit() -> None:
    first, second = result("trains")
    assert torch.equal(first["weights"], second["weights"])
    assert not torch.equal(first["weights"], weights_of(model_of()))
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)


def test_ranks_draw_the_same_slots_and_share_them() -> None:
    first, second = result("trains")
    for k in range(STEPS):
        assert torch.equal(first["draws"][k], second["draws"][k])
        assert torch.equal(torch.cat([first["shares"][k], second["shares"][k]]), first["draws"][k])
        assert abs(len(first["shares"][k]) - len(second["shares"][k])) <= 1


def test_the_charge_is_that_of_one_process_and_on_every_rank() -> None:
    first, second = result("trains")
    assert first["charge"] == second["charge"]
    one = step_of(randomness=hush.Randomness(generator=seeded()))
    for batch in one.batches(data_of(), steps=STEPS):
        one(batch)
    assert first["charge"] == str(one.spent(1e-3))


def test_one_ledger_is_written_and_the_others_count_the_same() -> None:
    (name, digest, mirrored), (other, copied, copy) = (each["ledger"] for each in result("trains"))
    assert (name, digest) == (other, copied)
    assert (mirrored, copy) == (False, True)


def test_every_rank_has_the_same_checkpoint() -> None:
    first, second = (each["state"] for each in result("trains"))
    assert first["processes"] == 2
    assert {name: str(value) for name, value in first.items()} == {
        name: str(value) for name, value in second.items()
    }


def test_a_sum_of_two_ranks_is_that_of_one_process() -> None:
    one = step_of(randomness=hush.Randomness(generator=seeded(3)))
    one.batches(data_of())
    for first, second in zip(*result("sums"), strict=True):
        assert torch.equal(first[1], second[1])
        batch = Batch(first[0], data_of(), 5)
        torch.testing.assert_close(first[1], one.clipped_sum(batch), rtol=1e-6, atol=1e-7)


def test_weights_are_those_of_one_process_with_the_same_draws(without_noise: None) -> None:
    (draws, weights), (_, others) = result("trains_without_noise")
    drawn = iter(draws)

    class Repeating(hush.PrivateStep):
        def draw(self, like: Batch, sampling: Any = None) -> Batch:
            return replace(like, indices=next(drawn))

    model = model_of()
    one = Repeating(
        model,
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plan_of(),
        records=RECORDS,
        execution=hush.Execution(physical_batch=5),
    )
    for batch in one.batches(data_of(), steps=STEPS):
        one(batch)
    assert torch.equal(weights, others)
    torch.testing.assert_close(weights, weights_of(model), rtol=1e-5, atol=1e-6)


def test_secure_ranks_draw_the_same_slots() -> None:
    first, second = result("trains_securely")
    assert torch.equal(first["weights"], second["weights"])
    assert all(map(torch.equal, first["draws"], second["draws"]))


def test_ranks_agree_under_torch_s_generator() -> None:
    assert torch.equal(*result("trains_with_torch_s_generator"))


def test_no_two_ranks_steps_or_uses_share_a_stream() -> None:
    keys = [key for rank in result("noise_streams") for made in rank for key in made]
    assert len(set(keys)) == len(keys) == 2 * 3 * 3


def test_the_noise_is_that_of_one_process() -> None:
    assert result("noise_is_that_of_one_process") == [[True] * 3] * 2


def test_the_draws_are_those_of_one_process() -> None:
    assert result("draws_are_those_of_one_process") == [True, True]


def test_ranks_without_a_record_take_part() -> None:
    (first, fewest), (second, _) = result("empty_draws")
    assert fewest == 0
    assert torch.equal(first, second)


def test_a_rank_may_have_no_slice() -> None:
    first, second = result("few_parameters")
    assert torch.equal(first, second)
    assert first.isfinite().all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another_plan", ["plan", "multiplier = 1.0", "multiplier = 2.0"]),
        ("other_weights", ["the model's weights"]),
        ("another_model", ["model", "(5, 8)", "(6, 8)"]),
        ("another_count", ["records", "rank 0 has 40", "rank 1 has 41"]),
        ("another_version", ["hush", "rank 0 has 0.1.0", "rank 1 has 0.0.9"]),
        ("another_rate_of_learning", ["settings of the optimizer", "'lr': 0.1", "'lr': 0.2"]),
        ("another_order", ["rank 0 and of rank 1", "which record is in which slot"]),
        ("another_loss", ["differ in loss", "CrossEntropyLoss", "with weight of hash"]),
        ("another_smoothing", ["differ in loss", "'label_smoothing': 0.0", "'label_smoothing': 0.1"]),
        ("another_end", ["differ in steps: rank 0 has 3, rank 1 has 4"]),
        ("a_path_on_rank_1_alone", ["rank 1 was given the path of a ledger and rank 0 was not"]),
    ],
)
def test_a_rank_that_differs_is_refused_on_every_rank(name: str, words: list[str]) -> None:
    for raised in result(name):
        assert isinstance(raised, Raised), raised
        assert raised.kind in ("Unsupported", "DataError", "InvalidValue", "LedgerError")
        for word in words:
            assert word in raised.text


def test_a_second_ledger_is_refused() -> None:
    first, second = result("a_ledger_of_its_own")
    assert (first.kind, second.kind) == ("ProcessFailed", "LedgerError")
    assert "rank 1 has a ledger of its own" in first.text


def test_a_copy_of_the_ledger_takes_no_charge() -> None:
    first, second = result("charged_beside_the_step")
    assert first is None
    assert second.kind == "LedgerError"
    assert "copy of the one that rank 0 writes" in second.text


def test_weights_moved_on_one_rank_void_the_ledger_of_all() -> None:
    for text, void in result("weights_moved"):
        assert "changed outside of the private step" in text
        assert void is not None


@pytest.mark.parametrize("name", ["frozen_on_one_rank", "scheduled_on_one_rank"])
def test_ranks_that_do_different_things_between_steps_are_stopped(name: str) -> None:
    for raised in result(name):
        assert raised.kind == "ProcessFailed"
        assert "other parameters or with other settings of the optimizer" in raised.text


def test_a_step_of_a_destroyed_group_is_refused() -> None:
    for text in result("destroys_the_group"):
        assert "the process group was destroyed" in text
        assert "Step 1 is on the ledger" in text


def test_a_rank_that_leaves_a_batch_out_stops_all() -> None:
    first, second = result("leaves_a_batch_out")
    assert first.kind == "DataError"
    assert second.kind == "ProcessFailed"
    assert "rank 0 stopped (DataError: a batch was drawn and not used" in second.text


def test_a_collective_of_another_kind_is_not_taken_for_a_message() -> None:
    _, (first, second) = result("a_collective_of_its_own")
    assert "rank 1 of 2 was at comparing the weights and received what is no message" in first
    assert "a collective of its own in the same process group" in first
    assert second == first


def test_weights_that_were_set_must_be_the_same() -> None:
    for raised in result("weights_set_differently"):
        assert raised.kind == "Unsupported"
        assert "ranks 0 and 1 differ in weights" in raised.text


def test_an_error_on_one_rank_stops_all_before_the_charge() -> None:
    (told, moved, charges), (own, also, copied) = result("fails_on_one_rank")
    assert "rank 1 stopped (RuntimeError: a record that forward() does not take)" in told
    assert own == "a record that forward() does not take"
    assert not moved.any()
    assert not also.any()
    assert charges == copied == 0


def test_a_step_that_raised_is_taken_again_by_all_ranks() -> None:
    (first, charges), (second, copied) = result("goes_on_after_an_error")
    assert torch.equal(first, second)
    assert charges == copied == 2


def test_runs_of_their_own_have_nothing_in_common() -> None:
    first, second = result("alone")
    assert not torch.equal(first, second)
