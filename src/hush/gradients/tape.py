"""Gradient tape: the per-sample gradients of a batch as factored terms.

`norms` computes the per-sample (ghost) norms, and `weighted_sum` computes the clipped sum from clipping
weights. Only `chunks`, and terms for which it is cheaper, materialise per-sample gradients. Opacus's
ghost clipping and fastDP's book-keeping implement the same computation with hooks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from hush.core.parts import CoordinateMask
from hush.gradients.entrywise_clipping import EntrywiseClipping
from hush.gradients.precision import (
    NORM_RUN,
    capturing_cuda_graph,
    double_norms,
    full_precision,
    precise_dtype,
    vector_norms,
)
from hush.gradients.products import gram_squares, norms_of, product_error
from hush.gradients.rules.embedding import merge_terms
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import CHUNK_ENTRIES, Dense, Term, finite_norms, zero_rows

_REGULAR = 2.0**50
"""Norms below this have finite squares and products in single precision."""


@dataclass(frozen=True, eq=False)
class GradientTape(EntrywiseClipping):
    """Per-sample gradients of one batch, as terms by parameter name."""

    terms: dict[str, Term]
    device: torch.device
    unused_parameters: tuple[str, ...] = ()
    """Parameters on which the losses do not depend."""
    present: None = None

    @property
    def records(self) -> int:
        return next(iter(self.terms.values())).records

    def rounding_bounded(self, records: int) -> bool:
        """Whether the rounding error of a sum over `records` is at most `ROUNDING` clipping norms."""
        return all(term.rounding_bounded(records) for term in self.terms.values())

    def norms(self, order: float) -> Tensor:
        """Per-sample gradient norms over all parameters.

        Args:
            order: Order of the l_p norm. For order 2, factored gradients use ghost norms.

        Returns:
            Norms of shape (records,); not finite if the gradient is not finite.
        """
        if order == 2 and (norms := self._regular_norms()) is not None:
            return norms
        if order == 2 and self.device.type == "cuda":
            with full_precision(self.device):
                return joint_norms(list(self.terms.values()))
        return vector_norms(torch.stack(list(self.norms_by_parameter(order).values()), dim=1), order)

    def _regular_norms(self) -> Tensor | None:
        """Euclidean norms with one overflow check for all terms, or None if a number is near overflow.

        The result is bitwise equal to the joint norm of `norms_by_parameter`.
        """
        if capturing_cuda_graph() or not all(map(_is_regular, self.terms.values())):
            return None
        lengths: list[Tensor] = []
        norms: list[Tensor] = []
        for term in self.terms.values():
            if isinstance(term, OuterFactors):
                left, right = double_norms(term.left, 2.0), double_norms(term.right, 2.0)
                lengths += left, right
                norms.append((left * right).float())
            else:
                assert isinstance(term, Dense)
                rows = term.gradients.reshape(len(term.gradients), term.gradients.shape[1:].numel())
                norms.append(torch.linalg.vector_norm(rows, dim=1, keepdim=True))
        joint: Tensor = torch.linalg.vector_norm(torch.cat(norms, 1), dim=1)
        largest = torch.cat([joint.double()[:, None], *lengths], 1)
        return joint if largest.numel() and float(largest.max()) < _REGULAR else None

    def norms_by_parameter(self, order: float) -> dict[str, Tensor]:
        """Per-sample gradient norms of each parameter: name -> (records,)."""
        with full_precision(self.device):
            return {name: term.norms(order) for name, term in self.terms.items()}

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Weighted sum of the per-sample gradients, by parameter name.

        A record of weight 0 adds exactly zero, even if its gradient is not finite.

        Args:
            weights: Weights of shape (records,), e.g. min(1, clipping norm / gradient norm).

        Returns:
            Sums in double precision.
        """
        keep = positive(weights)
        sums: dict[str, Tensor] = {}
        with full_precision(self.device):
            joint = joint_sums(self.terms, keep, weights) if self.device.type == "cuda" else {}
            for name, term in self.terms.items():
                if name in joint:
                    sums[name] = joint[name]
                else:
                    finite = term if keep is None else term.mask_records(keep)
                    sums[name] = finite.weighted_sum(weights)
        return sums

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` after clamping each entry to +-limit and masking coordinates.

        Args:
            weights: (records,).
            limits: (records,). Largest absolute entry of each record before weighting.
            mask: Function that zeroes random coordinates, for plans that sample coordinates.

        Returns:
            Sums in double precision.
        """
        keep = positive(weights)
        sums: dict[str, Tensor] = {}
        with full_precision(self.device):
            for name, term in self.terms.items():
                finite = term if keep is None else term.mask_records(keep)
                sums[name] = finite.clamped_weighted_sum(weights, limits, mask)
        return sums

    def zeros(self) -> dict[str, Tensor]:
        """Zero gradients, the sum over an empty batch."""
        empty = torch.empty(0, device=self.device)
        return {name: term.take(slice(0, 0)).weighted_sum(empty) for name, term in self.terms.items()}

    def tensors(self) -> Iterator[Tensor]:
        """Tensors of the tape."""
        for term in self.terms.values():
            yield from term.tensors()

    def select(self, names: list[str]) -> "GradientTape":
        """Tape of a subset of the parameters."""
        return replace(self, terms={name: self.terms[name] for name in names})

    def take(self, rows: Tensor | slice) -> "GradientTape":
        """Tape of a subset of the records."""
        return replace(self, terms={name: term.take(rows) for name, term in self.terms.items()})

    def mask_records(self, keep: Tensor) -> "GradientTape":
        """Tape with zero gradients for the records that `keep` excludes; positions are unchanged."""
        return replace(self, terms={name: term.mask_records(keep) for name, term in self.terms.items()})

    def of_units(self, count: int, scale: Tensor) -> "GradientTape":
        """Tape of users with `count` consecutive records each; see `Term.of_units`."""
        terms = {name: term.of_units(count, scale) for name, term in self.terms.items()}
        return replace(self, terms=terms)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """Materialised per-sample gradients, a few records at a time.

        Args:
            entries: Maximum number of entries per chunk; a chunk has at least one record.

        Yields:
            Rows of the chunk, and gradients by name: (rows, *shape). They may share the memory of the
            tape, so callers must not modify them.
        """
        size = sum(math.prod(term.shape) for term in self.terms.values())
        step = max(1, (entries or CHUNK_ENTRIES[self.device.type]) // size)
        for start in range(0, self.records, step):
            rows = slice(start, start + step)
            with full_precision(self.device):
                gradients = {name: term.take(rows).dense() for name, term in self.terms.items()}
            yield rows, gradients


def tape_of_uses(
    uses: dict[str, list[Term]],
    trainable: dict[str, nn.Parameter],
    records: int,
    device: torch.device,
) -> GradientTape:
    """Tape from the terms of all uses of each parameter, with zero gradients for unused parameters."""
    terms: dict[str, Term] = {}
    unused = []
    for name, parts in uses.items():
        if not parts:
            zero = torch.zeros((), dtype=trainable[name].dtype, device=device)
            parts.append(Dense(zero.expand(records, *trainable[name].shape)))
            unused.append(name)
        terms[name] = parts[0] if len(parts) == 1 else merge_terms(parts)
    return GradientTape(terms, device, tuple(unused))


def add_sums(sums: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add sums by parameter name."""
    first, *rest = sums
    return {name: sum((total[name] for total in rest), start=first[name]) for name in first}


@dataclass(frozen=True, eq=False)
class MaskedTape(EntrywiseClipping):
    """Tape with possibly empty slots; an empty slot adds exactly zero to every sum."""

    tape: GradientTape
    present: Tensor
    """Mask of non-empty slots."""

    @property
    def records(self) -> int:
        return self.tape.records

    @property
    def device(self) -> torch.device:
        return self.tape.device

    def select(self, names: list[str]) -> "MaskedTape":
        """Tape of a subset of the parameters."""
        return MaskedTape(self.tape.select(names), self.present)

    def norms(self, order: float) -> Tensor:
        """Per-sample gradient norms; 0 for an empty slot."""
        norms = self.tape.norms(order)
        return norms.where(self.present, torch.zeros_like(norms))

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Weighted sum of the per-sample gradients, by parameter name."""
        return self.tape.weighted_sum(weights * self.present.to(weights.dtype))

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` after clamping each entry to +-limit and masking coordinates."""
        return self.tape.clamped_weighted_sum(weights * self.present.to(weights.dtype), limits, mask)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """Materialised per-sample gradients, a few records at a time; zero for an empty slot."""
        for rows, gradients in self.tape.chunks(entries):
            present = self.present[rows]
            yield rows, {name: zero_rows(value, present) for name, value in gradients.items()}

    def zeros(self) -> dict[str, Tensor]:
        """Zeros: the sum over an empty batch."""
        return self.tape.zeros()


def _is_regular(term: Term) -> bool:
    """Whether the term has one position, or short rows of gradients, in single precision."""
    if isinstance(term, OuterFactors):
        left, right = term.left, term.right
        return left.shape[1] == 1 and left.dtype == right.dtype == torch.float32
    if not isinstance(term, Dense) or term.gradients.dtype != torch.float32:
        return False
    return 0 < term.gradients.shape[1:].numel() < NORM_RUN


_SMALL = 2**14
"""Maximum number of entries of a parameter whose gradients are concatenated with others."""


def joint_norms(terms: Sequence[Term]) -> Tensor:
    """Per-sample Euclidean gradient norms over all terms: (records,)."""
    small = [term for term in terms if _is_small(term)]
    # for terms accumulated in single precision, one bound detects overflow
    factored = [
        term
        for term in terms
        if isinstance(term, OuterFactors)
        and term.left.shape[1] > 1
        and precise_dtype(term.left) == torch.float32
    ]
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


def positive(weights: Tensor) -> Tensor | None:
    """Mask of the records with a positive weight, or None if all weights are positive.

    A gradient of weight 0 may not be finite, so it is masked before the sum. Masked records keep their
    positions, because rounding depends on positions and shapes. The function returns None during the
    capture of a CUDA graph, because replays with gradients that are not finite are discarded.
    """
    if weights.is_cpu and weights.numel() and float(weights.min()) > 0:
        return None
    keep = weights != 0
    return None if capturing_cuda_graph() or bool(keep.all()) else keep


def joint_sums(terms: Mapping[str, Term], keep: Tensor | None, weights: Tensor) -> dict[str, Tensor]:
    """Weighted sums of the small materialised terms by name, computed on their concatenation.

    Args:
        terms: Terms of all parameters.
        keep: Mask of the records with a positive weight; None: all records.
        weights: (records,).
    """
    small = {name: term for name, term in terms.items() if _is_small(term)}
    if not small:
        return {}
    joint = _side_by_side(list(small.values()))
    total = (joint if keep is None else joint.mask_records(keep)).weighted_sum(weights)
    parts = total.split([term.shape.numel() for term in small.values()])
    return {name: part.view(term.shape) for (name, term), part in zip(small.items(), parts, strict=True)}


def _is_small(term: Term) -> bool:
    return isinstance(term, Dense) and term.shape.numel() <= _SMALL


def _side_by_side(terms: Sequence[Term]) -> Dense:
    return Dense(torch.cat([term.dense().reshape(term.records, -1) for term in terms], 1))


Reduction = Literal["mean", "sum"]
"""Aggregation of the gradients of a user's records."""


