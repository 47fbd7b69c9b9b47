"""Block-wise clipping: a bound for each entry, or for each subspace of the parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

from hush.clipping.norms import NORM
from hush.core.errors import InvalidValue, short_repr
from hush.core.parts import Clipping, SensitivitySet
from hush.core.value import Value, as_list, count, each, nested

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Principal(Value):
    """Block power iteration with deflation on gradients of public records (twice-sampling, Algorithm 4).

    Args:
        groups: Number of parameter groups of about equal size, each with its own bases; more groups
            take less memory and fewer public records.
        every: Number of steps between updates of the bases.
        iterations: Rounds of the power iteration.

    >>> Principal(groups=4).to_plain()
    {'groups': 4, 'every': 100, 'iterations': 3}
    """

    groups: int = field(default=4, metadata=count("it is the number of groups of parameters"))
    every: int = field(default=100, metadata=count("it is the number of steps that reuse the bases"))
    iterations: int = field(default=3, metadata=count("without an iteration the bases are random"))


_SIZE = count("it is the number of parameters of a block", example=1000)


@dataclass(frozen=True, kw_only=True)
class Box(Clipping):
    """Entry-wise clipping: each entry of a per-sample gradient is clamped to its own bound.

    Args:
        bounds: One number per parameter, or pairs (count, bound) for `count` consecutive parameters, in
            the model's order; also positional.
    """

    bounds: Sequence[float | tuple[int, float]] = field(kw_only=False)

    def __post_init__(self) -> None:
        runs: list[tuple[int, float]] = []
        for item in as_list("bounds", self.bounds):
            size, bound = item if isinstance(item, (tuple, list)) and len(item) == 2 else (1, item)
            bound = NORM["range"].check("bounds", bound)
            size = int(_SIZE["range"].check("bounds", size))
            if runs and runs[-1][1] == bound:
                size += runs.pop()[0]
            runs.append((size, bound))
        object.__setattr__(self, "bounds", tuple(runs))

    @property
    def reference_norm(self) -> float:
        """The largest bound."""
        runs: Any = self.bounds
        return max(float(bound) for _, bound in runs)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        runs: Any = self.bounds
        _check_total(self, sum(size for size, _ in runs), dimension)
        return tuple(SensitivitySet(p=math.inf, norm=bound, dimension=size) for size, bound in runs)


@dataclass(frozen=True, kw_only=True)
class Subspaces(Clipping):
    """Clips each per-sample gradient independently in several orthogonal subspaces.

    Args:
        ranks: Dimension of each subspace; their sum is the number of parameters.
        l2: Euclidean norm bound in each subspace.
        linf: Bound on each coefficient, one per subspace; None for no bound.
        bases: If None, a subspace is a block of consecutive parameters, e.g. a layer. If
            `Principal(...)`, the subspaces are principal directions of public gradients, and the last
            one is their orthogonal complement.
    """

    ranks: Sequence[int] = field(metadata=each(_SIZE))
    l2: Sequence[float] = field(metadata=each(NORM))
    linf: Sequence[float] | None = field(default=None, metadata=each(NORM))
    bases: Principal | None = field(default=None, metadata=nested(Principal))

    @classmethod
    def per_layer(cls, model: "nn.Module", norm: float) -> Self:
        """Per-layer clipping: each layer's gradient is clipped to norm / sqrt(number of layers).

        A layer is a module that directly owns trainable parameters. The same noise multiplier gives the
        same noise as with `L2(norm)`. The result is only valid for the parameters that are trainable
        when the method is called.

        Args:
            model: Model to train.
            norm: Bound on the Euclidean norm of the whole gradient.

        >>> import hush
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
        >>> clipping = hush.Subspaces.per_layer(model, 2.0)
        >>> clipping.ranks, [round(bound, 3) for bound in clipping.l2]
        ((15, 6), [1.414, 1.414])
        """
        trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        layers = groupby(trained, key=lambda pair: pair[0].rpartition(".")[0])
        ranks = [sum(value.numel() for _, value in layer) for _, layer in layers]
        if not ranks:
            text = "model has no trainable parameters, so there is no layer to clip. Unfreeze some with "
            raise InvalidValue(f"{text}requires_grad_(True).", key="model")
        bound = NORM["range"].check("norm", norm) / math.sqrt(len(ranks))
        return cls(ranks=ranks, l2=[bound] * len(ranks))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("l2", self.l2), ("linf", self.linf)):
            if values is not None and len(values) != len(self.ranks):
                text = (
                    f"{name}={short_repr(values)} must have {len(self.ranks)} numbers, one for each of "
                )
                text += "the ranks: a subspace without a bound is not private."
                raise InvalidValue(text, key=name)
        if self.bases is not None and len(self.ranks) < 2:
            text = f"ranks={self.ranks} must have at least two numbers if bases are given: the last one "
            raise InvalidValue(f"{text}is for the complement of the principal directions.", key="ranks")

    @property
    def reference_norm(self) -> float:
        """Euclidean norm of a gradient that reaches the bound in every subspace."""
        return math.hypot(*self.l2)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        _check_total(self, sum(self.ranks), dimension)
        sizes = list(self.ranks)
        if self.bases is not None:
            # vectors in the complement are stored with all coordinates, more than its rank
            sizes[-1] = sum(self.ranks)
        caps: Sequence[float | None] = self.linf or [None] * len(sizes)
        return tuple(
            SensitivitySet(p=2.0, norm=norm, cap=cap, dimension=size)
            for norm, cap, size in zip(self.l2, caps, sizes, strict=True)
        )


def _check_total(clipping: Clipping, total: int, dimension: int | None) -> None:
    if dimension is not None and dimension != total:
        text = f"{type(clipping).__name__} bounds {total} parameters, but {dimension} are trained: "
        text += "parameters outside the blocks would not be private. Make the numbers equal."
        raise InvalidValue(text, key="dimension")
