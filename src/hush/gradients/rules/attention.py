"""Multi-head attention, whose inner products have rules of their own."""

from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from hush.gradients.interception import Recording

_forward = functional.multi_head_attention_forward
_decomposed = FunctionType(
    _forward.__code__,
    {**_forward.__globals__, "has_torch_function": lambda _: False},
    argdefs=_forward.__defaults__,
)
"""The same function without its own `__torch_function__` dispatch: its inner calls are intercepted."""


def attention(recording: "Recording", *args: Any, **kwargs: Any) -> Any:
    """The rule for `F.multi_head_attention_forward`: the products in it have rules of their own."""
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
    **options: Any,
) -> Any:
    """The rule for `F.scaled_dot_product_attention`, which `vmap` would loop over the records."""
    if not query.dim() == key.dim() == value.dim() >= 3:
        return NotImplemented
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}

    def work(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.reshape(len(mask), *(1,) * (query.dim() - mask.dim()), *mask.shape[1:])
            mask = mask.expand(-1, query.shape[1], *mask.shape[2:]).flatten(0, 1)
        flat = [part.flatten(0, 1) for part in (query, key, value)]
        attended = functional.scaled_dot_product_attention(*flat, mask, **options)  # type: ignore[call-arg, arg-type]
        output: Tensor = attended.unflatten(0, query.shape[:2])
        return output

    return recording.run_batched(work, query, key, value, attn_mask)
