"""PyTorch's own multi-head attention, seen from inside."""

from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hush.gradients.capture import unmerged

if TYPE_CHECKING:
    from hush.gradients.interception import Recording

_whole = functional.multi_head_attention_forward
_inside = FunctionType(
    _whole.__code__,
    {**_whole.__globals__, "has_torch_function": lambda _: False},
    argdefs=_whole.__defaults__,
)
"""The function with the same body that does not ask whether somebody would rather do it as a whole."""


def attention(recording: "Recording", *args: Any, **kwargs: Any) -> Any:
    """The rule for `F.multi_head_attention_forward`: the products in it have rules of their own."""
    with recording:
        return _inside(*args, **kwargs)


def dot_product(
    recording: "Recording",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """The rule for `F.scaled_dot_product_attention`, which `vmap` would do record by record."""
    if not query.dim() == key.dim() == value.dim() >= 3:
        return NotImplemented
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    return recording.run_batched(partial(_dot_product, options), query, key, value, attn_mask)


def _dot_product(
    options: dict[str, Any],
    anchor: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    if mask is not None:
        mask = mask.reshape(len(mask), *(1,) * (query.dim() - mask.dim()), *mask.shape[1:])
        mask = mask.expand(-1, query.shape[1], *mask.shape[2:]).flatten(0, 1)
    flat = [part.flatten(0, 1) for part in (query, key, value)]
    output: Tensor = functional.scaled_dot_product_attention(*flat, mask, **options)  # type: ignore[call-arg, arg-type]
    return unmerged(output, query.shape[:2])
