"""Save and load checkpoints of a private step.

A checkpoint is one safetensors file of tensors and JSON, without pickle. It must be kept as secret as
the records, because the generator's state determines past and future noise. `save_weights` writes a file
that may be published.
"""

import copy
import hashlib
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError, PrivacyWarning
from hush.core.value import check_kind, with_article
from hush.training.data import Data, count, data_digest, describe_record
from hush.training.fingerprint import fingerprint
from hush.training.options import Randomness
from hush.training.run_folder import RunFolder, differing_settings

if TYPE_CHECKING:
    from hush.training.per_instance import PerInstance
    from hush.training.step import PrivateStep

_FIRST = 8
"""Number of records that identify a data set."""
Scheduler = LRScheduler | ReduceLROnPlateau


def save(path: Path, state: dict[str, Any]) -> None:
    """Write nested plain data and tensors to a file, atomically."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_pack(state, "", tensors))
    metadata = {"state": plain, "sha256": _digest(plain, tensors)}
    replace_file(path, safetensors.torch.save(tensors, metadata), secret=True)


def load(path: Path) -> dict[str, Any]:
    """Load a state that `save` has written, on the CPU; raise if the file is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        plain = metadata["state"]
        if metadata["sha256"] != _digest(plain, tensors):
            raise OSError("its checksum does not match")
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {error}. Restore it, or delete it and resume with "
            "reseed=True (--reseed), which starts training again on the same ledger."
        ) from None
    state: dict[str, Any] = _unpack(json.loads(plain), tensors)
    return state


def save_weights(path: Path, model: nn.Module) -> None:
    """Write only the weights of the model, which may be published under the guarantee."""
    weights: dict[str, Tensor] = {}
    _pack(model.state_dict(), "", weights)
    replace_file(path, safetensors.torch.save({name[1:]: value for name, value in weights.items()}))


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Convert `value` to JSON; tensors are moved to `tensors` under their path in the tree."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            # the format does not support shared memory of tied weights
            tensors[place] = value.detach().cpu().contiguous().clone()
            return {"tensor": place}
        case Counter() | dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[k, _pack(v, f"{place}/{k}", tensors)] for k, v in value.items()]}
        case list() | tuple():
            items = [_pack(v, f"{place}/{i}", tensors) for i, v in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
    raise CheckpointError(
        f"{place} is {with_article(type(value).__name__)}, which is neither a tensor nor plain data. "
        "Use an optimizer and a scheduler with a state_dict of tensors and plain data."
    )


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](_unpack(item, tensors) for item in content)
    pairs = {key: _unpack(item, tensors) for key, item in content}
    return Counter(pairs) if kind == "counter" else pairs


