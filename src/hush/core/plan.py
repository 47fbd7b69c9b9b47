"""One private step as one immutable value: it runs the step, and it is what the ledger charges."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Self

from hush.core.errors import HushError, InvalidPlan, short_repr
from hush.core.part import Always, Clipping, Noise, Part, Release, Sampling
from hush.core.value import Value


@dataclass(frozen=True, kw_only=True)
class Plan(Value):
    """Sampling x Clipping x Noise x Release.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.1),
    ... )
    >>> plan == hush.Plan.from_plain(plan.to_plain())
    True
    """

    sampling: Sampling
    clipping: Clipping
    noise: Noise
    release: Release = Always()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in _STAGES.items():
            part = getattr(self, name)
            if not isinstance(part, kind):
                raise InvalidPlan(
                    f"{name}={short_repr(part)} is not a {kind.__name__}: a plan is charged by what "
                    f"each of its four parts proves. Choose from {', '.join(sorted(kind.kinds))}.",
                    key=name,
                )

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        parts = {}
        if not isinstance(plain, dict):
            raise InvalidPlan(
                f"{short_repr(plain)} is not a plan as plain data: that is a dictionary with the parts "
                f"{', '.join(_STAGES)}."
            )
        for name, part in plain.items():
            if name not in _STAGES or not isinstance(part, dict):
                raise InvalidPlan(
                    f"{short_repr(name)} is not a part of a plan; the parts are the tables "
                    f"{', '.join(_STAGES)}.",
                    key=name,
                )
            try:
                parts[name] = _STAGES[name].from_plain(part)
            except HushError as error:
                raise type(error)(str(error), key=f"{name}.{error.key}") from None
        return super().from_plain({"release": Always(), **parts})

    @property
    def digest(self) -> str:
        """A name for the plan's content: equal plans have equal digests."""
        text = json.dumps(self.to_plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_STAGES: dict[str, type[Part]] = {
    "sampling": Sampling,
    "clipping": Clipping,
    "noise": Noise,
    "release": Release,
}
