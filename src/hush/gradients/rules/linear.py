"""Matrix products with a weight, over any leading dimensions."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

from hush.gradients.capture import Weight, capture, to_autocast_dtype, unmerged
from hush.gradients.factors import product
from hush.gradients.terms import Dense

if TYPE_CHECKING:
    from hush.gradients.interception import Recording


@dataclass(frozen=True, eq=False)
class Product:
    """`x W^T + b` for a weight (out, in), or `x W + b` for one that is (in, out)."""

    records: int
    weight: Weight
    bias: Weight | None
    transposed: bool = False

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        return functional.linear(x, self._turned(to_autocast_dtype(self.weight.value)), bias), (x,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        (x,) = saved
        grads, inputs = (part.view(self.records, -1, part.shape[-1]) for part in (grad, x))
        if self.weight.terms is not None:
            pair = (inputs, grads) if self.transposed else (grads, inputs)
            self.weight.terms.append(product(*pair, self.weight.value.shape))
        if self.bias is not None and self.bias.terms is not None:
            self.bias.terms.append(Dense(grads.sum(1)))
        return (grad @ self._turned(self.weight.value.to(x.dtype)) if needed[0] else None,)

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.t() if self.transposed else weight


def _at_once(weight: Weight, bias: Weight | None, transposed: bool, anchor: Tensor, x: Tensor) -> Tensor:
    layer = Product(len(x), weight, bias, transposed)
    flat = capture(layer, anchor, to_autocast_dtype(x).flatten(0, -2))
    return unmerged(flat, x.shape[:-1])


def linear(recording: "Recording", x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The rule for `F.linear`."""
    return _product(recording, x, weight, bias, transposed=False)


def matmul(recording: "Recording", x: Tensor, other: Tensor) -> Any:
    """The rule for `x @ other`."""
    return _product(recording, x, other, None, transposed=True)


def addmm(
    recording: "Recording",
    bias: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """The rule for `bias + mat1 @ mat2`, the linear layer of GPT-2."""
    if (beta, alpha) != (1, 1) or bias.shape != mat2.shape[1:]:
        return NotImplemented
    return _product(recording, mat1, mat2, bias, transposed=True)


def _product(
    recording: "Recording", x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool
) -> Any:
    weights = recording.weights(weight, bias)
    # What is worked out from parameters alone stays one value that all records share.
    shared = x.requires_grad and not is_batchedtensor(x)
    if weights is None or weights[0] is None or weight.dim() != 2 or shared:
        return NotImplemented
    return recording.run_batched(partial(_at_once, weights[0], weights[1], transposed), x)