@dataclass(frozen=True, eq=False)
class UnitTape(EntrywiseClipping):
    """Gradients of users; users with the same number of records share a tape."""

    parts: list[GradientTape]
    present: Tensor | None = None
    """Mask of users with at least one record; None if no slot is empty."""

    @property
    def records(self) -> int:
        """Number of users."""
        return sum(part.records for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def norms(self, order: float) -> Tensor:
        """Norm of each user's gradient over all parameters."""
        return torch.cat([part.norms(order) for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Weighted sum of the users' gradients, by parameter name."""
        own = weights.split([part.records for part in self.parts])
        pairs = zip(self.parts, own, strict=True)
        return add_sums([part.weighted_sum(weight) for part, weight in pairs])

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` after clamping each entry to +-limit and masking coordinates."""
        sizes = [part.records for part in self.parts]
        rows = zip(self.parts, weights.split(sizes), limits.split(sizes), strict=True)
        return add_sums([part.clamped_weighted_sum(weight, limit, mask) for part, weight, limit in rows])

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """Materialised gradients, a few users at a time."""
        start = 0
        for part in self.parts:
            places = torch.arange(start, start + part.records, device=self.device)
            for rows, gradients in part.chunks(entries):
                yield places[rows], gradients
            start += part.records

    def zeros(self) -> dict[str, Tensor]:
        """Zeros: the sum over an empty batch."""
        return self.parts[0].zeros()

    def rounding_bounded(self, records: int) -> bool:
        """Whether the rounding error of a sum over users with `records` records is within its bound."""
        return all(part.rounding_bounded(records) for part in self.parts)


def unit_tape(
    tape: GradientTape, counts: Tensor, reduction: Reduction, present: Tensor | None
) -> UnitTape:
    """Tape of the users in a batch.

    **Guarantee.** The gradient of a user depends only on the user's records, their positions and the
    shapes (docs/guarantees/units.md). It is not finite if the gradient of any of these records is not
    finite.

    Args:
        tape: Per-sample gradients, with the records of each user consecutive, and users in the order of
            `counts`.
        counts: Number of records of each user, in ascending order, of shape (users,).
        reduction: Mean or sum of the gradients of a user's records.
        present: Mask of non-empty slots; sums and means exclude empty slots.
    """
    occupied = torch.ones(tape.records, dtype=torch.bool, device=tape.device)
    if present is not None:
        occupied = present
        tape = tape.mask_records(present)
    parts, there, start = [], [], 0
    values, units = counts.unique_consecutive(return_counts=True)
    for count, number in zip(values.tolist(), units.tolist(), strict=True):
        rows = slice(start, start + count * number)
        # weight of each record in its user's gradient; 0 for an empty slot
        held = occupied[rows].unflatten(0, (-1, count))
        size = 1 if reduction == "sum" else held.sum(1, keepdim=True).clamp(min=1)
        own = tape.take(rows)
        parts.append(own if count == 1 else own.of_units(count, (held.double() / size).flatten()))
        there.append(held.any(1))
        start = rows.stop
    return UnitTape(parts, None if present is None else torch.cat(there))
