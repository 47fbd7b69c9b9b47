"""Two processes train a model whose parameters they share out by `fully_shard`, in one start of them."""

import copy
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hush
from hush.core.randomness import derive_source
from hush.gradients.sharding import ShardedModules
from hush.training.data import Batch
from hush.training.distributed.process_group import ProcessGroup
from hush.training.distributed.sharded import ShardedTape
from hush.training.step import PrivateStep
from hush_recipes.audit.noise import noise_fresh, noise_law, noise_scale, observe
from hush_recipes.audit.self_test import charged, influence
from tests.training.distributed import spawned
from tests.training.distributed.problems import RECORDS, plan_of
from tests.training.distributed.spawned import Raised
from tests.training.helpers import step_of

STEPS, WIDTH, WORDS, LENGTH = 4, 6, 11, 3
CLIP = 1.0
SILENT = 1e-4
"""Noise multiplier that leaves of a step what it would be without noise."""


class Block(nn.Module):
    """A residual block with layers that have a rule and a parameter that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.narrow = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.wide(self.norm(x)))
        return x + self.scale * torch.sin(self.scale * self.narrow(hidden))


class Sentences(nn.Module):
    """A small model of sequences: an embedding, three blocks and a head."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


def whole_model(recompute: bool = False) -> Sentences:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Sentences(recompute)


def sharded_model(recompute: bool = False, **options: Any) -> Sentences:
    model = whole_model(recompute)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def sentences(records: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(0, WORDS, (records, LENGTH), generator=generator),
        torch.randint(0, 5, (records,), generator=generator),
    )


def step_on(model: nn.Module, multiplier: float = 1.0, **options: Any) -> PrivateStep:
    usual: dict[str, Any] = {"records": RECORDS, "execution": hush.Execution(physical_batch=3)}
    usual |= {"plan": plan_of(clipping=hush.L2(CLIP), noise=multiplier), "seed": 0}
    return step_of(model, make=torch.optim.Adam, lr=0.05, **{**usual, **options})


def trained(step: PrivateStep, steps: int, data: Any = None) -> list[Tensor]:
    draws = []
    for batch in step.batches(data or sentences(), steps=steps):
        draws.append(batch.indices)
        step(batch)
    return draws


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights, gathered from the ranks where they are sharded."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


# what the two processes do


def trains_without_noise(folder: Path) -> dict[str, Any]:
    step = step_on(sharded_model(), SILENT, ledger=folder / "ledger.jsonl")
    gathered, release = [], ShardedModules.release

    def counted(self: ShardedModules) -> None:
        whole = [value for part, value in self.gathered.items() if self.module_of[part] in self.whole]
        gathered.append(sum(value.numel() for value in whole))
        release(self)

    with mock.patch.object(ShardedModules, "release", counted):
        draws = trained(step, STEPS)
    assert step.update is not None
    return {
        "draws": draws,
        "weights": weights_of(step.model),
        "held": sum(value.to_local().numel() for value in step.model.parameters()),  # type: ignore[attr-defined]
        "largest": max(gathered),
        "update": step.update.numel(),
        "sharded": all(isinstance(value, DTensor) for value in step.model.parameters()),
        "state": [
            type(entry).__name__
            for entries in step.optimizer.state.values()
            for name, entry in entries.items()
            if name == "exp_avg"
        ],
        "charge": str(step.spent(1e-3)),
        "ledger": (step.ledger.digest_at(step.run, STEPS), step.ledger.mirrored),
    }


def trains_with_recomputed_activations(folder: Path) -> dict[str, Tensor]:
    step = step_on(sharded_model(recompute=True), SILENT)
    trained(step, STEPS)
    return weights_of(step.model)


def evaluates(folder: Path) -> dict[str, Any]:
    """A run whose model is evaluated on public records before everything that the step does."""
    step = step_on(sharded_model(), SILENT, ledger=folder / "ledger.jsonl")
    batches = step.batches(sentences(), steps=STEPS)
    draws = []
    for batch in batches:
        _evaluate(step.model)
        draws.append(batch.indices)
        step(batch)
    _evaluate(step.model)
    charge = str(step.spent(1e-3))
    _evaluate(step.model)
    state = step.state_dict()
    _evaluate(step.model)
    step.load_state_dict(state)
    return {"draws": draws, "charge": charge, "weights": weights_of(step.model)}


