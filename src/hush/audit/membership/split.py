"""Who is trained on by whom: the attacked model's records, and the attacker's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hush.core.errors import DataError

_SHARES = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Indices of four disjoint parts, 2:1:2:1 (paper 001, section 6.4.2)."""

    target_train: Tensor
    target_test: Tensor
    shadow_train: Tensor
    shadow_test: Tensor

    @property
    def shadow(self) -> Tensor:
        """All that the attacker has."""
        return torch.cat([self.shadow_train, self.shadow_test])


def split(records: int, generator: torch.Generator) -> Split:
    """The records in random order, a third, a sixth, a third and a sixth of them; a rest is left out."""
    if records < 4 * _SHARES:
        raise DataError(
            f"{records} records: split 2:1:2:1 some part would have next to none, and no attack could "
            f"be measured. Pass at least {4 * _SHARES}."
        )
    share = records // _SHARES
    order = torch.randperm(records, generator=generator)[: _SHARES * share]
    train, test, own_train, own_test = order.split([2 * share, share, 2 * share, share])
    return Split(target_train=train, target_test=test, shadow_train=own_train, shadow_test=own_test)
