"""Reducer for parameters sharded by `fully_shard`: each rank has a shard of the sum, noise and update.

Clipped sums are reduce-scattered module by module, so no rank has the whole gradient or all weights
(docs/guarantees/distributed.md, Sharded parameters).
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hush.clipping.norms import L2
from hush.core.errors import DataError, Unsupported
from hush.core.parts import Always
from hush.gradients.sharding import ShardedModules
from hush.gradients.tape import GradientTape, MaskedTape
from hush.gradients.tree import local_shard
from hush.noise.gaussian import Gaussian
from hush.training.data import Batch, Data, count
from hush.training.distributed.process_group import ProcessGroup
from hush.training.distributed.processes import Processes
from hush.training.fingerprint import fingerprint
from hush.training.noisy_mean import NoisyMean, split_like
from hush.training.synthetic import check_some_number

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


class Sharded(ProcessGroup):
    """Reducer for sharded parameters; each rank has a shard of the sum and of the noise."""

    modules: ShardedModules

    def __init__(self, group: ProcessGroup, modules: ShardedModules) -> None:
        super().__init__(group.processes)
        self.modules = modules

    def check_whole(self, what: str) -> None:
        raise Unsupported(
            f"{what} with sharded parameters: a rank has only a part of the weights. Loop `for batch in "
            "step.batches(data): step(batch)` with hush.PrivateStep."
        )

    def free_whole_weights(self) -> None:
        self.modules.release()

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """State with whole tensors on the CPU of rank 0; an empty state on the other ranks."""

        def whole(tensors: dict[str, Any]) -> dict[str, Any]:
            shards: dict[str, Any] = {
                name: value for name, value in tensors.items() if isinstance(value, DTensor)
            }
            for name, value in shards.items():
                gathered = value.full_tensor()
                shards[name] = None if self.rank else gathered.cpu()
            return {**tensors, **shards}

        self.exchange("the checkpoint's shards")
        with self.processes.guarded("the checkpoint"):
            model, optimizer = whole(state["model"]), state["optimizer"]
            entries = {number: whole(entry) for number, entry in optimizer["state"].items()}
        if self.rank:
            return {}
        return {**state, "model": model, "optimizer": {**optimizer, "state": entries}}

    def own_state(self, step: "PrivateStep", state: dict[str, Any]) -> dict[str, Any]:
        parameters = [value for group in step.optimizer.param_groups for value in group["params"]]
        by_number = dict(enumerate(parameters))
        weights, entries = step.model.state_dict(), state["optimizer"]["state"]
        model = {name: _own_shard(value, weights.get(name)) for name, value in state["model"].items()}
        own = {
            number: {key: _own_shard(value, by_number.get(number)) for key, value in entry.items()}
            for number, entry in entries.items()
        }
        return {**state, "model": model, "optimizer": {**state["optimizer"], "state": own}}

    @contextmanager
    def probing(self, data: Data) -> Iterator[None]:
        """Context of the probe; every rank must run all forward passes, because they gather weights."""
        check_some_number(data)  # before the first collective
        if count(data) < 2:
            raise DataError(
                "the data has one record, but the probe of sharded parameters needs two. Pass more "
                "records, or leave fully_shard out."
            )
        with self.modules.gathering():
            yield

    def block_sizes(self, parameters: dict[str, nn.Parameter], sizes: list[int]) -> list[int]:
        return [sum(value.numel() for value in _local_values(parameters.values()))]

    def tape(self, tape: GradientTape | MaskedTape) -> "ShardedTape":
        return ShardedTape(tape, self)

    def sum_share(
        self, step: "PrivateStep", batch: Batch, compute: Callable[[Batch, int | None], Tensor]
    ) -> Tensor:
        """This rank's shards of the sum over the shares of all ranks (sensitive).

        All ranks run the same number of passes, because each pass gathers weights and reduces shards.
        """
        share, before = self.share(batch), step.skipped
        # agree before the first pass, because ranks in different steps would deadlock
        passes = max(self._agree_on_draw(step, batch, -(-len(share) // share.physical)))
        with self.processes.moving():
            total = compute(share, passes)
        step.gradients.skipped = before + sum(
            self.exchange("the records skipped", step.skipped - before)
        )
        return total

    def whole_sum(self, total: Tensor) -> Tensor:
        return total

    def noisy_mean(self, compute: Callable[[], Tensor], mean: NoisyMean) -> Tensor:
        with self.propagate_errors():
            return self.privatize(compute(), mean)

    def privatize(self, total: Tensor, mean: NoisyMean) -> Tensor:
        return replace(mean, basis=None)(total)

    def set_gradients(self, parameters: list[nn.Parameter], update: Tensor) -> None:
        parts = split_like(update, _local_values(parameters))
        for parameter, part in zip(parameters, parts, strict=True):
            assert isinstance(parameter, DTensor)
            parameter.grad = DTensor.from_local(
                part.to(parameter.dtype, copy=True),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    def release_name(self, update: Tensor) -> str:
        """Hash of the fingerprints of all shards of a release."""
        shards = self.exchange("the fingerprints of the shards", fingerprint([update]))
        return hashlib.sha256(" ".join(shards).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class ShardedTape:
    """Per-sample gradients of this rank's records; sums are over all ranks, and sharded."""

    tape: GradientTape | MaskedTape
    reducer: Sharded

    def norms(self, order: float) -> Tensor:
        """Per-sample gradient norms over all parameters."""
        return self.tape.norms(order)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """This rank's shards of the weighted sum over the records of all ranks, by parameter name."""
        own, modules = dict[str, Tensor](), self.reducer.modules
        names = [name for name, value in modules.parameters.items() if value.requires_grad]
        for module in modules.modules:
            gathered = [name for name in names if modules.module_of[name] == module]
            if gathered:
                sums = self.tape.select(gathered).weighted_sum(weights)
                own |= self._own_shards([sums.pop(name) for name in gathered], gathered)
        return {name: own[name] for name in names}

    def _own_shards(self, sums: list[Tensor], names: list[str]) -> dict[str, Tensor]:
        """This rank's shards of the sums over ranks, in one collective."""
        processes, modules = self.reducer.processes, self.reducer.modules
        # as in `Shard(0)`, all ranks have the same number of rows, except for the last ranks
        rows = [-(-len(total) // processes.size) for total in sums]
        sizes = [length * math.prod(total.shape[1:]) for length, total in zip(rows, sums, strict=True)]
        sent = sums[0].new_zeros(processes.size, sum(sizes))
        for part, length in zip(sent.split(sizes, dim=1), rows, strict=True):
            # pop() frees the memory of the whole sum
            for rank, piece in enumerate(sums.pop(0).split(length)):
                part[rank, : piece.numel()] = piece.reshape(-1)
        received = processes.sum_slices(sent.view(-1)).split(sizes)
        shards = _local_values(modules.parameters[name] for name in names)
        return {
            name: part[: shard.numel()].view_as(shard)
            for name, part, shard in zip(names, received, shards, strict=True)
        }


def _own_shard(value: Any, like: Any) -> Any:
    """This rank's shard of a value with the shape of a sharded parameter; other values are unchanged."""
    if not isinstance(like, DTensor) or getattr(value, "shape", None) != like.shape:
        return value
    whole = value.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _local_values(parameters: Any) -> list[Tensor]:
    """This rank's part of each parameter: its shard, or the whole parameter."""
    with torch.no_grad():
        return [local_shard(value) for value in parameters]


def sharded_modules(step: "PrivateStep", processes: Processes) -> ShardedModules:
    """Sharded modules of the step's model; raise for options that the proof does not cover."""
    model, plan = step.model, step.plan
    unproved = {
        f"clipping by {type(plan.clipping).__name__}": type(plan.clipping) is not L2,
        f"{type(plan.noise).__name__} noise": type(plan.noise) is not Gaussian,
        "sampling of coordinates": plan.sampling.coordinate_participation < 1,
        f"release by {type(plan.release).__name__}": type(plan.release) is not Always,
        "units= (owners of several records)": step.units is not None,
        "public= (public bases)": step.basis_schedule is not None,
        "replay=True": step.gradients.execution.replay is True,
        "an override of clip_physical_batch": step.overrides("clip_physical_batch"),
    }
    for part in (part for part, true in unproved.items() if true):
        raise Unsupported(
            f"{part} is not supported with sharded parameters: the proof covers only L2 clipping of "
            "single records and Gaussian noise on every update. Leave it out, or leave fully_shard out."
        )
    ranks = torch.distributed.get_process_group_ranks(processes.group)
    for name, value in model.named_parameters():
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            if mesh.ndim == 1 and mesh.mesh.tolist() == ranks and value.placements == (Shard(0),):
                continue
            how = f"is placed as {value.placements} on {tuple(mesh.shape)} ranks"
        elif value.requires_grad:
            how = "is not sharded, but other parameters are"
        else:
            continue
        raise Unsupported(
            f"{name} {how}: each rank adds noise to its shard, so every entry must be in exactly one "
            f"shard of the {processes.size} ranks. Apply fully_shard to the model itself, "
            "over these ranks, without shard_placement_fn, ignored_params or a second mesh dimension."
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            _check_options(name, module._get_fsdp_state())
    return ShardedModules(model, processes.guarded)


def _check_options(name: str, state: Any) -> None:
    """Raise for options of `fully_shard` that change the weights used in the forward pass."""
    policy = state._mp_policy
    # older versions of torch have one parameter group
    single = getattr(state, "_fsdp_param_group", None)
    groups = getattr(state, "_fsdp_param_groups", [single] * (single is not None))
    unproved = {
        "mp_policy": policy.param_dtype or policy.reduce_dtype or policy.output_dtype,
        "offload_policy": any(part.offload_to_cpu for group in groups for part in group.fsdp_params),
        "several modules in one call": len(state._modules) > 1,
    }
    for option in (option for option, true in unproved.items() if true):
        raise Unsupported(
            f"fully_shard of {name or 'the model'!r} with {option}: per-sample gradients would be "
            "computed with different weights. Leave it out."
        )
