"""Norms and sums of many terms at once: on a GPU, a call for each of them takes longer than its work."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hush.gradients.precision import precise_dtype, vector_norms
from hush.gradients.products import gram_squares, norms_of, product_error
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import Dense, Term, finite_norms

_SMALL = 2**14
"""Entries a record up to which materialised gradients of several parameters are laid side by side."""


def joint_norms(terms: Sequence[Term]) -> Tensor:
    """The per-sample Euclidean gradient norms over all terms: (records,)."""
    small = [term for term in terms if _is_small(term)]
    factored = [term for term in terms if isinstance(term, OuterFactors) and _is_joint(term)]
    together = {id(term) for term in (*small, *factored)}
    parts = [term.norms(2.0)[None] for term in terms if id(term) not in together]
    if small:
        parts.append(_side_by_side(small).norms(2.0)[None])
    if factored:
        squares = [gram_squares(term.left, term.right) for term in factored]
        norms = norms_of(squares, [product_error(term.left) for term in factored])
        lengths = torch.stack([part.lengths for part in squares])
        parts.append(finite_norms(norms, lengths, torch.float32))
    return vector_norms(torch.cat(parts).T, 2.0)


def joint_sums(
    terms: Mapping[str, Term], mask: Callable[[Term], Term], weights: Tensor
) -> dict[str, Tensor]:
    """The weighted sums of the terms that are laid side by side, by name.

    Args:
        terms: of all parameters.
        mask: puts zeros where records have weight 0.
        weights: (records,).
    """
    small = {name: term for name, term in terms.items() if _is_small(term)}
    if not small:
        return {}
    total = mask(_side_by_side(list(small.values()))).weighted_sum(weights)
    parts = total.split([term.shape.numel() for term in small.values()])
    return {name: part.view(term.shape) for (name, term), part in zip(small.items(), parts, strict=True)}


def _is_joint(term: OuterFactors) -> bool:
    """Whether a term has positions, added up in single precision: where they overflow is one number."""
    return term.left.shape[1] > 1 and precise_dtype(term.left) == torch.float32


def _is_small(term: Term) -> bool:
    return isinstance(term, Dense) and term.shape.numel() <= _SMALL


def _side_by_side(terms: Sequence[Term]) -> Dense:
    return Dense(torch.cat([term.dense().reshape(term.records, -1) for term in terms], 1))
