"""Matrix products with a weight, over any leading dimensions: linear layers, `@` and GPT-2's `addmm`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

from hush.gradients.factors import outer_product_term
from hush.gradients.precision import to_autocast_dtype
from hush.gradients.terms import Dense

if TYPE_CHECKING:
    from hush.gradients.interception import Recording, Weight


@dataclass(frozen=True, eq=False)
class Linear:
    """`x W^T + b` for a weight (out, in), or `x W + b` for one that is (in, out)."""

    records: int
    weight: "Weight"
    bias: "Weight | None"
    transposed: bool = False

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight = to_autocast_dtype(self.weight.value)
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        return functional.linear(x, weight.t() if self.transposed else weight, bias), (x,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        (x,) = saved
        grads, inputs = (part.view(self.records, -1, part.shape[-1]) for part in (grad, x))
        if self.weight.terms is not None:
            factors = (inputs, grads) if self.transposed else (grads, inputs)
            self.weight.terms.append(outer_product_term(*factors, self.weight.value.shape))
        if self.bias is not None and self.bias.terms is not None:
            self.bias.terms.append(Dense(grads.sum(1)))
        if not needed[0]:
            return (None,)
        weight = self.weight.value.to(x.dtype)
        return (grad @ (weight.t() if self.transposed else weight),)


def linear(
    recording: "Recording",
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Any:
    """The rule for `F.linear`; `transposed` where the weight is (in, out)."""
    weights = recording.as_weights(weight, bias)
    # A value derived from parameters alone stays one value that all records share.
    shared = x.requires_grad and not is_batchedtensor(x)
    if weights is None or weights[0] is None or weight.dim() != 2 or shared:
        return NotImplemented
    layer = Linear(recording.records, weights[0], weights[1], transposed)

    def work(x: Tensor) -> Tensor:
        rows = to_autocast_dtype(x).flatten(0, -2)
        output: Tensor = recording.capture(layer, rows).unflatten(0, x.shape[:-1])
        return output

    return recording.run_batched(work, x)


def matmul(recording: "Recording", x: Tensor, other: Tensor) -> Any:
    """The rule for `x @ other`."""
    return linear(recording, x, other, transposed=True)


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
    return linear(recording, mat1, mat2, bias, transposed=True)
