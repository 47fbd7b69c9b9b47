"""Private quantiles of per-record norms, from noisy counts."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger import LedgerOrPath
from hush.clipping import Entries
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.value import Range, Value, check_count, number
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.methods.statistics import release

_EDGE = number(above=0, at_most=1e12, why="the bins are equally spaced in the logarithm", example=1.0)
_QUANTILE = Range(above=0, below=1, why="it is a share of the records", example=0.99)


@dataclass(frozen=True, kw_only=True)
class NoisyQuantile(Value):
    """Quantiles of per-record norms, one per block, from counts with Gaussian noise.

    Norms are counted in `bins` bins with geometrically growing edges from `low` to `high`; norms outside
    count in the first or last bin. A quantile is the upper edge of its bin.

    Args:
        multiplier: Noise multiplier of the counts.
        low: Lower end of the first bin.
        high: Upper end of the last bin.
        bins: Number of bins.

    **Guarantee.** One record adds 1 to one count of each block, for any norm:
    docs/guarantees/public-basis.md. The bins and the quantile must not depend on the data.

    >>> quantile = NoisyQuantile(multiplier=20.0)
    >>> print(quantile.guarantee(blocks=1, delta=1e-5))
    epsilon <= 0.16005 (no lower bound) at delta 1e-05 (dp, zero-out one record, proved, publishable)
    """

    multiplier: float = field(metadata=MULTIPLIER)
    low: float = field(default=1e-3, metadata=_EDGE)
    high: float = field(default=1e3, metadata=_EDGE)
    bins: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bins", check_count("bins", self.bins, "it is the number of bins", 2))
        if self.low >= self.high:
            raise InvalidValue(f"low={self.low:g} must be below high={self.high:g}.", key="low")

    @property
    def edges(self) -> Tensor:
        """Upper edge of each bin."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64).log()
        shares = torch.arange(1, self.bins + 1, dtype=torch.float64) / self.bins
        return (ends[0] + (ends[1] - ends[0]) * shares).exp()

    def plan(self, blocks: int) -> Plan:
        """Plan of the noisy histogram, for the ledger.

        Args:
            blocks: Number of norms per record.
        """
        noise = Gaussian(multiplier=self.multiplier)
        return Plan(sampling=FullBatch(), clipping=Entries(changed=blocks), noise=noise)

    def guarantee(self, blocks: int, delta: float) -> Guarantee:
        """(epsilon, delta) guarantee of the quantiles of all blocks, for this release alone.

        Args:
            blocks: Number of norms per record.
            delta: Failure probability.
        """
        return epsilon(self.plan(blocks), 1, delta)

    def _counts(self, norms: Tensor) -> Tensor:
        """Histogram of each block's norms, of shape (blocks, bins); each record is in one bin
        (sensitive)."""
        # a NaN would not be counted in any bin
        numbers = norms.to("cpu", torch.float64).nan_to_num(nan=self.high)
        bins = torch.bucketize(numbers, self.edges).clamp(max=self.bins - 1)
        counts = torch.zeros(norms.shape[1], self.bins, dtype=torch.float64)
        return counts.scatter_add_(1, bins.T, torch.ones(bins.T.shape, dtype=torch.float64))

    def __call__(
        self,
        norms: Tensor,
        quantile: float,
        ledger: LedgerOrPath,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[float, ...]:
        """Charge the release and return the noisy quantile of each block's norms.

        Args:
            norms: Norms of shape (records, blocks).
            quantile: Fraction of the records below the quantile.
            ledger: Ledger to charge, once for all blocks, or its path.
            generator: Seed of the noise, for tests.
        """
        quantile = _QUANTILE.check("quantile", quantile)
        if norms.dim() != 2 or norms.shape[1] == 0:
            raise DataError(
                f"norms of shape {tuple(norms.shape)} must be records x blocks: a record counts once in "
                "each block."
            )
        plan = self.plan(norms.shape[1])
        sums = ((plan.clipping.reference_norm, self._counts(part)) for part in [norms])
        (noisy,) = release(self, plan, sums, ledger, records=len(norms), generator=generator)
        below = noisy.cumsum(1)
        reached = below >= quantile * below[:, -1:]
        reached[:, -1] = True
        return tuple(self.edges[reached.int().argmax(1)].tolist())
