"""`hush.train` by two processes: one directory, the same result on both, and how such a run resumes."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hush
from hush.training.loop import Run
from tests.training import helpers
from tests.training.distributed import spawned
from tests.training.distributed.problems import data_of, model_of, plan_of, step_of
from tests.training.distributed.spawned import Raised
from tests.training.helpers import randomness, run, weights_of

BUDGET = hush.Budget(epsilon=30.0, delta=1e-3)


def train(folder: Path, steps: int, **options: Any) -> tuple[torch.Tensor, Run]:
    model = model_of()
    trained = helpers.train(
        model,
        plan_of(),
        data_of(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        budget=BUDGET,
        steps=steps,
        randomness=randomness(),
        execution=hush.Execution(physical_batch=5),
        **{"directory": folder / "run", **options},
    )
    return weights_of(model), trained


def trains_into_a_directory(folder: Path) -> dict[str, Any]:
    weights, trained = train(folder, 8, evaluation=data_of(seed=7), every=3)
    dist.barrier()
    return {
        "weights": weights,
        "run": str(trained),
        "metrics": trained.metrics,
        "files": sorted(path.name for path in (folder / "run").iterdir()),
    }


def goes_on(folder: Path) -> dict[str, Any]:
    """Six steps at once, and four and then two after a restart: the same draws, noise and weights."""
    once, _ = train(folder / "once", 6)
    train(folder / "twice", 4, every=4)
    twice, trained = train(folder / "twice", 6, every=4, resume=True)
    return {"once": once, "twice": twice, "epsilon": trained.guarantee.epsilon.upper}


def _crashes_after_a_charge(folder: Path) -> None:
    """A checkpoint of step 2, and three steps more on the ledger."""
    with hush.Ledger(folder / "ledger.jsonl" if dist.get_rank() == 0 else None) as ledger:
        step = step_of(ledger=ledger, seed=0)
        batches = step.batches(data_of(), steps=5)
        for _ in range(2):
            step(next(batches))
        if dist.get_rank() == 0:
            torch.save(step.state_dict(), folder / "state.pt")
        for number, batch in enumerate(batches):
            if not number:
                torch.save(batch.indices, folder / f"third draw {dist.get_rank()}.pt")
            step(batch)
        torch.save(weights_of(step.model), folder / f"weights{dist.get_rank()}.pt")


def repeats(folder: Path) -> dict[str, Any]:
    """The three steps again: the same weights, and no charge."""
    _crashes_after_a_charge(folder)
    dist.barrier()
    with hush.Ledger(folder / "ledger.jsonl" if dist.get_rank() == 0 else None) as ledger:
        step = step_of(ledger=ledger, seed=1)
        step.load_state_dict(torch.load(folder / "state.pt") if dist.get_rank() == 0 else {})
        run(step, data_of(), 3)
        before = torch.load(folder / f"weights{dist.get_rank()}.pt")
        return {
            "same": torch.equal(before, weights_of(step.model)),
            "charges": sum(step.ledger.counts.values()),
        }


def leaves_for_one(folder: Path) -> dict[str, Any]:
    """What a single process resumes: a checkpoint with nothing charged since, and one with."""
    _crashes_after_a_charge(folder)
    dist.barrier()
    return {
        "state": torch.load(folder / "state.pt"),
        "third draw": torch.load(folder / f"third draw {dist.get_rank()}.pt"),
        "ledger": (folder / "ledger.jsonl").read_bytes(),
    }


def a_directory_on_rank_0_alone(folder: Path) -> None:
    train(folder, 2, **({"directory": None} if dist.get_rank() else {}))


def is_stopped_by_rank_0(folder: Path) -> dict[str, Any]:
    """A callback of rank 0 alone ends the run on both, on a ledger that is passed by its path."""
    callbacks = [] if dist.get_rank() else [lambda number, _: number == 3]
    weights, trained = train(
        folder, 8, directory=None, ledger=folder / "ledger.jsonl", callbacks=callbacks
    )
    dist.barrier()
    stored = hush.Ledger(folder / "ledger.jsonl", read_only=True).epsilon().epsilon
    return {"weights": weights, "run": str(trained), "stored": stored == trained.guarantee.epsilon}


result = partial(spawned.result, __name__, 2)


def test_all_ranks_return_the_same_and_one_directory_is_written() -> None:
    first, second = result("trains_into_a_directory")
    assert torch.equal(first.pop("weights"), second.pop("weights"))
    assert first == second
    assert [entry["step"] for entry in first["metrics"]] == [3, 6, 8]
    assert "private" in first["files"], "the folder of the checkpoint"
    assert "model.safetensors" in first["files"]


def test_a_callback_of_rank_0_ends_the_run_of_all() -> None:
    first, second = result("is_stopped_by_rank_0")
    assert torch.equal(first.pop("weights"), second.pop("weights"))
    assert first == second
    assert "steps=3, stopped='callback'" in first["run"]
    assert first["stored"], "the planned steps are on the ledger of rank 0"


def test_ranks_that_are_called_differently_are_refused() -> None:
    for raised in result("a_directory_on_rank_0_alone"):
        assert isinstance(raised, Raised)
        assert raised.kind == "ProcessFailed"
        assert "ranks 0 and 1 differ in directory" in raised.text


def test_a_run_goes_on_bit_for_bit() -> None:
    first, second = result("goes_on")
    assert torch.equal(first["once"], first["twice"])
    assert torch.equal(first["twice"], second["twice"])
    assert first["epsilon"] == second["epsilon"]


def test_steps_that_were_charged_are_repeated_without_a_charge() -> None:
    assert result("repeats") == [{"same": True, "charges": 5}] * 2


def resumed_alone(tmp_path: Path, *, steps_on_ledger: int) -> tuple[hush.PrivateStep, list[str]]:
    """One process goes on from the checkpoint of two; the ledger holds so many steps."""
    left, _ = result("leaves_for_one")
    lines = left["ledger"].splitlines(keepends=True)
    kept = len(lines) - (5 - steps_on_ledger)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines[:kept]))
    step = step_of(ledger=tmp_path / "ledger.jsonl", seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.load_state_dict(left["state"])
    return step, [str(each.message) for each in caught]


def test_one_process_goes_on_with_the_draws_of_two(tmp_path: Path) -> None:
    step, caught = resumed_alone(tmp_path, steps_on_ledger=2)
    assert not caught
    drawn = next(step.batches(data_of())).indices
    assert torch.equal(drawn, result("leaves_for_one")[0]["third draw"])


def test_steps_charged_by_another_number_of_processes_are_paid_again(tmp_path: Path) -> None:
    step, caught = resumed_alone(tmp_path, steps_on_ledger=5)
    assert "2 processes charged steps" in caught[0]
    run(step, data_of(), 3)
    assert sum(step.ledger.counts.values()) == 8
