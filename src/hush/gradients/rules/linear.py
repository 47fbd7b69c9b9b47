"""Matrix products with a weight: linear layers, `@` and GPT-2's `addmm`.

The per-sample gradient of the weight is stored as outer-product factors `sum_t left[t] (x) right[t]`, as
in ghost clipping. `left` contains output gradients, `right` contains activations, and t runs over the
positions of a record (tokens of a sequence). With T positions and a matrix (m, n), the factors have
T (m + n) instead of m n numbers per record. The weighted sum over records is a product of the factors
(book-keeping). Gram matrices over positions give the ghost norm. Norms of other orders materialise a few
records at a time. With one position, the norm of the outer product is the product of the norms.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

from hush.core.parts import CoordinateMask
from hush.gradients.precision import (
    blocked_product,
    capturing_cuda_graph,
    precise,
    precise_dtype,
    to_autocast_dtype,
    vector_norms,
)
from hush.gradients.products import (
    gradients_in_runs,
    gram_squares,
    product_error,
    record_gradients,
    weighted_products,
)
from hush.gradients.terms import (
    Dense,
    Term,
    by_unit,
    finite_norms,
    materialised_clamped_sum,
    materialised_norms,
    product_bound,
    scale_rows,
)

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight

MATERIALISE_RATIO = {"cpu": 2.0, "cuda": 0.5}
"""Maximum ratio of gradient entries to factor entries for which gradients are materialised.

Up to this ratio, materialising is also faster. It takes the arithmetic of the plain gradient, T m n, and
one pass each for norms and sum. Gram matrices take T^2 (m + n) additional operations, which are cheap on
tensor cores. docs/results/step.md has measurements.
"""


_unsafe_view = torch.ops.aten._unsafe_view.default


def outer_product_term(left: Tensor, right: Tensor, shape: torch.Size) -> Term:
    """Term `sum_t left[:, t] (x) right[:, t]`, factored or materialised depending on the cost.

    `shape` is the shape of the parameter, with rows * columns entries.
    """
    if not left.shape[1]:  # no positions
        return Dense(left.new_zeros(()).expand(len(left), *shape))
    _, positions, rows = left.shape
    most = MATERIALISE_RATIO[left.device.type] * positions * (rows + right.shape[2])
    if positions == 1 or rows * right.shape[2] > most:
        return OuterFactors(left, right, shape)
    return Dense(record_gradients(left, right).view(len(left), *shape))


@dataclass(frozen=True, eq=False)
class OuterFactors(Term):
    """Per-sample gradients of a matrix product's weight: `sum_t left[:, t] (x) right[:, t]`."""

    left: Tensor
    right: Tensor
    shape: torch.Size

    def dense(self) -> Tensor:
        return gradients_in_runs(self.left, self.right).view(self.records, *self.shape)

    def of_units(self, count: int, scale: Tensor) -> Term:
        left, right = scale_rows(self.left, scale), precise(self.right)
        return outer_product_term(by_unit(left, count), by_unit(right, count), self.shape)

    def norms(self, order: float) -> Tensor:
        dtype = precise_dtype(self.left)
        if self.left.shape[1] == 1:
            bound = product_bound(self.left, self.right)
            if order == 2:
                return finite_norms(bound, bound, dtype)
            # double precision, because the factors may differ by many orders of magnitude
            left, right = (vector_norms(part.double(), order) for part in (self.left, self.right))
            return finite_norms(left * right, bound, dtype)
        error = product_error(self.left)
        if order != 2:
            # norm and sum use separate products, so the error counts twice
            lengths = product_bound(self.left, self.right, order)
            norms = materialised_norms(self, order, self.left.device).double() + 2 * error * lengths
            return finite_norms(norms, product_bound(self.left, self.right), dtype)
        squares = gram_squares(self.left, self.right)
        return finite_norms(squares.norms(error), squares.lengths, dtype)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.left.shape[1] > 1:
            return weighted_products(self.left, self.right, weights).view(self.shape)
        left, right = precise(self.left).squeeze(1), precise(self.right).squeeze(1)
        return blocked_product(left * weights.to(left.dtype).unsqueeze(1), right).view(self.shape)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """Materialise only the records that may have an entry above the limit."""
        if mask is not None or capturing_cuda_graph():
            return materialised_clamped_sum(self, weights, limits, mask)
        # includes the rounding error of an entry
        largest = product_bound(self.left, self.right, torch.inf) * (1 + product_error(self.left))
        beyond = largest > limits
        if not bool(beyond.any()):
            return self.weighted_sum(weights)
        inside = self.weighted_sum(weights.where(~beyond, 0.0))
        return inside + materialised_clamped_sum(
            self.take(beyond), weights[beyond], limits[beyond], None
        )


@dataclass(frozen=True, eq=False)
class Linear:
    """Linear layer: `x W^T + b` with a weight (out, in), or `x W + b` with a weight (in, out)."""

    records: int
    weight: "Weight"
    bias: "Weight | None"
    transposed: bool = False

    def forward(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output of the layer; `operands` may contain a copy of x in the precision of the product."""
        operand = operands[0] if operands else x
        weight = to_autocast_dtype(self.weight.value)
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        lead = operand.shape[:-1]
        rows = operand.view(lead.numel(), operand.shape[-1])
        output = functional.linear(rows, weight.t() if self.transposed else weight, bias)
        # _unsafe_view, because the model could not modify a view in place
        return _unsafe_view(output, (*lead, output.shape[1])), (operand,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        (x,) = saved
        rows = grad.reshape(x.shape[:-1].numel(), grad.shape[-1])
        positions = len(rows) // self.records
        grads = rows.view(self.records, positions, rows.shape[1])
        inputs = x.view(self.records, positions, x.shape[-1])
        if self.weight.terms is not None:
            factors = (inputs, grads) if self.transposed else (grads, inputs)
            self.weight.terms.append(outer_product_term(*factors, self.weight.value.shape))
        if self.bias is not None and self.bias.terms is not None:
            self.bias.terms.append(Dense(grads.sum(1)))
        if not needed[0]:
            return None, None
        weight = self.weight.value.to(x.dtype)
        return rows.mm(weight.t() if self.transposed else weight).view(x.shape), None


def linear(
    recording: "Recording",
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Any:
    """Rule for `F.linear`; `transposed` means that the weight has shape (in, out)."""
    weights = recording.as_weights(weight, bias)
    # all records share a value that is computed from parameters alone
    shared = x.requires_grad and not is_batchedtensor(x)
    if weight.dim() != 2 or shared:
        return NotImplemented
    if weights is None or weights[0] is None:
        if not recording.of_records_and_constants(x, weight, bias):
            return NotImplemented
        matrix = weight.t() if transposed else weight
        return recording.run_batched(lambda x: functional.linear(x, matrix, bias), x)
    layer = Linear(recording.records, weights[0], weights[1], transposed)

    def work(x: Tensor) -> Any:
        operand = recording.operand(x)
        return recording.capture(layer, *(x,) if operand is x else (x, operand))

    return recording.run_batched(work, x)


def matmul(recording: "Recording", x: Tensor, other: Tensor) -> Any:
    """Rule for `x @ other`."""
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
    """Rule for `bias + mat1 @ mat2`, the linear layer of GPT-2."""
    if (beta, alpha) != (1, 1) or bias.shape != mat2.shape[1:]:
        return NotImplemented
    return linear(recording, mat1, mat2, bias, transposed=True)
