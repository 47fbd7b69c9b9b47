"""Matrix products with a weight: linear layers, `@` and GPT-2's `addmm`.

The per-sample gradient of the weight is stored as outer-product factors `sum_t left[t] (x) right[t]`, as
in ghost clipping: `left` are output gradients, `right` are activations, and t runs over the positions of
a record (tokens of a sequence). With T positions and a matrix (m, n), the factors have T (m + n) instead
of m n numbers per record. The weighted sum over records is a product of the factors (book-keeping), and
the ghost norm comes from Gram matrices over positions. Norms of other orders materialise a few records
at a time. With one position, the norm of the outer product is the product of the norms.
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
"""Gradients are materialised if they have at most this many times the entries of the factors.

Materialising is then also faster: it costs the arithmetic of the plain gradient, T m n, and one pass
each for norms and sum. Gram matrices cost T^2 (m + n) in addition, which is little on tensor cores.
Measured in docs/results/step.md.
"""


_unsafe_view = torch.ops.aten._unsafe_view.default


def outer_product_term(left: Tensor, right: Tensor, shape: torch.Size) -> Term:
    """The term `sum_t left[:, t] (x) right[:, t]`, factored or materialised depending on cost.

    `shape` is the shape of the parameter, with rows x columns entries.
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
    """`sum_t left[:, t] (x) right[:, t]`: per-sample gradients of a matrix product's weight."""

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
            # in double precision, because the factors may have very different sizes
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
        """Materialises only records that may have an entry above the limit."""
        if mask is not None or capturing_cuda_graph():
            return materialised_clamped_sum(self, weights, limits, mask)
        # including the rounding error of an entry
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
    """`x W^T + b` for a weight (out, in), or `x W + b` for a weight (in, out)."""

    records: int
    weight: "Weight"
    bias: "Weight | None"
    transposed: bool = False

    def forward(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output from the input, or from its copy in the product's precision."""
        operand = operands[0] if operands else x
        weight = to_autocast_dtype(self.weight.value)
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        lead = operand.shape[:-1]
        rows = operand.view(lead.numel(), operand.shape[-1])
        output = functional.linear(rows, weight.t() if self.transposed else weight, bias)
        # a view could not be modified in place
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
    """The rule for `F.linear`; `transposed` if the weight is (in, out)."""
    weights = recording.as_weights(weight, bias)
    # a value computed from parameters alone is shared by all records
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
