"""Parts of a private step (sampling, clipping, noise, release) with their sensitivity and proofs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from hush.core.errors import InvalidPlan, InvalidValue, short_repr
from hush.core.randomness import RandomSource, random_bits
from hush.core.value import Value, count

if TYPE_CHECKING:
    import torch

CoordinateMask = Callable[["torch.Tensor"], "torch.Tensor"]
"""Coordinate sampling: randomly keeps each entry or sets it to 0; may work in place."""


@dataclass(frozen=True, kw_only=True)
class SensitivitySet(Value):
    """Set of vectors s with `dimension` entries, ||s||_p <= norm and, given a cap, ||s||_inf <= cap.

    `p` may be `math.inf`. If `dimension` is None, the number of entries is arbitrary.
    """

    p: float
    norm: float
    cap: float | None = None
    dimension: int | None = field(
        default=None, metadata=count("it is the number of parameters", example=1000)
    )

    @property
    def max_entry(self) -> float:
        """l-infinity sensitivity: the largest change of one coordinate."""
        return self.norm if self.cap is None else min(self.norm, self.cap)

    @property
    def size(self) -> int:
        """Number of coordinates; raises if it is unknown."""
        if self.dimension is None:
            text = "dimension=None: the privacy cost depends on the number of entries. "
            text += "Pass dimension= (--dimension), the number of parameters."
            raise InvalidValue(text, key="dimension")
        return self.dimension

    @property
    def max_entries_moved(self) -> float:
        """Maximum number of coordinates that change by `max_entry` at once; may be fractional."""
        many = float(self.dimension or math.inf)
        return many if self.p == math.inf else min(many, (self.norm / self.max_entry) ** self.p)

    @property
    def l2_radius(self) -> float:
        """l2 sensitivity: the largest Euclidean norm; infinite if it depends on an unknown dimension."""
        many = float(self.dimension or math.inf)
        spread = self.norm if self.p <= 2 else self.norm * many ** (0.5 - 1 / self.p)
        return min(spread, self.max_entry * math.sqrt(many)) if self.max_entry else 0.0


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """Sum of clipped per-sample gradients."""

    total: "dict[str, torch.Tensor]"
    skipped: "torch.Tensor"
    """Number of records skipped because their gradient is not finite (sensitive)."""


class Tape(Protocol):
    """Per-sample gradients of a batch."""

    @property
    def present(self) -> "torch.Tensor | None":
        """Mask of the slots with a record; None if no slot is empty."""

    def norms(self, order: float) -> "torch.Tensor":
        """l_order norm of each per-sample gradient, over all parameters."""

    def weighted_sum(self, weights: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Weighted sum of the per-sample gradients, by parameter name.

        A record of weight 0 adds exactly zero, even if its gradient is not finite.
        """

    def clip_entrywise(
        self, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None
    ) -> ClippedSum:
        """Sum of the per-sample gradients, each clipped to the sensitivity sets and then masked.

        Each set applies to one of the consecutive blocks of the gradient; a single set applies to the
        whole gradient.
        """


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Proof for the declaring part in every combination with the listed parts, by class name.

    The list for the declaring part's own stage is empty.
    """

    note: str
    """Page of docs/guarantees with the proof."""
    samplings: tuple[str, ...] = ()
    clippings: tuple[str, ...] = ()
    noises: tuple[str, ...] = ()
    releases: tuple[str, ...] = ("Always",)


@dataclass(frozen=True, kw_only=True)
class Part(Value, ABC):
    """One part of a plan. Plain data identifies it by its class name."""

    kinds: ClassVar[dict[str, type["Part"]]]
    """Classes of this stage by name. A `Proof` refers to the first class with that name."""
    proofs: ClassVar[tuple[Proof, ...]] = ()
    """Proofs for this class. Subclasses do not inherit them, because they may behave differently."""

    def __init_subclass__(cls) -> None:
        cls.proofs = vars(cls).get("proofs", ())
        if Part in cls.__bases__:
            cls.kinds = {}
        else:
            cls.kinds.setdefault(cls.__name__, cls)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **super().to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """Restore a part from the output of `to_plain`."""
        settings = dict(plain)
        name = settings.pop("kind", None)
        kind = cls.kinds.get(name) if isinstance(name, str) else None
        if kind is None or not issubclass(kind, cls):
            text = f"'kind' = {short_repr(name)} is not a {cls.__name__.lower()}; choose from "
            raise InvalidPlan(f"{text}{', '.join(sorted(cls.kinds))}.", key="kind")
        return super(Part, kind).from_plain(settings)


@dataclass(frozen=True, kw_only=True)
class Sampling(Part):
    """Subsampling of records and coordinates in a step."""

    counts_slots: ClassVar[bool] = False
    """Whether the draw of a record depends on its slot or the number of slots, which must be public."""

    @property
    def period(self) -> int:
        """Number of consecutive steps of a run that one charge of the plan's mechanism covers.

        Periods begin with the run and at every step whose number (from 0) is a multiple of the period.
        """
        return 1

    def check_slots(self, slots: int) -> None:
        """Raise if the privacy cost was computed for another public number of slots."""

    @abstractmethod
    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        """Indices of the records in a step's batch.

        Args:
            records: Public number of slots.
            generator: Source of all randomness.
            step: Number of the step, from 0.

        Returns:
            Distinct indices in increasing order, on the generator's device or the CPU; may be empty.
        """

    def candidates(self, records: int, step: int) -> range:
        """Slots that a step may sample; all by default.

        Args:
            records: Public number of slots.
            step: Number of the step, from 0.
        """
        return range(records)

    @property
    @abstractmethod
    def participation(self) -> float:
        """Probability that a record takes part in a period, for the accountant."""

    @property
    def step_participation(self) -> float:
        """Probability that one of the candidates takes part in a step."""
        return self.participation

    @property
    def average_participation(self) -> float:
        """Expected number of times that a record takes part, per step."""
        return self.participation / self.period

    @property
    def coordinate_participation(self) -> float:
        """Probability that a coordinate of a sampled record takes part: a multiple of 1/256."""
        return 1.0

    def mask_coordinates(self, values: "torch.Tensor", generator: RandomSource) -> "torch.Tensor":
        """Keep each entry with probability `coordinate_participation`, otherwise set it to 0.

        Args:
            values: Clipped gradients, which are finite; overwritten.
            generator: Source of all randomness.
        """
        if self.coordinate_participation == 1:
            return values
        import torch

        words = random_bits(-(-values.numel() // 8), generator)
        # compare with at most 255, because 256 does not fit a byte
        last = round(self.coordinate_participation * 256) - 1
        mask = words.view(torch.uint8)[: values.numel()].le_(last)
        # multiplication by bytes is many times faster than by booleans, or masked_fill_()
        return values.mul_(mask.to(values.device).view_as(values))

    def expected(self, records: int) -> float:
        """Expected number of records per coordinate: the divisor of the noisy sum."""
        return self.average_participation * self.coordinate_participation * records


@dataclass(frozen=True, kw_only=True)
class Clipping(Part):
    """Clipping rule: bounds each per-sample gradient, and thereby the sensitivity of the sum."""

    draws: ClassVar[bool] = True
    """Whether `clip` may use torch's global generators. If so, the step seeds them."""

    @property
    @abstractmethod
    def reference_norm(self) -> float:
        """Unit of the noise multiplier."""

    @abstractmethod
    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        """Sensitivity of the sum to one record: one set per block of consecutive coordinates.

        Args:
            dimension: Total number of coordinates; None if unknown.
        """

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        """Sum of the per-sample gradients, each clipped to the sensitivity set and then masked.

        Args:
            tape: Per-sample gradients of a batch.
            mask: Coordinate sampling of each clipped gradient; None to keep all coordinates.
        """
        return tape.clip_entrywise(self.sensitivity(None), mask)


