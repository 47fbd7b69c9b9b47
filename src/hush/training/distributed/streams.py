"""Random streams of several ranks: one that all share, and those that each has for itself.

Draws of slots, and whatever else must come out the same everywhere, are from the shared source. Masks
and noise of a step are from streams under keys that are hashed from a key of the step and the rank, so
that no two ranks, steps or numbers of ranks share one: docs/guarantees/distributed.md, 3.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hush.core.parts import Sampling
from hush.core.randomness import RandomSource, Stream, SystemSource, derive_source, fill_state, substream
from hush.training.distributed.group import Processes


@dataclass(frozen=True)
class SharedSystemSource(SystemSource):
    """Operating system's source of rank 0, whose numbers every rank gets."""

    processes: Processes = field(compare=False)

    def array(self, count: int) -> npt.NDArray[np.int64]:
        own = SystemSource(self.device)
        words: npt.NDArray[np.int64] = self.processes.broadcast_object(
            "shared randomness", partial(own.array, count)
        )
        return words


@dataclass(frozen=True)
class StepStreams:
    """Sources of what one rank draws in one step, beside the slots."""

    masks: Stream
    """Of dropout, views and coins of a clipping."""
    coordinates: RandomSource
    """Of the coordinates that take part."""
    noise: RandomSource


def shared_source(source: RandomSource, processes: Processes) -> RandomSource:
    """Source that gives every rank the numbers of rank 0's.

    Args:
        source: of this rank, of the same kind on all.
        processes: the ranks.
    """
    if isinstance(source, SystemSource):
        return SharedSystemSource(source.device, processes)
    source.set_state(processes.broadcast_object("the shared source", source.get_state))
    return source


def draw_shared(sampling: Sampling, units: int, source: RandomSource) -> torch.Tensor:
    """Indices drawn for a step, the same on every rank.

    Args:
        sampling: of the plan, or of a test.
        units: to draw from.
        source: of the step; where it is shared and has no state, rank 0 tosses the coins and sends who
            was drawn, which is less than a coin for each.
    """
    if not isinstance(source, SharedSystemSource):
        return sampling.draw(units, source)
    own = SystemSource(source.device)
    drawn: torch.Tensor = source.processes.broadcast_object(
        "the draw", lambda: sampling.draw(units, own).cpu()
    )
    return drawn


def step_streams(source: RandomSource, processes: Processes | None) -> StepStreams:
    """Sources of the next step: a process alone draws coordinates and noise from its source itself.

    Args:
        source: of the step, shared by the ranks; it moves on by as much on each.
        processes: the ranks; None: this process alone.
    """
    if processes is None:
        return StepStreams(substream(source), source, source)
    if isinstance(source, SystemSource):
        own = SystemSource(source.device)
        return StepStreams(substream(own), own, own)
    root = substream(source)
    return StepStreams(
        _of_rank(root, "masks", processes),
        _like(source, _of_rank(root, "coordinates", processes)),
        _like(source, _of_rank(root, "noise", processes)),
    )


def rank_source(source: RandomSource, processes: Processes | None, use: str) -> RandomSource:
    """Source for one rank's own use of a step; a process alone uses the step's.

    Args:
        source: of the step, shared by the ranks; it moves on by as much on each.
        processes: the ranks; None: this process alone.
        use: name of the use, different for each of a step.
    """
    if processes is None:
        return source
    if isinstance(source, SystemSource):
        return SystemSource(source.device)
    return _like(source, _of_rank(substream(source), use, processes))


def _of_rank(root: Stream, use: str, processes: Processes) -> Stream:
    """Stream of one rank: its key is hashed from the step's, the use, the rank and the group's size."""
    label = f"{use} of rank {processes.rank} of {processes.size}".encode()
    stream = derive_source(root, label)
    assert isinstance(stream, Stream)
    return stream


def _like(source: RandomSource, stream: Stream) -> RandomSource:
    """A source of the same kind that draws from the stream, or from a state of it."""
    if not isinstance(source, torch.Generator):
        return stream
    generator = torch.Generator(source.device)
    fill_state(generator, stream)
    return generator
