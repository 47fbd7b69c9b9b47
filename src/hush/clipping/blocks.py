"""Clipping block by block: a bound per entry, or per subspace of the parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hush.clipping.norms import NORM
from hush.core.errors import HushError, InvalidValue, short_repr
from hush.core.parts import Clipping, SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask, Tape
from hush.core.value import Value, check_count


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

    groups: int = 4
    every: int = 100
    iterations: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (
            ("groups", "the parameters are split into so many"),
            ("every", "the bases serve so many steps"),
            ("iterations", "the first round already starts from random directions"),
        ):
            object.__setattr__(self, name, check_count(name, getattr(self, name), why, at_least=1))


_WHY_SIZE = "it is how many numbers the bound is for"


@dataclass(frozen=True, kw_only=True)
class Box(Clipping):
    """Each entry of a per-sample gradient is clamped to its own bound.

    Args:
        bounds: One number per parameter, or pairs (count, bound) for `count` in a row, in the order of
            the model's parameters; also positional.
    """

    bounds: Sequence[float | tuple[int, float]] = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        runs: list[tuple[int, float]] = []
        for item in _listed("bounds", self.bounds):
            count, bound = item if isinstance(item, (tuple, list)) and len(item) == 2 else (1, item)
            bound = NORM["range"].check("bounds", bound)
            count = check_count("bounds", count, _WHY_SIZE, at_least=1)
            if runs and runs[-1][1] == bound:
                count += runs.pop()[0]
            runs.append((count, bound))
        object.__setattr__(self, "bounds", tuple(runs))

    @property
    def _runs(self) -> tuple[tuple[int, float], ...]:
        return cast(tuple[tuple[int, float], ...], self.bounds)

    @classmethod
    def examples(cls) -> tuple[tuple[Clipping, int], ...]:
        return ((cls(bounds=(0.8, 0.6)), 2),)

    @property
    def reference_norm(self) -> float:
        """The largest bound."""
        return max(bound for _, bound in self._runs)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        _check_total(self, sum(count for count, _ in self._runs), dimension)
        return tuple(
            SensitivitySet(p=math.inf, norm=bound, dimension=count) for count, bound in self._runs
        )

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        return tape.clip_entrywise(self.sensitivity(None), mask)


@dataclass(frozen=True, kw_only=True)
class Subspaces(Clipping):
    """Each per-sample gradient is clipped in several orthogonal subspaces independently.

    Args:
        ranks: Dimension of each subspace; they add up to the number of parameters.
        l2: Euclidean norm bound in each subspace.
        linf: Bound on each coefficient, by subspace; None for none.
        bases: None: a subspace is a run of parameters in the model's order, e.g. a layer.
            `Principal(...)`: principal directions of public gradients; the last subspace is their
            orthogonal complement.
    """

    ranks: Sequence[int]
    l2: Sequence[float]
    linf: Sequence[float] | None = None
    bases: Principal | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = [check_count("ranks", rank, _WHY_SIZE, 1) for rank in _listed("ranks", self.ranks)]
        object.__setattr__(self, "ranks", tuple(ranks))
        for name in ("l2", "linf"):
            values = getattr(self, name)
            if values is None and name == "linf":
                continue
            norms = tuple(NORM["range"].check(name, value) for value in _listed(name, values))
            if len(norms) != len(ranks):
                raise InvalidValue(
                    f"{name}={short_repr(values)} must have {len(ranks)} numbers, one for each of the "
                    "ranks: a subspace without a bound would not be hidden.",
                    key=name,
                )
            object.__setattr__(self, name, norms)
        if isinstance(self.bases, dict):  # of a plan file
            try:
                object.__setattr__(self, "bases", Principal.from_plain(self.bases))
            except HushError as error:
                raise type(error)(str(error), key=f"bases.{error.key}") from None
        if self.bases is not None and (not isinstance(self.bases, Principal) or len(ranks) < 2):
            raise InvalidValue(
                f"bases={short_repr(self.bases)} must be Principal(...), with at least two ranks: the "
                "last is of what the principal directions leave.",
                key="bases",
            )

    @classmethod
    def examples(cls) -> tuple[tuple[Clipping, int], ...]:
        return ((cls(ranks=(2, 2), l2=(0.8, 0.6)), 4),)

    @property
    def reference_norm(self) -> float:
        """The norm of a gradient that fills every subspace."""
        return math.hypot(*self.l2)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        _check_total(self, sum(self.ranks), dimension)
        sizes = list(self.ranks)
        if self.bases is not None:
            # what is left is written in ordinary coordinates, of which there are more than its rank
            sizes[-1] = sum(self.ranks)
        caps: Sequence[float | None] = self.linf or [None] * len(sizes)
        return tuple(
            SensitivitySet(p=2.0, norm=norm, cap=cap, dimension=size)
            for norm, cap, size in zip(self.l2, caps, sizes, strict=True)
        )

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        return tape.clip_entrywise(self.sensitivity(None), mask)


def _listed(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise InvalidValue(
            f"{name}={short_repr(values)} must be a non-empty list: it says what is bounded. "
            f"Pass e.g. {name}=(1, 2).",
            key=name,
        )
    return values


def _check_total(clipping: Clipping, total: int, dimension: int | None) -> None:
    if dimension is not None and dimension != total:
        raise InvalidValue(
            f"{type(clipping).__name__} bounds {total} numbers and {dimension} are trained: parameters "
            "outside the blocks would be neither bounded nor hidden. Make the blocks add up to the "
            "number of parameters.",
            key="dimension",
        )
