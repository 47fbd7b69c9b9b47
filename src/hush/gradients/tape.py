"""Gradient tape: the per-sample gradients of a batch, as the terms that the layers left.

What Opacus's ghost clipping and book-keeping do with hooks: `norms` is the per-sample (ghost) norms,
`weighted_sum` the clipped sum for weights that those norms give. Nothing is materialised but by terms
for which that is cheaper, and by `chunks`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask
from hush.gradients.entrywise_clipping import EntrywiseClipping
from hush.gradients.joint import joint_norms, joint_sums
from hush.gradients.precision import capturing_cuda_graph, full_precision, vector_norms
from hush.gradients.terms import CHUNK_ENTRIES, Term, zero_rows
from hush.gradients.tree import tree_leaves


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
        if order != 2 or self.device.type != "cuda":
            return vector_norms(torch.stack(list(self.norms_by_parameter(order).values()), dim=1), order)
        with full_precision(self.device):
            return joint_norms(list(self.terms.values()))

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
            sums = joint_sums(self.terms, mask, weights) if self.device.type == "cuda" else {}
            rest = {name: term for name, term in self.terms.items() if name not in sums}
            sums |= {name: mask(term).weighted_sum(weights) for name, term in rest.items()}
        return {name: sums[name] for name in self.terms}

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
        return tree_leaves([vars(term) for term in self.terms.values()])

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
