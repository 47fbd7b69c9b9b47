"""Attention rule: runs all records in one batch of a fused, deterministic kernel.

`vmap` would loop over the records. Fused kernels (flash and memory-efficient attention) need four
dimensions: (batch, heads, positions, size). They compute each element of the batch independently, in
the forward and in the backward pass. On a GPU, the order of additions in the backward kernels varies
between calls unless torch's deterministic algorithms are enabled. This file enables them for these
kernels only (docs/guarantees/tape.md, assumption K).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from hush.gradients.recording import Recording

_FUSED = "ScaledDotProduct"
"""Prefix of the autograd node names of fused attention kernels."""

_forward = functional.multi_head_attention_forward
_decomposed = FunctionType(
    _forward.__code__,
    {**_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=_forward.__defaults__,
)
"""`F.multi_head_attention_forward` without `__torch_function__` dispatch. Its inner calls are then
intercepted."""


def multi_head(recording: "Recording", *args: Any, **kwargs: Any) -> Any:
    """Rule for `F.multi_head_attention_forward`; applies the rules of its matrix products."""
    with recording:
        return _decomposed(*args, **kwargs)


def dot_product(
    recording: "Recording",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Rule for `F.scaled_dot_product_attention`."""
    if not query.dim() == key.dim() == value.dim() >= 2:
        return NotImplemented
    dims = max(query.dim(), 3) + 1

    def work(*operands: Tensor) -> Tensor:
        # insert dimensions after the records, for broadcasting within a record
        aligned = [
            part.reshape(len(part), *(1,) * (dims - part.dim()), *part.shape[1:]) for part in operands
        ]
        leads = [part.shape[:-3] for part in aligned[:3]]
        batch = leads[0] if leads[0] == leads[1] == leads[2] else torch.broadcast_shapes(*leads)
        heads = max(part.shape[-3] for part in aligned[:3])
        flat: list[Tensor] = []
        for part in aligned:
            # masks and grouped keys keep their number of heads
            own = part.shape[-3] if enable_gqa or len(flat) == 3 else heads
            shape = (*batch, own, *part.shape[-2:])
            flat.append((part if part.shape == shape else part.expand(shape)).flatten(0, -4))
        mask = flat[3] if len(flat) > 3 else None
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass is not deterministic
        try:
            attended = functional.scaled_dot_product_attention(
                flat[0], flat[1], flat[2], mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        finally:
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
        _make_backward_deterministic(attended, flat)
        output: Tensor = attended.unflatten(0, batch)
        return output.squeeze(-3) if query.dim() == 2 else output

    # fused kernels do not support expanded masks
    masks = () if attn_mask is None else (attn_mask.contiguous(),)
    return recording.run_batched(work, query, key, value, *masks)


def _make_backward_deterministic(output: Tensor, inputs: list[Tensor]) -> None:
    """Use deterministic algorithms in the fused kernels' backward passes between inputs and output."""
    before: list[tuple[bool, bool, bool]] = []

    def begin(_: object) -> None:
        before.append(_determinism())
        # torch.use_deterministic_algorithms would import a compiler
        _set_determinism(True, False, False)

    visited = {part.grad_fn for part in inputs}
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [previous for previous, _ in node.next_functions]
        if node.name().startswith(_FUSED):
            node.register_prehook(begin)
            node.register_hook(lambda *_: _set_determinism(*before.pop()))


@contextmanager
def determinism_restored() -> Iterator[None]:
    """Context that restores torch's determinism settings, even if a kernel fails."""
    before = _determinism()
    try:
        yield
    finally:
        _set_determinism(*before)


def _determinism() -> tuple[bool, bool, bool]:
    """Torch's determinism settings: enabled, warn only, and fill uninitialised memory."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
    )


def _set_determinism(enabled: bool, warn_only: bool, fill_memory: bool) -> None:
    torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
    torch._C._set_deterministic_fill_uninitialized_memory(fill_memory)
