"""Importance sampling by gradient norm (DPIS), as a clipping rule."""

from dataclasses import dataclass
from typing import ClassVar

from hush.clipping.norms import L2Ball, taper
from hush.core.errors import Unsupported
from hush.core.parts import Clipping, Proof
from hush.core.tape import ClippedSum, CoordinateMask, Tape

_NEGLIGIBLE = 1e-6
"""Relative norm below which a gradient adds nothing: it would be drawn as rarely as that."""


@dataclass(frozen=True, kw_only=True)
class Importance(L2Ball, Clipping):
    """A record adds its gradient scaled *to* the norm `norm`, or nothing; on average its clipped one.

    After Wei et al. 2022. A gradient of Euclidean norm r is added with chance min(r / norm, 1), so that
    under a Poisson rate q a record takes part with chance q min(r / norm, 1) and is weighed by the
    inverse. docs/guarantees/baselines.md: it is charged as `L2` is, and has the same noise and more
    variance.

    Args:
        norm: Clipping norm.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "FullBatch"), noises=("Gaussian",), note="baselines.md"),
    )

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Importance draws whole records, and nothing is proved of their coordinates one by one. "
                "Sample with Poisson or FullBatch."
            )
        import torch

        norms = tape.norms(2.0)
        finite = norms.isfinite()
        # From torch's own source, which the private step has seeded; the charge holds for any coin.
        drawn = torch.rand_like(norms) * self.norm < norms
        # Scaling up what is next to nothing would scale up the rounding of its norm.
        drawn &= finite & (norms > _NEGLIGIBLE * self.norm)
        weights = (self.norm / norms * taper(self.norm, norms)).where(drawn, 0.0)
        return ClippedSum(total=tape.weighted_sum(weights), skipped=(~finite).sum())
