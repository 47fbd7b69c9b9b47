"""Differentially private quantiles of norms from a noisy histogram: thresholds without public data."""

import secrets
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import Entries
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.randomness import derive_source, source_for
from hush.core.value import Value, check_count, check_kind, number
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.distributed.process_group import check_first_rank
from hush.training.methods.public_gradients import QUANTILE
from hush.training.phases.private_gradient import fingerprint

_EDGE = number(above=0, at_most=1e12, why="norms are sorted by their logarithm", example=1.0)


@dataclass(frozen=True, kw_only=True)
class NoisyQuantile(Value):
    """Quantiles of per-record norms, one a block, from counts with Gaussian noise.

    Norms are counted in `bins` that grow by one factor from `low` to `high`; what is outside counts
    in the first or the last. A quantile is the upper edge of its bin.

    Args:
        multiplier: noise multiplier of the counts.
        low: lower end of the first bin.
        high: upper end of the last bin.
        bins: number of bins.

    **Guarantee.** One record adds 1 to one count of each block, whatever its norm is, so the noisy
    counts cost as much as `plan(blocks)` says, and the quantiles are functions of them:
    docs/guarantees/public-basis.md. The bins and the quantile must not depend on the data.

    >>> quantile = NoisyQuantile(multiplier=20.0)
    >>> print(quantile.guarantee(blocks=1, delta=1e-5))
    epsilon <= 0.16004 (and >= 0) at delta 1e-05 (dp, zero-out one record, proved, publishable)
    """

    multiplier: float = field(metadata=MULTIPLIER)
    low: float = field(default=1e-3, metadata=_EDGE)
    high: float = field(default=1e3, metadata=_EDGE)
    bins: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bins", check_count("bins", self.bins, "norms are sorted into them", 2))
        if self.low >= self.high:
            raise InvalidValue(f"low={self.low:g} must be below high={self.high:g}.", key="low")

    @property
    def edges(self) -> Tensor:
        """Upper edge of each bin."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64).log()
        shares = torch.arange(1, self.bins + 1, dtype=torch.float64) / self.bins
        return (ends[0] + (ends[1] - ends[0]) * shares).exp()

    def plan(self, blocks: int) -> Plan:
        """Plan of the noisy histogram, as a ledger charges it.

        Args:
            blocks: norms that each record has.
        """
        return Plan(
            sampling=FullBatch(),
            clipping=Entries(changed=blocks),
            noise=Gaussian(multiplier=self.multiplier),
        )

    def guarantee(self, blocks: int, delta: float) -> Guarantee:
        """(epsilon, delta) guarantee of the quantiles of all blocks together, on their own.

        Args:
            blocks: norms that each record has.
            delta: of the guarantee.
        """
        return epsilon(self.plan(blocks), 1, delta)

    def counts(self, norms: Tensor) -> Tensor:
        """Histogram of each block's norms (blocks, bins): each record in exactly one bin (sensitive).

        Args:
            norms: A row a record, a column a block.
        """
        # a NaN sorts nowhere, and would be a count that is missing
        numbers = norms.to("cpu", torch.float64).nan_to_num(nan=self.high)
        bins = torch.bucketize(numbers, self.edges).clamp(max=self.bins - 1)
        counts = torch.zeros(norms.shape[1], self.bins, dtype=torch.float64)
        return counts.scatter_add_(1, bins.T, torch.ones(bins.T.shape, dtype=torch.float64))

    def __call__(
        self,
        norms: Tensor,
        quantile: float,
        ledger: Ledger,
        *,
        generator: torch.Generator | None = None,
        secure: bool = False,
    ) -> tuple[float, ...]:
        """Noisy quantile of each block's norms, charged before it is known.

        Args:
            norms: of shape (records, blocks).
            quantile: share of the records below it.
            ledger: ledger to charge, once for all blocks.
            generator: seeds the noise, so that it can be repeated: for tests.
            secure: draw noise from the operating system.

        Returns:
            One a block, which may be published with the guarantee.
        """
        check_first_rank(type(self).__name__)
        quantile = QUANTILE.check("quantile", quantile)
        check_kind("ledger", ledger, Ledger).check_adjacency()
        if norms.dim() != 2 or norms.shape[1] == 0:
            raise DataError(
                f"norms of shape {tuple(norms.shape)} need one row a record and one column a block: "
                "a record may count once in each block only."
            )
        counts, plan = self.counts(norms), self.plan(norms.shape[1])
        source = derive_source(
            source_for(counts.device, generator, secure=secure), ledger.stream_label()
        )
        noisy = plan.noise.privatize(counts.clone(), norm=plan.clipping.reference_norm, generator=source)
        ledger.charge(
            plan,
            run=secrets.token_hex(8),
            step=1,
            release=fingerprint([noisy]),
            randomness="secret" if generator is None else "seeded",
            records=len(norms),
        )
        below = noisy.cumsum(1)
        reached = below >= quantile * below[:, -1:]
        reached[:, -1] = True
        return tuple(self.edges[reached.int().argmax(1)].tolist())
