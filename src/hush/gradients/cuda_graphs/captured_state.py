"""What a captured graph takes as given: it is of no use once any of this has changed."""

from typing import Any

import torch
from torch import Tensor, nn

from hush.gradients.cuda_graphs.cuda_graph import replaced_generators
from hush.gradients.tree import submodules


def signature(value: Any) -> Any:
    """Structure, shapes and dtypes of a tree of tensors, without the number of records."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), *map(signature, value)
    if isinstance(value, dict):
        return tuple((key, signature(part)) for key, part in value.items())
    return repr(value)


_PLAIN = frozenset((bool, int, float, str))


def given(model: nn.Module, loss: Any) -> tuple[Any, ...]:
    """What a captured graph takes as given."""
    criterion = getattr(loss, "loss", loss)
    modules = submodules(model) + (submodules(criterion) if isinstance(criterion, nn.Module) else [])
    own = [table for m in modules for table in (m._parameters, m._buffers) if table]
    values = [value for table in own for value in table.values() if value is not None]
    backends = torch.backends
    return (
        [(id(module), id(module.__dict__.get("forward"))) for module in modules],
        [value for module in modules for value in module.__dict__.values() if type(value) in _PLAIN],
        [(value.data_ptr(), value.requires_grad) for value in values],
        replaced_generators(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )
