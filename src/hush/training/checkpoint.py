"""Checkpoints: one safetensors file, tensors as tensors and everything else as JSON; no pickle.

A checkpoint holds the generator's state, from which past and future noise can be computed: it is as
secret as the records. The file to publish is the one `save_weights` writes.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError
from hush.core.value import with_article


def save(path: Path, state: dict[str, Any]) -> None:
    """Write nested plain data and tensors so that a crash leaves the old file or the new one."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_pack(state, "", tensors))
    metadata = {"state": plain, "sha256": _digest(plain, tensors)}
    replace_file(path, safetensors.torch.save(tensors, metadata), secret=True)


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote, on the CPU; a damaged file raises."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        plain = metadata["state"]
        intact = metadata["sha256"] == _digest(plain, tensors)
    except (OSError, SafetensorError, KeyError) as error:
        raise _damaged(path, str(error)) from error
    if not intact:
        raise _damaged(path, "its checksum does not match")
    state: dict[str, Any] = _unpack(json.loads(plain), tensors)
    return state


def save_weights(path: Path, model: nn.Module) -> None:
    """Write the model's weights alone: what the guarantee allows to be published."""
    weights = {name: _detached(value) for name, value in model.state_dict().items()}
    replace_file(path, safetensors.torch.save(weights))


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; tensors go to `tensors` under their place in the tree."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors[place] = _detached(value)
            return {"tensor": place}
        case Counter() | dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[k, _pack(v, f"{place}/{k}", tensors)] for k, v in value.items()]}
        case list() | tuple():
            items = [_pack(v, f"{place}/{i}", tensors) for i, v in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
    raise CheckpointError(
        f"{place} is {with_article(type(value).__name__)}, which is neither a tensor nor plain data: a "
        "checkpoint holds no code. Use an optimizer or scheduler whose state_dict holds numbers, "
        "strings, lists, dictionaries and tensors."
    )


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "list":
            return [_unpack(item, tensors) for item in content]
        case "tuple":
            return tuple(_unpack(item, tensors) for item in content)
        case _:
            pairs = {key: _unpack(item, tensors) for key, item in content}
            return Counter(pairs) if kind == "counter" else pairs


def _detached(tensor: Tensor) -> Tensor:
    """A copy of its own on the CPU: tied weights share memory, which the format refuses."""
    return tensor.detach().cpu().contiguous().clone()


def _digest(plain: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(plain.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(safetensors.torch.save({"": tensors[name]}))
    return digest.hexdigest()


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} cannot be used: {reason}. A run must go on from exactly the state its "
        "ledger was charged for. Restore the file, or start a new run in a new directory."
    )