def _digest(plain: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(plain.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(safetensors.torch.save({"": tensors[name]}))
    return digest.hexdigest()


def resume_run(
    folder: RunFolder | None,
    step: "PrivateStep",
    scheduler: Scheduler | None,
    data: Data,
    randomness: Randomness,
    per_instance: "PerInstance | None",
    *,
    reseed: bool,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Load the last checkpoint, if it exists; return the origin of the run and its metrics."""
    generator = randomness.generator

    def read() -> dict[str, Any]:
        assert folder is not None
        folder.check_ledger(step.ledger, reseed=reseed)
        if not folder.checkpoint.exists():
            return {"origin": origin_of(data, generator)}
        whole = load(folder.checkpoint)
        check_same_origin(whole["origin"], data, generator)
        return whole

    state: dict[str, Any] = step.reducer.broadcast("the checkpoint", read)
    if "step" not in state:
        return state["origin"], []
    step.load_state_dict(state["step"])
    if per_instance is not None and step.steps:
        per_instance.restore(state["per_instance"], step.steps)
    if scheduler is not None and state["scheduler"] is not None:
        scheduler.load_state_dict(state["scheduler"])
    metrics = step.reducer.broadcast(
        "the metrics", lambda: folder.metrics(up_to=step.steps) if folder else []
    )
    return state["origin"], metrics


def origin_of(data: Data, generator: torch.Generator | None) -> dict[str, Any]:
    """Shapes and types of a record, and digests of the first records and of the seed (secret)."""
    seed = None if generator is None else str(generator.initial_seed()).encode()
    return {
        "record": describe_record(data),
        "first": data_digest(data, min(_FIRST, count(data))),
        "seed": seed and hashlib.sha256(seed).hexdigest(),
    }


def check_same_origin(stored: dict[str, Any], data: Data, generator: torch.Generator | None) -> None:
    """Raise before any release if a checkpoint belongs to other data or another seed."""
    current = origin_of(data, generator)
    first, other = (stored["first"], current["first"]), ""
    if stored["record"] != current["record"]:
        kinds = f"{stored['record']}, and the data has records of {current['record']}"
        other = f"the checkpoint belongs to a run on records of {kinds}"
    elif None not in first and first[0] != first[1]:
        other = f"the first {_FIRST} records differ from the run's records (private, not shown)"
    if other:
        raise CheckpointError(
            f"{other}: each ledger is for one data set. Resume with the same data in the same order, or "
            "start a new run in a new directory."
        )
    if generator is not None and stored["seed"] != current["seed"]:
        began = "the operating system's randomness" if stored["seed"] is None else "another seed"
        raise CheckpointError(
            f"the run began with {began}, not with the seed {generator.initial_seed()}: a resumed run "
            "continues the random stream of its checkpoint. Leave the seed out, or start a new run in a "
            "new directory."
        )


def state_of(step: "PrivateStep") -> dict[str, Any]:
    """State of a step; a step that loads it continues exactly."""
    past = {} if step.past_noise is None else {"past_noise": step.past_noise.vectors.clone()}
    return {
        **run_facts(step),
        **past,
        "run": step.run,
        "charged_run": step.charged_run,
        "ledger": step.ledger.digest_at(step.charged_run, step.steps),
        "charges": sum(step.ledger.counts.values()),
        "randomness": step.secrecy,
        "steps": step.steps,
        "skipped": step.skipped,
        "accepted": step.accepted,
        "generator": step.generator.get_state(),
        "model": step.model.state_dict(),
        "frame": None if step.basis_schedule is None else step.basis_schedule.state_dict(),
        "clip_norm": step.gradients.clip_norm,
        "optimizer": step.optimizer.state_dict(),
        "replayed": step.gradients.replayed,
        "processes": step.reducer.size,
        "sharded": step.reducer.modules.sharded,
    }


def load_state(step: "PrivateStep", state: dict[str, Any]) -> None:
    """Load a checkpoint into the step; raise if it belongs to another run or charges are missing.

    If loading fails, the model and the optimizer are unchanged.
    """
    _check(step, state)
    before = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
    try:
        own = step.reducer.own_state(step, state)
        step.model.load_state_dict(own["model"])
        step.optimizer.load_state_dict(own["optimizer"])
        if step.basis_schedule is not None:
            step.basis_schedule.load_state_dict(state["frame"])
        if step.gradients.clip_norm is not None:
            step.gradients.clip_norm = state["clip_norm"].to(step.gradients.clip_norm, copy=True)
        step.generator.set_state(state["generator"])
        if step.past_noise is not None:
            step.past_noise.vectors = own["past_noise"].to(step.device, copy=True)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
        step.model.load_state_dict(before[0])
        step.optimizer.load_state_dict(before[1])
        text = f"the checkpoint does not fit the model, or is damaged: {error}. Use the run's model."
        raise CheckpointError(text) from None
    step.run, step.steps, step.gradients.skipped = state["run"], state["steps"], state["skipped"]
    step.charged_run, step.secrecy = state["charged_run"], state["randomness"]
    step.accepted, step.earlier = state["accepted"], 0
    step.gradients.replayed = state["replayed"]  # repeated steps must round identically
    # a torn line may contain a part of its release's label, so the noise must be equal: ledger.md, 4
    once = step.ledger.counts_repeating(step.plan, step.run, step.steps + 1)
    charged_since = step.ledger.last_step(step.run) > step.steps or once != step.ledger.counts
    ours, ranks = step.reducer.description, state["processes"]
    theirs = f"{ranks} process{'es' * (ranks > 1)}{' with sharded parameters' * state['sharded']}"
    if theirs != ours and charged_since:
        warnings.warn(
            f"{theirs} charged steps after the checkpoint, but {ours} would draw different noise: these "
            f"steps are charged again. Resume with {theirs} to repeat them without a new charge.",
            PrivacyWarning,
            stacklevel=3,
        )
        step.reseed()


def _check(step: "PrivateStep", state: dict[str, Any]) -> None:
    """Raise unless a state belongs to the same run and the ledger contains its charges."""
    if missing := state_of(step).keys() - check_kind("state", state, dict).keys():
        raise CheckpointError(
            f"the checkpoint lacks {', '.join(sorted(missing))}. Pass the result of state_dict()."
        )
    facts = [{name: of[name] for name in run_facts(step)} for of in (state, run_facts(step))]
    if facts[0] != facts[1]:
        for of in facts:  # do not show the digest of private user ids
            of.update(units=None, optimizer=of.pop("kind"))
            groups = enumerate(of.pop("settings"))
            of |= {f"{key} of group {n}": value for n, group in groups for key, value in group.items()}
        differing = differing_settings(facts[0], facts[1])
        raise CheckpointError(
            f"the checkpoint belongs to another run ({differing or 'owners, per_unit or gradient'}). "
            "Resume with the same plan, data, units, optimizer, views and source of randomness."
        )
    step.ledger.check_charged(state["charged_run"], state["steps"], state["ledger"])
    fresh = not step.ledger.last_step(state["run"])
    # a torn charge of the next step is repeated: ledger.md, 4
    counts = step.ledger.counts_repeating(step.plan, state["run"], state["steps"] + 1)
    if fresh and (charges := sum(counts.values()) - state["charges"]) > 0:
        raise CheckpointError(
            f"the state was saved before the first charge of its run, and this ledger has {charges} "
            "later charges. If it used the same noise twice, the difference of two releases would have "
            "no noise. Create a new step on this ledger."
        )


def run_facts(step: "PrivateStep") -> dict[str, Any]:
    """Settings that must not change when a run resumes."""
    views = step.gradients.views
    return {
        "plan": step.plan.digest,
        "records": step.records,
        "units": None if step.units is None else step.units.digest,
        "neighbours": str(step.adjacency.neighbours),
        "kind": type(step.optimizer).__name__,
        "settings": step.optimizer_settings,
        "views": None if views is None else getattr(views, "__qualname__", "of a kind"),
    }


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Non-tensor settings of each parameter group, such as the learning rate."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        {name: value for name, value in group.items() if isinstance(value, plain)}
        for group in optimizer.param_groups
    ]


def settings_digest(optimizer: torch.optim.Optimizer) -> str:
    """Hash of the current settings of all parameter groups, including tensors."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    tensors = [value.cpu() for value in values if isinstance(value, Tensor)]
    text = repr((settings_of(optimizer), fingerprint(tensors)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
