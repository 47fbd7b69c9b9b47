"""Projection of per-sample gradients onto a public basis.

Each group of parameters has a basis U. A gradient g is represented by its coefficients U^T g in the
subspaces, and by the residual g - U U^T g in standard coordinates. Each block of these numbers is
clipped and gets noise. This holds for every U, so a poor basis reduces utility but not privacy
(docs/guarantees/public-basis.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hush.core.errors import InvalidValue
from hush.core.parts import ClippedSum, CoordinateMask, SensitivitySet
from hush.gradients.entrywise_clipping import clip_blocks, flat_rows
from hush.gradients.precision import full_precision
from hush.gradients.tape import GradientTape, MaskedTape, UnitTape
from hush.gradients.terms import CHUNK_ENTRIES


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive parameters and their basis."""

    names: tuple[str, ...]
    basis: Tensor
    """Basis vectors as columns, in order of the subspaces: (entries of the parameters, directions)."""
    columns: tuple[int, ...]
    """Number of columns of each subspace."""


@dataclass(frozen=True, eq=False)
class PublicBasis:
    """A basis for each group of parameters; the groups contain all parameters in order."""

    groups: tuple[Group, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters in order."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def device(self) -> torch.device:
        return self.groups[0].basis.device

    @property
    def dimension(self) -> int:
        """Number of entries of a gradient."""
        return sum(len(group.basis) for group in self.groups)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries of each block of coefficients, by name and in order."""
        ranks = [sum(ranks) for ranks in zip(*(group.columns for group in self.groups), strict=True)]
        return {**{f"subspace {j}": rank for j, rank in enumerate(ranks)}, "residual": self.dimension}

    def blocks(self, gradients: Tensor) -> dict[str, Tensor]:
        """Coefficients of the gradients (rows), by block; the residual overwrites `gradients`."""
        parts: list[list[Tensor]] = [[] for _ in self.groups[0].columns]
        with full_precision(self.device):
            for group, part in self._by_group(gradients):
                coefficients = part @ group.basis
                part.addmm_(coefficients, group.basis.T, alpha=-1)
                columns = coefficients.split(group.columns, 1)
                for subspace, own in zip(parts, columns, strict=True):
                    subspace.append(own)
            subspaces = {f"subspace {j}": torch.cat(part, 1) for j, part in enumerate(parts)}
        return {**subspaces, "residual": gradients}

    def to_parameters(self, coefficients: Tensor) -> Tensor:
        """Reconstruct a gradient from noisy coefficients.

        Removes the component of the residual in the subspaces, which is pure noise.
        """
        sizes = list(self.sizes.values())
        *subspaces, residual = coefficients.to(self.groups[0].basis.dtype).split(sizes)
        split = [
            part.split([group.columns[j] for group in self.groups]) for j, part in enumerate(subspaces)
        ]
        gradient: Tensor = residual.clone()
        with full_precision(self.device):
            for k, (group, part) in enumerate(self._by_group(gradient)):
                noisy = torch.cat([part.new_zeros(0), *(subspace[k] for subspace in split)])
                part.addmv_(group.basis, noisy - group.basis.T @ part)
        return gradient.to(coefficients.dtype)

    def _by_group(self, values: Tensor) -> Iterator[tuple[Group, Tensor]]:
        """Groups and views of their entries along the last dimension."""
        ends = accumulate(len(group.basis) for group in self.groups)
        for group, end in zip(self.groups, ends, strict=True):
            yield group, values[..., end - len(group.basis) : end]


@dataclass(frozen=True, eq=False)
class ProjectedTape:
    """Per-sample gradients of a batch as coefficients in a public basis."""

    tape: GradientTape | MaskedTape | UnitTape
    basis: PublicBasis

    @property
    def device(self) -> torch.device:
        return self.basis.device

    @property
    def present(self) -> Tensor | None:
        return self.tape.present

    def norms(self, order: float) -> Tensor:
        """Per-sample norms of the gradients, not of their coefficients."""
        return self.tape.norms(order)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Coefficients of the weighted sum of per-sample gradients."""
        total = self.tape.weighted_sum(weights)
        flat = torch.cat([part.reshape(-1) for part in total.values()])
        blocks = self.basis.blocks(flat[None].to(self.basis.groups[0].basis.dtype))
        return {name: block[0] for name, block in blocks.items()}

    def zeros(self) -> dict[str, Tensor]:
        """Zero coefficients: the sum over an empty batch."""
        matrix = self.basis.groups[0].basis
        return {
            name: matrix.new_zeros(size, dtype=torch.float64) for name, size in self.basis.sizes.items()
        }

    def clip_entrywise(
        self, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None = None
    ) -> ClippedSum:
        """Sum of the coefficients, clipped per record to the sensitivity sets and then masked."""
        return clip_blocks(self, sensitivity, mask)

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """Coefficients of the records by block, in chunks of at most `entries` numbers."""
        basis = self.basis
        # entries of a record's gradient, residual and coefficients
        per_record = sum(basis.sizes.values()) + basis.dimension
        records = max(1, (entries or CHUNK_ENTRIES[basis.device.type]) // per_record)
        for rows, gradients in self.tape.chunks(records * basis.dimension):
            if tuple(gradients) != basis.names:
                raise InvalidValue(
                    f"the tape has the parameters {', '.join(gradients)}, but the basis is for "
                    f"{', '.join(basis.names)}. Compute the basis for the trained parameters."
                )
            yield rows, basis.blocks(flat_rows(gradients).to(basis.groups[0].basis.dtype))


def webster_apportionment(total: int, sizes: Sequence[int]) -> list[int]:
    """Apportion `total` in proportion to the sizes, by Webster's method.

    A share does not decrease if the total increases. If the total is at most the sum of the sizes, no
    share exceeds its size.
    """
    shares = [0] * len(sizes)
    for _ in range(total):
        k = max(range(len(sizes)), key=lambda k: sizes[k] / (2 * shares[k] + 1))
        shares[k] += 1
    return shares
