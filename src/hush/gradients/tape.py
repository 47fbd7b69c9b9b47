"""Gradient tape: the per-sample gradients of a batch, as the terms that the layers left.

What Opacus's ghost clipping and book-keeping do with hooks: `norms` is the per-sample (ghost) norms,
`weighted_sum` the clipped sum for weights that those norms give. Nothing is materialised but by terms
for which that is cheaper, and by `chunks`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Norms below it stay finite in single precision when they are squared, or multiplied by another."""


@dataclass(frozen=True, eq=False)
class GradientTape(EntrywiseClipping):
    """Per-sample gradients of one batch, by parameter name, without materialising them all."""

    terms: dict[str, Term]
    device: torch.device
    unused_parameters: tuple[str, ...] = ()
    """Parameters on which no record's loss depends."""

    @property
    def records(self) -> int:
        return next(iter(self.terms.values())).records

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of a sum over a number of records is at most `ROUNDING` of the clip norm."""
        return all(term.rounding_bounded(records) for term in self.terms.values())

    def norms(self, order: float) -> Tensor:
        """The per-sample gradient norms over all parameters.

        Args:
            order: of the l_p norm; 2 gives ghost norms where gradients are factored.

        Returns:
            (records,), not finite where a record's gradient is not.
        """
        if order == 2 and self.device.type == "cuda":
            with full_precision(self.device):
                return joint_norms(list(self.terms.values()))
        if order == 2 and self.device.type == "cpu" and (norms := self._regular_norms()) is not None:
            return norms
        return vector_norms(torch.stack(list(self.norms_by_parameter(order).values()), dim=1), order)

    def _regular_norms(self) -> Tensor | None:
        """Euclidean norms if no number is near overflow, with one check for all terms; else None.

        They equal those of `norms_by_parameter` bit for bit.
        """
        lengths: list[Tensor] = []
        norms: list[Tensor] = []
        for term in self.terms.values():
            if isinstance(term, OuterFactors):
                left, right = term.left, term.right
                if left.shape[1] != 1 or left.dtype != torch.float32 or right.dtype != torch.float32:
                    return None
                lengths += double_norms(left[:, 0], 2.0), double_norms(right[:, 0], 2.0)
                norms.append((lengths[-2] * lengths[-1]).float())
            elif isinstance(term, Dense) and term.gradients.dtype == torch.float32:
                rows = term.gradients.reshape(len(term.gradients), math.prod(term.shape))
                if not 0 < rows.shape[1] < NORM_RUN:
                    return None
                norms.append(torch.linalg.vector_norm(rows, dim=1))
            else:
                return None
        joint: Tensor = torch.linalg.vector_norm(torch.stack(norms, 1), dim=1)
        regular = joint.numel() and float(joint.max()) < _REGULAR
        return joint if regular and all(float(value.max()) < _REGULAR for value in lengths) else None

    def norms_by_parameter(self, order: float) -> dict[str, Tensor]:
        """The per-sample gradient norms of each parameter: name -> (records,)."""
        with full_precision(self.device):
            return {name: term.norms(order) for name, term in self.terms.items()}

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum over records of weight times gradient, by parameter name.

        A record of weight 0 adds exactly zero, even where its gradient is not finite.

        Args:
            weights: (records,), for clipping min(1, clip norm / gradient norm).

        Returns:
            The sums in double precision.
        """
        mask = self._zero_weights(weights)
        with full_precision(self.device):
            joint = joint_sums(self.terms, mask, weights) if self.device.type == "cuda" else {}
            sums = {}
            for name, term in self.terms.items():
                sums[name] = joint[name] if name in joint else mask(term).weighted_sum(weights)
        return sums

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` of gradients whose entries are clamped to +-limit of their record, then masked.

        Args:
            weights: (records,).
            limits: (records,), before weighting.
            mask: zeroes coordinates at random, for plans that sample them.

        Returns:
            The sums in double precision.
        """
        zero = self._zero_weights(weights)
        with full_precision(self.device):
            return {
                name: zero(term).clamped_weighted_sum(weights, limits, mask)
                for name, term in self.terms.items()
            }

    def _zero_weights(self, weights: Tensor) -> Callable[[Term], Term]:
        """A function that puts zeros for records of weight 0, whose gradients may not be finite.

        They keep their places: a sum rounds by place and shape, and must not tell who is in it. A CUDA
        graph cannot branch here; a replay with gradients that are not finite is discarded. One term at
        a time, for memory's sake.
        """
        if weights.is_cpu and weights.numel() and float(weights.min()) > 0:
            return lambda term: term
        keep = weights != 0
        if capturing_cuda_graph() or bool(keep.all()):
            return lambda term: term
        return lambda term: term.mask_records(keep)

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no records."""
        empty = torch.empty(0, device=self.device)
        return {name: term.take(slice(0, 0)).weighted_sum(empty) for name, term in self.terms.items()}

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the tape holds in memory."""
        for term in self.terms.values():
            yield from term.tensors()

    def select(self, names: list[str]) -> "GradientTape":
        """The tape of a subset of the parameters."""
        return replace(self, terms={name: self.terms[name] for name in names})

    def take(self, rows: Tensor | slice) -> "GradientTape":
        """The tape of a subset of the records."""
        return replace(self, terms={name: term.take(rows) for name, term in self.terms.items()})

    def mask_records(self, keep: Tensor) -> "GradientTape":
        """The tape with gradients of zero where `keep` is false; every record keeps its place."""
        return replace(self, terms={name: term.mask_records(keep) for name, term in self.terms.items()})

    def of_units(self, count: int, scale: Tensor) -> "GradientTape":
        """The tape of units of privacy, of `count` consecutive records each: see `Term.of_units`."""
        terms = {name: term.of_units(count, scale) for name, term in self.terms.items()}
        return replace(self, terms=terms)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The materialised per-sample gradients, a few records at a time.

        Args:
            entries: the most that a chunk holds; one record's at least.

        Returns:
            Which records, and name -> (few, *shape). That may be the tape's own memory: not to be
            written into.
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
    """Tape of the terms of all uses of each parameter, with zeros for a parameter without a use."""
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
    """The sum of sums by parameter name."""
    first, *rest = sums
    return {name: sum((total[name] for total in rest), start=first[name]) for name in first}


@dataclass(frozen=True, eq=False)
class MaskedTape(EntrywiseClipping):
    """A tape of slots of which some are empty: their records add exactly zero to every sum."""

    tape: GradientTape
    present: Tensor
    """Whether each slot holds a record."""

    @property
    def records(self) -> int:
        return self.tape.records

    @property
    def device(self) -> torch.device:
        return self.tape.device

    def select(self, names: list[str]) -> "MaskedTape":
        """The tape of a subset of the parameters."""
        return MaskedTape(self.tape.select(names), self.present)

    def norms(self, order: float) -> Tensor:
        """The per-sample gradient norms, 0 for an empty slot."""
        norms = self.tape.norms(order)
        return norms.where(self.present, torch.zeros_like(norms))

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum over records of weight times gradient, by parameter name."""
        return self.tape.weighted_sum(weights * self.present.to(weights.dtype))

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` of gradients whose entries are clamped to +-limit, then masked."""
        return self.tape.clamped_weighted_sum(weights * self.present.to(weights.dtype), limits, mask)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The materialised per-sample gradients, a few records at a time, zero for an empty slot."""
        for rows, gradients in self.tape.chunks(entries):
            present = self.present[rows]
            yield rows, {name: zero_rows(value, present) for name, value in gradients.items()}

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no records."""
        return self.tape.zeros()


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


Reduction = Literal["mean", "sum"]
"""How the gradients of a unit's records make up the unit's own."""


@dataclass(frozen=True, eq=False)
class UnitTape(EntrywiseClipping):
    """Gradients of units of privacy: tapes whose records are units, those of equally many together."""

    parts: list[GradientTape]

    @property
    def records(self) -> int:
        """Number of units, each of which counts as one record."""
        return sum(part.records for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def norms(self, order: float) -> Tensor:
        """The norm of each unit's gradient over all parameters."""
        return torch.cat([part.norms(order) for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum over units of weight times gradient, by parameter name."""
        own = weights.split([part.records for part in self.parts])
        pairs = zip(self.parts, own, strict=True)
        return add_sums([part.weighted_sum(weight) for part, weight in pairs])

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` of gradients whose entries are clamped to +-limit, then masked."""
        sizes = [part.records for part in self.parts]
        rows = zip(self.parts, weights.split(sizes), limits.split(sizes), strict=True)
        return add_sums([part.clamped_weighted_sum(weight, limit, mask) for part, weight, limit in rows])

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The materialised gradients, a few units at a time."""
        start = 0
        for part in self.parts:
            places = torch.arange(start, start + part.records, device=self.device)
            for rows, gradients in part.chunks(entries):
                yield places[rows], gradients
            start += part.records

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no units."""
        return self.parts[0].zeros()

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of a sum over units that own so many records in all is paid for."""
        return all(part.rounding_bounded(records) for part in self.parts)


def unit_tape(
    tape: GradientTape, counts: Tensor, reduction: Reduction, present: Tensor | None
) -> UnitTape:
    """The tape of the units that own a batch's records.

    **Guarantee.** A unit's gradient is a function of its own records, their places and the shapes: see
    docs/guarantees/units.md. It is not finite where that of one of its records is not.

    Args:
        tape: per-sample gradients, the records of a unit one after another, units by rising count.
        counts: (units,), how many of the records each unit owns, rising.
        reduction: a unit's gradient is the mean or the sum of its records'.
        present: which records are there; the others count for nothing, in the mean neither.
    """
    occupied = torch.ones(tape.records, dtype=torch.bool, device=tape.device)
    if present is not None:
        occupied = present
        tape = tape.mask_records(present)
    parts, start = [], 0
    values, units = counts.unique_consecutive(return_counts=True)
    for count, number in zip(values.tolist(), units.tolist(), strict=True):
        rows = slice(start, start + count * number)
        scale = _scale(occupied[rows].unflatten(0, (-1, count)), reduction).flatten()
        own = tape.take(rows)
        parts.append(own if count == 1 else own.of_units(count, scale))
        start = rows.stop
    return UnitTape(parts)


def _scale(occupied: Tensor, reduction: Reduction) -> Tensor:
    """The factor of each record's gradient in its unit's, from which of a unit's places hold one."""
    if reduction == "sum":
        return occupied.double()
    return occupied.double() / occupied.sum(1, keepdim=True).clamp(min=1)
