"""Per-example gradients as coefficients: in principal subspaces, and what they leave over.

A group of parameters has a basis U. A gradient g becomes U^T g, in the subspaces that U's columns belong
to, and the residual g - U U^T g, written in ordinary coordinates: one number a parameter, more than its
dimension needs. Blocks of these numbers are clipped and get noise, whatever U is, so a poor or crooked U
costs utility and never privacy: docs/guarantees/frame.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hush.core.errors import InvalidValue
from hush.core.sensitivity import SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.entrywise_clipping import clip_blocks, flat_rows
from hush.gradients.precision import full_precision
from hush.gradients.tape import GradientTape, OccupiedTape, SplitTape
from hush.gradients.terms import CHUNK

RESIDUAL = "residual"


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that follow one another, with a basis of their own."""

    names: tuple[str, ...]
    basis: Tensor
    """One row a number of theirs, one column a direction; the columns of subspace 0 come first."""
    columns: tuple[int, ...]
    """How many of the columns belong to each subspace."""

    def __post_init__(self) -> None:
        if self.basis.dim() != 2 or self.basis.shape[1] != sum(self.columns):
            raise InvalidValue(
                f"a basis of shape {tuple(self.basis.shape)} must have the {sum(self.columns)} columns "
                f"that its subspaces {self.columns} take."
            )


@dataclass(frozen=True, eq=False)
class PublicBasis:
    """Which coefficients a gradient is written in; the groups are all parameters, in order."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if len({len(group.columns) for group in self.groups}) != 1:
            raise InvalidValue("a frame is of groups with the same number of subspaces each.")

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in order."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def device(self) -> torch.device:
        return self.groups[0].basis.device

    @property
    def dimension(self) -> int:
        """How many numbers a gradient has."""
        return sum(len(group.basis) for group in self.groups)

    @property
    def sizes(self) -> dict[str, int]:
        """The blocks of coefficients in order, and how many numbers each has."""
        ranks = [sum(each) for each in zip(*(group.columns for group in self.groups), strict=True)]
        return {**{f"subspace {j}": rank for j, rank in enumerate(ranks)}, RESIDUAL: self.dimension}

    def blocks(self, gradients: Tensor) -> dict[str, Tensor]:
        """The coefficients of gradients, one a row; what is passed becomes the residual."""
        parts: list[list[Tensor]] = [[] for _ in self.groups[0].columns]
        with full_precision(self.device):
            for group, own in self._along(gradients):
                found = own @ group.basis
                own.addmm_(found, group.basis.T, alpha=-1)
                for subspace, part in zip(parts, found.split(group.columns, 1), strict=True):
                    subspace.append(part)
            joined = {f"subspace {j}": torch.cat(part, 1) for j, part in enumerate(parts)}
        return {**joined, RESIDUAL: gradients}

    def to_parameters(self, coefficients: Tensor) -> Tensor:
        """The gradient, parameters one after the other, of coefficients, blocks one after the other.

        What a noisy residual has within the subspaces is left out: it is known to be noise alone.
        """
        sizes = list(self.sizes.values())
        if coefficients.shape != (sum(sizes),):
            raise InvalidValue(
                f"coefficients of shape {tuple(coefficients.shape)} are not the {sum(sizes)} numbers of "
                f"the blocks {self.sizes}."
            )
        *subspaces, residual = coefficients.to(self.groups[0].basis.dtype).split(sizes)
        split = [
            part.split([group.columns[j] for group in self.groups]) for j, part in enumerate(subspaces)
        ]
        gradient: Tensor = residual.clone()
        with full_precision(self.device):
            for k, (group, own) in enumerate(self._along(gradient)):
                wanted = torch.cat([own.new_zeros(0), *(part[k] for part in split)])
                own.addmv_(group.basis, wanted - group.basis.T @ own)
        return gradient.to(coefficients.dtype)

    def _along(self, values: Tensor) -> Iterator[tuple[Group, Tensor]]:
        """Each group with its part of the last dimension, as a view."""
        ends = accumulate(len(group.basis) for group in self.groups)
        for group, end in zip(self.groups, ends, strict=True):
            yield group, values[..., end - len(group.basis) : end]


@dataclass(frozen=True, eq=False)
class ProjectedTape:
    """The gradients of a batch in the coefficients of a frame."""

    tape: GradientTape | SplitTape | OccupiedTape
    frame: PublicBasis

    @property
    def records(self) -> int:
        return self.tape.records

    @property
    def device(self) -> torch.device:
        return self.frame.device

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's gradient itself."""
        return self.tape.norms(order)

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> dict[str, Tensor]:
        """The sum of the records' coefficients times their weights: linear, so that of their sum."""
        total = self.tape.weighted_sum(weights, most)
        flat = torch.cat([part.reshape(-1) for part in total.values()])
        blocks = self.frame.blocks(flat[None].to(self.frame.groups[0].basis.dtype))
        return {name: block[0] for name, block in blocks.items()}

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no records."""
        basis = self.frame.groups[0].basis
        return {
            name: basis.new_zeros(size, dtype=torch.float64) for name, size in self.frame.sizes.items()
        }

    def clip_entrywise(
        self, balls: Sequence[SensitivitySet], thin: CoordinateMask | None = None
    ) -> ClippedSum:
        """The sum of the coefficients, each record's held in the balls, and then thinned."""
        return clip_blocks(self, balls, thin)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The blocks of coefficients, a few records at a time: which ones, and block -> (few, size).

        No more than `entries` numbers are in use for a chunk, or those of one record.
        """
        frame = self.frame
        # A record is there as the tape writes it, as its residual, and as its coefficients.
        each = sum(frame.sizes.values()) + frame.dimension
        records = max(1, (entries or CHUNK[frame.device.type]) // each)
        for rows, written in self.tape.chunks(records * frame.dimension):
            if tuple(written) != frame.names:
                raise InvalidValue(
                    f"the tape has the parameters {', '.join(written)} and the frame is for "
                    f"{', '.join(frame.names)}. Make the frame for the parameters that are trained."
                )
            yield rows, frame.blocks(flat_rows(written).to(frame.groups[0].basis.dtype))


def apportioned(total: int, sizes: Sequence[int]) -> list[int]:
    """So many shared out in proportion to the sizes (the divisor method of Webster).

    Whoever has a share keeps it when the total grows, and nobody gets more than its size while the total
    is at most that of all.
    """
    shares = [0] * len(sizes)
    for _ in range(total):
        k = max(range(len(sizes)), key=lambda k: sizes[k] / (2 * shares[k] + 1))
        shares[k] += 1
    return shares
