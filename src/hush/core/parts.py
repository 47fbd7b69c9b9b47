"""The four questions a private step answers; every mechanism is a value of one of these kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from hush.core.errors import InvalidPlan, short_repr
from hush.core.randomness import Randomness
from hush.core.sensitivity import SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask, Tape
from hush.core.value import Value

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Part(Value, ABC):
    """One part of a plan, known in plain data by its class name."""

    kinds: ClassVar[dict[str, type["Part"]]]

    def __init_subclass__(cls) -> None:
        if Part in cls.__bases__:
            cls.kinds = {}
        else:
            cls.kinds[cls.__name__] = cls

    def to_plain(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **super().to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """The part that `to_plain` wrote, of whichever kind it names."""
        settings = dict(plain)
        kind = settings.pop("kind", None)
        found = cls.kinds.get(kind) if isinstance(kind, str) else None
        if found is None or not issubclass(found, cls):
            raise InvalidPlan(
                f"'kind' = {short_repr(kind)} is not a {cls.__name__.lower()}; "
                f"choose from {', '.join(sorted(cls.kinds))}.",
                key="kind",
            )
        return super(Part, found).from_plain(settings)


@dataclass(frozen=True, kw_only=True)
class Sampling(Part):
    """Who takes part in a step."""

    @abstractmethod
    def draw(self, records: int, generator: Randomness) -> "torch.Tensor":
        """The indices of those who take part, on the generator's device; it may be empty."""

    @property
    @abstractmethod
    def participation(self) -> float:
        """The probability that a record takes part."""

    @property
    def coordinate_participation(self) -> float:
        """The probability that one coordinate of a record takes part, if the record does."""
        return 1.0

    def mask_coordinates(self, values: "torch.Tensor", generator: Randomness) -> "torch.Tensor":
        """The values, each kept with probability `thinning` and else set to 0; it may be in place."""
        return values

    def expected(self, records: int) -> float:
        """How many take part in a coordinate on average: what a sum is divided by, whoever took part."""
        return self.participation * self.coordinate_participation * records


@dataclass(frozen=True, kw_only=True)
class Clipping(Part):
    """How far one record can push, and in which directions."""

    @property
    @abstractmethod
    def reference_norm(self) -> float:
        """The length that noise multipliers are measured in."""

    @abstractmethod
    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        """The sensitivity set: what a record may change of each block of coordinates, one after another.

        `dimension` is how many coordinates there are, where that is known.
        """

    @abstractmethod
    def clip(self, tape: Tape, thin: CoordinateMask | None = None) -> ClippedSum:
        """The sum of the gradients on the tape, each held in the balls and then thinned, if so asked."""


@dataclass(frozen=True, kw_only=True)
class Noise(Part):
    """What hides the push."""

    additive: ClassVar[bool] = False
    """Whether a draw is the location plus what does not depend on it. Each class says so for itself: one
    that is derived may draw in another way."""
    exact: ClassVar[bool] = False
    """Whether what is drawn from a cryptographic source has the law that is charged exactly, up to
    post-processing: docs/guarantees/sampling.md. Each class says so for itself."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.additive = bool(vars(cls).get("additive", False))
        cls.exact = bool(vars(cls).get("exact", False))

    def with_multiplier(self, multiplier: float) -> "Noise":
        """The same noise, scaled to that multiplier."""
        changed: Any = self
        return cast(Noise, replace(changed, multiplier=multiplier))

    def per_block(self, balls: Sequence[SensitivitySet], unit: float) -> "list[tuple[Noise, float]]":
        """For each block of coordinates its noise and the norm that the noise is scaled for."""
        return [(self, unit)] * len(balls)

    @abstractmethod
    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
        """A draw around `location`, each entry on its own, scaled for a clipping norm of `norm`.

        It may be drawn in place: `location` is not to be used afterwards.
        """

    def prepare(
        self, count: int, *, norm: float, generator: Randomness, device: "torch.device"
    ) -> "Callable[[torch.Tensor], torch.Tensor]":
        """A function that does what `around` does for one flat location of `count` numbers.

        Draws that do not depend on the location may be made now, while it is still being computed.
        """
        return lambda location: self.privatize(location, norm=norm, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Release(Part):
    """What leaves the room."""


@dataclass(frozen=True, kw_only=True)
class Always(Release):
    """Every noisy update is released."""
