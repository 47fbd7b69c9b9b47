"""Per-example gradients by ordinary autograd, one record at a time: what the tape is held against."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hush.gradients.tape import GradientTape, UnitTape
from hush.gradients.tree import call_model, tree_map

ORDERS = (1.0, 1.5, 2.0, 3.0, torch.inf)


def one_at_a_time(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, records: int
) -> Tensor:
    """(records, parameters): the gradient of each record's loss in a batch of that record alone.

    Computed in double precision, then rounded to the model's own: kernels for a batch of one are up to
    2% off in single precision, depending on the processor's instruction set.
    """
    own = next(p.dtype for p in model.parameters() if p.requires_grad)
    exact = model if own == torch.float64 else copy.deepcopy(model).double()
    parameters = [p for p in exact.parameters() if p.requires_grad]
    rows = [torch.zeros(0, sum(p.numel() for p in parameters), dtype=torch.float64)]
    for i in range(records):

        def row(values: Tensor, i: int = i) -> Tensor:
            record = values[i : i + 1]
            return record.double() if record.is_floating_point() else record

        value = loss(call_model(exact, tree_map(inputs, row)), tree_map(targets, row)).sum()
        parts = torch.autograd.grad(value, parameters)
        rows.append(torch.cat([part.to_dense().reshape(-1) for part in parts])[None])
    return torch.cat(rows).to(own)


def check_tape(tape: GradientTape | UnitTape, expected: Tensor, tolerance: float) -> None:
    """Norms of every order, weighted sums and chunks all agree with the written-out gradients."""
    records = len(expected)
    assert tape.records == records
    scale = max(1e-30, float(expected.abs().max())) if records else 1.0
    for order in ORDERS:
        norms = torch.linalg.vector_norm(expected.double(), ord=order, dim=1).to(expected.dtype)
        # a norm of zero counts what may have underflowed
        torch.testing.assert_close(tape.norms(order).to(norms), norms, rtol=tolerance, atol=1e-140)
    weights = torch.rand(records, dtype=expected.dtype)
    total = flat(tape.weighted_sum(weights), 0)
    assert total.dtype == torch.float64
    exact = weights.double() @ expected.double()
    torch.testing.assert_close(total, exact, rtol=tolerance, atol=tolerance * scale)
    with torch.no_grad():
        nothing = flat(tape.zeros(), 0)
    torch.testing.assert_close(nothing, torch.zeros_like(total), rtol=0, atol=0)
    whole = torch.full_like(expected, torch.nan)
    for rows, written in tape.chunks(entries=3 * expected.shape[1]):
        whole[rows] = flat(written, 1).to(whole)
    torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance * scale)


def flat(parts: dict[str, Tensor], start: int) -> Tensor:
    """All parameters, one after the other."""
    return torch.cat([part.unsqueeze(-1).flatten(start) for part in parts.values()], dim=start)