@torch.no_grad()
def _evaluate(model: nn.Module) -> None:
    model(sentences()[0][:2])
    assert not all(isinstance(value, DTensor) for value in model.parameters()), "FSDP keeps some whole"


class Tied(nn.Module):
    """Scores of words by the table that the words are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.block(self.words(tokens)).mean(1))
        return scores


class Passing(nn.Linear):
    """A layer that hands on what it gets: the output of the layer before is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Reused(nn.Module):
    """Layers that are sharded one by one, used twice, side by side, for nothing and last of all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.passing = Passing(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(WIDTH, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.words(tokens).mean(1))
        first = self.block(x)
        second = self.passing(self.other(torch.tanh(first)))
        scores: Tensor = self.head(first * second + self.block(torch.tanh(second)) + self.other(x))
        return scores


def sums_of_other_layers(folder: Path) -> dict[str, float]:
    """How far the sums of shards are from those of one process with the whole model."""
    batch = Batch(torch.arange(7), sentences(), 3)
    apart = {}
    for kind in (Tied, Reused):
        sums = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model: Any = kind()
            if sharded:
                parts = list(model.modules()) if kind is Reused else [model, model.block]
                for module in reversed(parts):
                    fully_shard(module)
            step = step_on(model, distributed=hush.Distributed(processes=None if sharded else False))
            total = step.clipped_sum(batch).clone()
            trained_values = list(step.trainable().values())
            if step.reducer.modules.sharded:
                step.reducer.set_gradients(trained_values, total)
                grads = [value.grad.full_tensor() for value in trained_values]  # type: ignore[union-attr]
                total = torch.cat([grad.double().reshape(-1) for grad in grads])
            sums.append(total)
        apart[kind.__name__] = float((sums[0] - sums[1]).abs().max() / sums[0].abs().max())
    return apart


def audits(folder: Path) -> dict[str, bool]:
    step = step_on(sharded_model())
    observed = observe(step, sentences(), 12)
    checks = [check(observed) for check in (noise_scale, noise_law, noise_fresh)]
    checks += [charged(step, sentences(), 2), influence_of(step)]
    return {check.name: check.passed for check in checks}


def influence_of(step: PrivateStep) -> Any:
    return influence(step, Batch(torch.arange(4), sentences(), 2), places=[1], lengths=[1.0, 1e4])


@contextmanager
def norm_of_own_shard() -> Iterator[None]:
    """Every rank clips by the norm of the coordinates whose shard it holds."""

    def norms(self: ShardedTape, order: float) -> Tensor:
        squares = []
        for name in self.reducer.modules.parameters:
            ((_, gradients),) = self.tape.select([name]).chunks()
            rows = gradients[name].chunk(dist.get_world_size(), dim=1)
            rank = dist.get_rank()
            if rank < len(rows):
                squares.append(rows[rank].double().flatten(1).square().sum(1))
        return torch.stack(squares).sum(0).sqrt()

    with mock.patch.object(ShardedTape, "norms", norms):
        yield


@contextmanager
def noise_of_one_stream() -> Iterator[None]:
    """Every rank draws the noise of its shard from the same stream."""

    def same(self: Any, root: Any, use: str) -> Any:
        return derive_source(root, use.encode())

    with mock.patch.object(ProcessGroup, "_stream", same):
        yield


def sabotaged(folder: Path) -> dict[str, bool]:
    with norm_of_own_shard():
        norms = influence_of(step_on(sharded_model()))
    with noise_of_one_stream():
        stream = noise_fresh(observe(step_on(sharded_model()), sentences(), 12))
    return {"norm_of_own_shard": norms.passed, "noise_of_one_stream": stream.passed}


def resumes(folder: Path) -> dict[str, Any]:
    """A run that is saved, and goes on: as it would have, by new ranks, and in one process alone."""
    first = step_on(sharded_model(), ledger=folder / "ledger.jsonl")
    trained(first, 2)
    state = copy.deepcopy(first.state_dict())
    saved = weights_of(first.model)
    draws = trained(first, 2)
    again = step_on(sharded_model(), ledger=first.ledger)
    again.load_state_dict(state)
    loaded = weights_of(again.model)
    repeated = trained(again, 2)
    result = {
        "saved": saved,
        "loaded": loaded,
        "draws": (draws, repeated),
        "weights": (weights_of(first.model), weights_of(again.model)),
        "steps": (first.steps, again.ledger.counts[again.plan]),
        "state": len(state["model"]) if state else None,
    }
    if dist.get_rank() == 0:
        result |= _alone(state, first.ledger)
    dist.barrier()
    return result


def _alone(state: dict[str, Any], ledger: hush.Ledger) -> dict[str, Any]:
    """The checkpoint of two ranks in one process, which adds other noise to the steps since."""
    alone = step_on(whole_model(), distributed=hush.Distributed(processes=False), ledger=ledger)
    with pytest.warns(
        hush.errors.PrivacyWarning,
        match="2 processes with sharded parameters charged steps after",
    ):
        alone.load_state_dict(state)
    found = {"alone": weights_of(alone.model), "alone_steps": alone.steps}
    trained(alone, 1)
    return {**found, "alone_charges": ledger.counts[alone.plan]}


def refuses(folder: Path) -> dict[str, str]:
    """What each unsupported option is refused with, on this rank."""
    some = whole_model()
    fully_shard(some.blocks[0])
    cases = {
        "clipping": lambda: step_on(sharded_model(), plan=plan_of(clipping=hush.Linf(1.0))),
        "units": lambda: step_on(
            sharded_model(), units=hush.Units(owners=[0] * RECORDS, per_unit=2), records=None
        ),
        "some": lambda: step_on(some),
        "one process": lambda: step_on(sharded_model(), distributed=hush.Distributed(processes=False)),
        "train": lambda: _train(sharded_model()),
        "one record": lambda: trained(step_on(sharded_model(), records=1), 1, sentences(1)),
    }
    return {name: _refused(case) for name, case in cases.items()}


def _train(model: nn.Module) -> None:
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters())
    budget = hush.Budget(epsilon=3.0, delta=1e-3)
    hush.train(model, loss, optimizer, plan_of(), sentences(), budget=budget, steps=1)


def _refused(case: Any) -> str:
    try:
        case()
    except (hush.errors.HushError, OSError) as error:
        return str(error)
    return "not refused"


def result(scenario: Any) -> list[Any]:
    by_rank = spawned.run(__name__, 2)[scenario.__name__]
    assert not any(isinstance(each, Raised) for each in by_rank), by_rank
    return by_rank


# what is expected of them


def without_noise(draws: list[Tensor]) -> dict[str, Tensor]:
    """DP-SGD without noise, one record at a time, by torch alone."""
    model = whole_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    inputs, targets = sentences()
    for drawn in draws:
        totals = [torch.zeros_like(value) for value in model.parameters()]
        for record in drawn.tolist():
            loss = functional.cross_entropy(model(inputs[record : record + 1]), targets[record].view(1))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = math.sqrt(sum(float(part.square().sum()) for part in gradients))
            for total, part in zip(totals, gradients, strict=True):
                total += part * min(1.0, CLIP / norm)
        for value, total in zip(model.parameters(), totals, strict=True):
            value.grad = total / (RECORDS * 0.25)
        optimizer.step()
    return weights_of(model)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in (*first, *second))


def close(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    # Adam divides by the gradient's own size: what noise is left shows where that is small
    return all(torch.allclose(first[name], second[name], atol=0.01) for name in (*first, *second))


def test_the_weights_are_those_of_one_process_with_the_same_draws() -> None:
    ranks = result(trains_without_noise)
    expected = without_noise(ranks[0]["draws"])
    assert close(ranks[0]["weights"], expected)
    assert equal(ranks[0]["weights"], ranks[1]["weights"])
    assert not close(weights_of(whole_model()), expected)


def test_no_rank_holds_the_whole_model_or_gradient_of_one_charged_run() -> None:
    ranks = result(trains_without_noise)
    size = sum(value.numel() for value in whole_model().parameters())
    block = sum(value.numel() for value in Block().parameters())
    root = size - 3 * block
    one = step_on(whole_model(), SILENT)
    trained(one, STEPS)
    for rank in ranks:
        assert rank["sharded"]
        assert rank["state"] == ["DTensor"] * len(rank["weights"])
        # whole: what is in no block, and one block at a time
        assert rank["largest"] == root + block < size - block
        assert rank["held"] == rank["update"] < 0.6 * size
        assert rank["charge"] == str(one.spent(1e-3))
    assert sum(rank["held"] for rank in ranks) == size
    assert ranks[0]["ledger"][0] == ranks[1]["ledger"][0] is not None
    assert [rank["ledger"][1] for rank in ranks] == [False, True]


def test_the_model_may_be_evaluated_between_steps() -> None:
    ranks = result(evaluates)
    for rank in ranks:
        assert close(rank["weights"], without_noise(rank["draws"]))
        assert rank["charge"] == result(trains_without_noise)[0]["charge"]


def test_activations_may_be_recomputed() -> None:
    draws = result(trains_without_noise)[0]["draws"]
    for weights in result(trains_with_recomputed_activations):
        assert close(weights, without_noise(draws))


def test_the_sums_of_other_layers_are_those_of_one_process() -> None:
    for apart in result(sums_of_other_layers):
        assert all(distance < 1e-5 for distance in apart.values()), apart


def test_the_audit_passes_and_catches_sabotages() -> None:
    for checks in result(audits):
        assert all(checks.values()), checks
    caught = {"norm_of_own_shard": False, "noise_of_one_stream": False}
    assert result(sabotaged) == [caught, caught]


def test_a_run_resumes_bit_for_bit() -> None:
    for rank in result(resumes):
        assert equal(rank["saved"], rank["loaded"])
        assert all(map(torch.equal, *rank["draws"]))
        assert equal(*rank["weights"])
        assert rank["steps"] == (4, 4)  # the repeated steps are not charged again


def test_another_number_of_ranks_has_the_same_weights_and_pays_for_new_noise() -> None:
    rank, other = result(resumes)
    assert rank["state"] == len(rank["saved"])
    assert other["state"] is None
    assert equal(rank["saved"], rank["alone"])
    assert (rank["alone_steps"], rank["alone_charges"]) == (2, 5)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("clipping", "clipping by Linf is not supported with sharded parameters"),
        ("units", "units= (owners of several records) is not supported with sharded parameters"),
        ("some", "is not sharded, but other parameters are"),
        ("one process", "is sharded by fully_shard, but the step runs in one process"),
        ("train", "hush.train with sharded parameters"),
        ("one record", "the data has one record, but the probe of sharded parameters"),
    ],
)
def test_what_is_not_provided_for_is_refused_on_every_rank(case: str, text: str) -> None:
    for rank in result(refuses):
        assert text in rank[case]


def _second_dies_in_a_pass(folder: Path) -> None:
    """Rank 1 is gone in the backward pass of step 2, while rank 0 waits for weights."""
    step = step_on(sharded_model(), ledger=folder / "ledger.jsonl")
    batches = step.batches(sentences(), steps=3)
    step(next(batches))
    if dist.get_rank():
        step.gradients.loss = lambda *_: os._exit(9)
    try:
        step(next(batches))
    except hush.errors.ProcessFailed as error:
        sharded = all(isinstance(value, DTensor) for value in step.model.parameters())
        torch.save((str(error), sharded), folder / "left.pt")
        os._exit(0)


def test_a_rank_that_dies_in_a_pass_leaves_the_other_stopped_and_nothing_charged() -> None:
    with tempfile.TemporaryDirectory() as folder:
        codes = spawned.start((_second_dies_in_a_pass,), 2, folder, timeout=30.0)
        shared = Path(folder, _second_dies_in_a_pass.__name__)
        text, sharded = torch.load(shared / "left.pt")
        with hush.Ledger(shared / "ledger.jsonl") as ledger:
            assert sum(ledger.counts.values()) == 1
    assert codes == [0, 9]
    assert "rank 0 of 2 cannot continue at gathering the weights" in text
    assert "Step 1 is on the ledger" in text
    assert sharded, "whole weights are freed where a pass ends in an error"
