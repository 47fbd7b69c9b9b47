"""The accounting of the twice-sampling paper, as it is printed: for comparison, never for a charge.

Theorem 5.6 (5.4 where there is one block, 5.2 where all records take part) at the orders 2 to 39,
converted by its Lemma 2.3.
"""

import math
from collections.abc import Sequence

import numpy as np

from hush.accounting.numerics import Array
from hush.core.guarantee import Budget
from hush.core.parts import SensitivitySet
from hush_recipes.twice.search import BlockCost, least_variance

DELTA = 1e-5
PARAMETERS = 291_898
HIGHEST = 39
ORDERS = range(2, HIGHEST + 1)


def conversion(delta: float) -> Array:
    """Epsilon at `delta` less the divergence, at each order (Mironov 2017, Proposition 3)."""
    return np.asarray(-math.log(delta) / (np.array(ORDERS, dtype=float) - 1))


def unit_block(d0: float) -> list[SensitivitySet]:
    """Gradients of norm 1 with no entry above 1 / sqrt(d0)."""
    return [SensitivitySet(p=2.0, norm=1.0, cap=d0**-0.5, dimension=PARAMETERS)]


def sampled(blocks: Sequence[SensitivitySet], rate: float, coordinate_rate: float) -> BlockCost:
    """The cost of a step; in one coordinate `coordinate_rate` alone is what input sampling is."""
    return BlockCost(blocks, rate, coordinate_rate, HIGHEST, both_directions=False)


def plain(rate: float) -> BlockCost:
    """Input sampling under an l2 bound of 1: one coordinate that is moved by 1, or not at all."""
    return sampled([SensitivitySet(p=2.0, norm=1.0, dimension=1)], 1.0, rate)


def published_epsilon(cost: BlockCost, deviation: float, steps: int) -> float:
    """Epsilon of `steps` steps with the same noise in one block."""
    values = cost.at_all(ORDERS, np.array([2 * math.log(deviation)]))
    divergences = steps * np.array([value for value, _ in values])
    return max(0.0, float((divergences + conversion(DELTA)).min()))


def published_variance(cost: BlockCost, ranks: Sequence[int], budget: Budget, steps: int) -> float:
    """The least total variance that keeps the budget."""
    rooms = zip(ORDERS, (budget.epsilon - conversion(budget.delta)) / steps, strict=True)
    limits = {a: float(room) for a, room in rooms if room > 0}
    optimum = least_variance(cost, np.array(ranks, dtype=float), limits, np.zeros(len(ranks)))
    return math.exp(optimum.log_total)
