"""Certified privacy cost of an Opacus run, from the history of its accountant."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hush.accounting.epsilon import compose
from hush.clipping import L2
from hush.core.errors import DataError, HushError, short_repr
from hush.core.guarantee import Adjacency, Guarantee, Neighbours
from hush.core.plan import Plan
from hush.core.value import check_count
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

_CHECKPOINT = "privacy_accountant_state_dict"
_SAVE = (
    "In the environment of the run, write the history of the accountant with "
    'json.dump({"history": engine.accountant.history}, open("accountant.json", "w")), and pass it.'
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Property of an Opacus run that its history does not show.

    Args:
        text: The property, and its effect on the guarantee.
        page: Section of the documentation that explains it.
    """

    text: str
    page: str

    def __str__(self) -> str:
        return f"{self.text} ({self.page})"


_IMPLEMENTATIONS = "docs/pitfalls.md#mistakes-in-implementations"
GAPS = (
    Gap(
        text="poisson_sampling=False: shuffled batches are accounted for as Poisson sampling, so "
        "epsilon is not valid",
        page="docs/pitfalls.md#shuffled-batches-with-poisson-accounting",
    ),
    Gap(
        text="the sampling rate and the divisor depend on the number of records: epsilon is valid if "
        "this number is public, but not for add/remove adjacency",
        page="docs/pitfalls.md#a-count-that-is-assumed-to-be-private",
    ),
    Gap(
        text="secure_mode=False: the floating-point grid of torch's noise can reveal a record "
        "(Mironov 2012)",
        page="docs/pitfalls.md#noise-on-a-recognisable-grid",
    ),
    Gap(
        text="secure_mode=False: torch's seed determines the noise and must stay secret",
        page="docs/pitfalls.md#predictable-seeds",
    ),
    Gap(
        text='clipping="adaptive" before version 1.6: the noisy count of clipped records is not '
        "accounted for, so the true epsilon is larger",
        page=_IMPLEMENTATIONS,
    ),
    Gap(
        text="steps after the state was saved are missing",
        page="docs/pitfalls.md#resuming-without-charges-or-with-repeated-noise-on-other-data",
    ),
)
"""Known gaps of every Opacus run."""
_LIMIT = Gap(
    text='accountant="gdp": the epsilon from Opacus is an approximation by the central limit theorem, '
    "not a bound",
    page=_IMPLEMENTATIONS,
)


@dataclass(frozen=True, kw_only=True)
class OpacusRun:
    """Steps of an Opacus run, and its known gaps.

    Args:
        counts: Number of steps of each plan. The clipping norm is 1, because epsilon does not depend on
            it.
        gaps: Properties of the run that the history does not show.
    """

    counts: Mapping[Plan, int]
    gaps: tuple[Gap, ...]

    def epsilon(
        self, delta: float, *, group: int = 1, neighbours: Neighbours = Neighbours.ZERO_OUT
    ) -> Guarantee:
        """The (epsilon, delta) guarantee of the steps, valid if no gap applies.

        Args:
            delta: Delta of the guarantee.
            group: Group size, for group privacy.
            neighbours: Adjacency relation.

        Returns:
            The guarantee with `arithmetic: assumed`, because the noise of Opacus is not exact.
        """
        adjacency = Adjacency(group=group, neighbours=neighbours)
        return replace(compose(self.counts, delta, adjacency=adjacency), arithmetic="assumed")


def from_opacus(run: Any) -> OpacusRun:
    """Read the steps of an Opacus run, to compute a certified epsilon.

    Args:
        run: A `PrivacyEngine`, an accountant, its `state_dict()`, or the path of a file: a checkpoint
            from `engine.save_checkpoint`, or the accountant's `state_dict()` saved by `torch.save` or as
            JSON.

    Returns:
        The run. `epsilon(delta)` computes its guarantee, and `gaps` lists the properties to check.

    Raises:
        DataError: If there is no history of steps, or a step is not a subsampled Gaussian mechanism.

    >>> run = from_opacus({"history": [(1.0, 0.01, 1000)], "mechanism": "prv"})
    >>> print(run.epsilon(delta=1e-5).epsilon)
    <= 1.8285 (and >= 1.8281)
    >>> print(run.gaps[0].page)
    docs/pitfalls.md#shuffled-batches-with-poisson-accounting
    """
    name = str(run) if isinstance(run, (str, Path)) else type(run).__name__
    state = _read(Path(run)) if isinstance(run, (str, Path)) else run
    if not isinstance(state, Mapping):
        accountant = getattr(state, "accountant", state)
        state = {"history": getattr(accountant, "history", None)}
        if callable(mechanism := getattr(accountant, "mechanism", None)):
            state["mechanism"] = mechanism()
    state = state.get(_CHECKPOINT, state)
    history = state.get("history") if isinstance(state, Mapping) else None
    if not isinstance(history, (list, tuple)) or not history:
        found = "an empty history" if history in ([], ()) else "no history of steps"
        raise DataError(f"{name} has {found} of an Opacus accountant (versions 1.2 and later). {_SAVE}")
    counts: Counter[Plan] = Counter()
    for number, entry in enumerate(history, 1):
        try:
            multiplier, rate, steps = entry
            sampling = FullBatch() if rate == 1 else Poisson(rate)
            plan = Plan(sampling=sampling, clipping=L2(1.0), noise=Gaussian(multiplier))
            counts[plan] += check_count("steps", steps, "it is the number of steps", at_least=1)
        except (HushError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, HushError) else "It must be three numbers."
            raise DataError(
                f"{name}: entry {number} of the history, {short_repr(entry)}, is not (noise multiplier, "
                f"sample rate, steps): {reason}"
            ) from None
    return OpacusRun(counts=dict(counts), gaps=(*GAPS, *[_LIMIT] * (state.get("mechanism") == "gdp")))


def _read(path: Path) -> Any:
    """Read a state from a file of `torch.save` or JSON, without executing code from the file."""
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}. {_SAVE}") from None
    import torch

    path.open("rb").close()  # raises if the file is missing
    try:
        return torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is not a file of torch.save, is truncated, or contains Python objects other than "
            f"numbers and tensors, which checkpoints of Opacus before 1.6 have. {_SAVE}"
        ) from error