@dataclass(frozen=True, kw_only=True)
class Noise(Part):
    """Noise: distribution of the noisy sum for a given clipped sum.

    The accountant calls `exponential_power` of the noise, of its `dominating_noise`, or of the noises
    from `per_block`.
    """

    additive: ClassVar[bool] = False
    """Whether a draw is the input plus independent noise."""
    exact: ClassVar[bool] = False
    """Whether draws from a cryptographic source follow the accounted distribution exactly, up to
    post-processing: docs/guarantees/sampling.md."""

    @property
    def correlation(self) -> Sequence[float]:
        """First column of the matrix C, if the noise of all steps of a run is C^-1 z.

        z is independent noise; the column of independent noise has one number.
        """
        return (1.0,)

    def relative_error(self, steps: int) -> float:
        """Root mean square noise in the sums of 1 to `steps` updates, relative to independent noise."""
        return 1.0

    def exponential_power(self, norm: float) -> tuple[float, float] | None:
        """Exponent beta and scale of a density proportional to exp(-(|x| / scale)^beta), or None.

        Args:
            norm: Clipping norm that scales the noise.
        """
        return None

    def dominating_noise(self, reference_norm: float) -> "Noise | None":
        """Dominating noise that the accountant uses instead; None to account for the noise itself.

        Args:
            reference_norm: Reference norm of the clipping.
        """
        return None

    def with_multiplier(self, multiplier: float) -> "Noise":
        """Copy with another scale. The privacy cost does not increase with `multiplier`.

        Args:
            multiplier: New noise multiplier; for noise with an absolute scale, the new scale.
        """
        changed: Any = self
        return cast(Noise, replace(changed, multiplier=multiplier))

    def per_block(
        self, sensitivity: Sequence[SensitivitySet], reference_norm: float
    ) -> "list[tuple[Noise, float]]":
        """Noise of each block of coordinates, with the `norm` argument for its `privatize`.

        Args:
            sensitivity: Sensitivity sets of the clipping, one per block.
            reference_norm: Reference norm of the clipping.
        """
        return [(self, reference_norm)] * len(sensitivity)

    @abstractmethod
    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        """Add independent noise to each entry of `location`.

        Args:
            location: Clipped sum. It may be overwritten and must not be used afterwards.
            norm: Clipping norm that scales the noise.
            generator: Source of all randomness.
        """


@dataclass(frozen=True, kw_only=True)
class Release(Part):
    """Release rule: which noisy updates are applied and published."""

    runner: ClassVar[str] = ""
    """Class that executes the rule in a training step, as `module:class` (`hush.training.release`)."""


@dataclass(frozen=True, kw_only=True)
class Always(Release):
    """Apply and publish every noisy update."""

    runner: ClassVar[str] = "hush.training.release:EveryUpdate"
