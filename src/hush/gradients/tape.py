"""The gradients of a batch, one per record, kept as the terms that the layers left."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hush.core.sensitivity import SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients import tree
from hush.gradients.checks.data_dependence import SubBatch
from hush.gradients.entrywise_clipping import clip_blocks, clip_sum
from hush.gradients.factors import OuterFactors, RowFactors, TiedFactors
from hush.gradients.precision import full_precision
from hush.gradients.terms import CHUNK, Dense, Term, being_captured, vector_norms, zero_rows


@dataclass(frozen=True, eq=False)
class GradientTape:
    """Answers for the per-example gradients of one batch without writing them all out."""

    terms: dict[str, Term]
    device: torch.device
    idle: tuple[str, ...] = ()
    """Parameters on which no record's loss depends."""
    decided: bool = False
    """Whether the model asked for a value, by which records may go different ways."""

    @property
    def records(self) -> int:
        return next(iter(self.terms.values())).records

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of a sum over so many records is at most `ROUNDING` of what one may add.

        Of a model that decides by a value it is not: its terms may differ from record to record, and
        what is said of rounding must not tell which there are.
        """
        bounded = all(term.rounding_bounded(records) for term in self.terms.values())
        return bounded and not self.decided

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's whole gradient."""
        each = torch.stack(list(self.norms_by_parameter(order).values()), dim=1)
        return vector_norms(each, order)

    def norms_by_parameter(self, order: float) -> dict[str, Tensor]:
        """The l_order norm of each record's gradient of each parameter."""
        with full_precision(self.device):
            return {name: term.norms(order) for name, term in self.terms.items()}

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> dict[str, Tensor]:
        """The sum of the records' gradients times their weights, by parameter name.

        A record of weight 0 adds exactly zero, even where its gradient is not finite. None may be longer
        than `most` with its weight; by that is known of which more cancels than is left.
        """
        terms = self._counting(weights)
        with full_precision(self.device):
            return {name: term.weighted_sum(weights, most) for name, term in terms.items()}

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """The sum of the gradients, each number cut off at its record's limit and then thinned, times
        the records' weights; one of weight 0 adds zero as in `weighted_sum`."""
        terms = self._counting(weights)
        with full_precision(self.device):
            return {
                name: term.clamped_weighted_sum(weights, limits, thin) for name, term in terms.items()
            }

    def _counting(self, weights: Tensor) -> dict[str, Term]:
        """The terms with zeros for records of weight 0, whose gradients may not be finite.

        They keep their places: a sum rounds by place and shape, and must not tell who is in it. In a
        replay what is not finite is done anew.
        """
        keep = weights != 0
        if being_captured() or bool(keep.all()):
            return self.terms
        return {name: term.zeroed(keep) for name, term in self.terms.items()}

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no records."""
        nobody = torch.empty(0, device=self.device)
        return {name: term.take(slice(0, 0)).weighted_sum(nobody) for name, term in self.terms.items()}

    def clip_entrywise(
        self, balls: Sequence[SensitivitySet], thin: CoordinateMask | None = None
    ) -> ClippedSum:
        """The sum of the gradients, each held in the balls number by number, and then thinned."""
        return clip_sum(self, balls[0], thin) if len(balls) == 1 else clip_blocks(self, balls, thin)

    def tensors(self) -> Iterator[Tensor]:
        """What the tape holds."""
        return tree.tree_leaves([vars(term) for term in self.terms.values()])

    def take(self, rows: Tensor | slice) -> "GradientTape":
        """The tape of some of the records."""
        return replace(self, terms={name: term.take(rows) for name, term in self.terms.items()})

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The gradients written out, a few records at a time: which ones, and name -> (few, *shape).

        For rules that need every element. A chunk holds `entries` numbers at most, or one record's. It
        may be the tape's own memory: not to be written into.
        """
        size = sum(math.prod(term.shape) for term in self.terms.values())
        step = max(1, (entries or CHUNK[self.device.type]) // size)
        for start in range(0, self.records, step):
            rows = slice(start, start + step)
            with full_precision(self.device):
                written = {name: term.take(rows).dense() for name, term in self.terms.items()}
            yield rows, written


@dataclass(frozen=True, eq=False)
class SplitTape:
    """Tapes of records that took different ways through the model, with where they are on each."""

    parts: "list[tuple[SubBatch, GradientTape]]"

    @property
    def records(self) -> int:
        return sum(len(part.rows) for part, _ in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0][1].device

    @property
    def decided(self) -> bool:
        """Whether the model asked for a value: it did."""
        return True

    @property
    def idle(self) -> tuple[str, ...]:
        """Parameters on which no record's loss depends."""
        first, *others = (tape.idle for _, tape in self.parts)
        return tuple(name for name in first if all(name in other for other in others))

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of a sum is bounded: not of a model that decides by a value."""
        return False

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's whole gradient."""
        return self._gathered([tape.norms(order) for _, tape in self.parts])

    def norms_by_parameter(self, order: float) -> dict[str, Tensor]:
        """The l_order norm of each record's gradient of each parameter."""
        each = [tape.norms_by_parameter(order) for _, tape in self.parts]
        return {name: self._gathered([part[name] for part in each]) for name in each[0]}

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> dict[str, Tensor]:
        """The sum of the records' gradients times their weights, by parameter name."""
        sums = (tape.weighted_sum(part.spread(weights, tape.records), most) for part, tape in self.parts)
        return _added(list(sums))

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """The sum of the gradients, each number cut off at its record's limit and then thinned, times
        the records' weights."""
        sums = []
        for part, tape in self.parts:
            own = part.spread(weights, tape.records), part.spread(limits, tape.records)
            sums.append(tape.clamped_weighted_sum(*own, thin))
        return _added(sums)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The gradients written out, a few records at a time."""
        for part, tape in self.parts:
            for some, written in tape.chunks(entries):
                at = torch.arange(tape.records, device=tape.device)[some]
                here = torch.isin(part.places, at)
                inside = torch.isin(at, part.places)
                yield part.rows[here], {name: value[inside] for name, value in written.items()}

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no records."""
        return self.parts[0][1].zeros()

    def clip_entrywise(
        self, balls: Sequence[SensitivitySet], thin: CoordinateMask | None = None
    ) -> ClippedSum:
        """The sum of the gradients, each held in the balls number by number, and then thinned."""
        return clip_sum(self, balls[0], thin) if len(balls) == 1 else clip_blocks(self, balls, thin)

    def tensors(self) -> Iterator[Tensor]:
        """What the tapes hold."""
        for _, tape in self.parts:
            yield from tape.tensors()

    def _gathered(self, each: list[Tensor]) -> Tensor:
        values = [own[part.places] for (part, _), own in zip(self.parts, each, strict=True)]
        return torch.cat(values)[torch.cat([part.rows for part, _ in self.parts]).argsort()]


@dataclass(frozen=True, eq=False)
class OccupiedTape:
    """A tape of slots of which some are empty: their records add exactly zero to every sum."""

    tape: GradientTape | SplitTape
    present: Tensor
    """Whether each slot holds a record."""

    @property
    def records(self) -> int:
        return self.tape.records

    @property
    def device(self) -> torch.device:
        return self.tape.device

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's gradient, 0 of an empty slot."""
        norms = self.tape.norms(order)
        return norms.where(self.present, torch.zeros_like(norms))

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> dict[str, Tensor]:
        """The sum of the records' gradients times their weights, by parameter name."""
        return self.tape.weighted_sum(weights * self.present.to(weights.dtype), most)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """The sum of the gradients, each number cut off at its record's limit and then thinned, times
        the records' weights."""
        return self.tape.clamped_weighted_sum(weights * self.present.to(weights.dtype), limits, thin)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The gradients written out, a few records at a time, zero for an empty slot."""
        for rows, written in self.tape.chunks(entries):
            here = self.present[rows]
            yield rows, {name: zero_rows(value, here) for name, value in written.items()}

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no records."""
        return self.tape.zeros()

    def clip_entrywise(
        self, balls: Sequence[SensitivitySet], thin: CoordinateMask | None = None
    ) -> ClippedSum:
        """The sum of the gradients, each held in the balls number by number, and then thinned."""
        return clip_sum(self, balls[0], thin) if len(balls) == 1 else clip_blocks(self, balls, thin)


def _added(sums: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums by parameter name, added up."""
    first, *others = sums
    return {name: sum((other[name] for other in others), start=first[name]) for name in first}


def joined(terms: Sequence[Term]) -> Term:
    """All the uses of one parameter as one term."""
    outer = [term for term in terms if isinstance(term, OuterFactors)]
    rows = [term for term in terms if isinstance(term, RowFactors)]
    if len(terms) == 1:
        return terms[0]
    if len(outer) + len(rows) < len(terms):
        return Dense(sum((term.dense() for term in terms[1:]), start=terms[0].dense()))
    products = (
        [OuterFactors(_together(outer, "left"), _together(outer, "right"), terms[0].shape)]
        if outer
        else []
    )
    tables = (
        [RowFactors(_together(rows, "index"), _together(rows, "right"), terms[0].shape)] if rows else []
    )
    if products and tables:
        return TiedFactors(tables[0], products[0])
    return (products or tables)[0]


def _together(terms: Sequence[Term], name: str) -> Tensor:
    """A factor of all the terms, one after the other along the positions."""
    return torch.cat([getattr(term, name) for term in terms], dim=1)
