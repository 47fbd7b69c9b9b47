"""How the bases of subspaces are found: principal directions of public gradients."""

from dataclasses import dataclass

from hush.core.number import check_count
from hush.core.value import Value


@dataclass(frozen=True, kw_only=True)
class Principal(Value):
    """Block power iteration with deflation on the gradients of public records.

    Algorithm 4 of the twice-sampling paper.

    The parameters are split into `groups` of about equal size, each with bases of its own: that takes
    so many times less memory, and so many times fewer public records. The bases are found anew every
    `every` steps, in `iterations` rounds.

    >>> Principal(groups=4).to_plain()
    {'groups': 4, 'every': 100, 'iterations': 3}
    """

    groups: int = 4
    every: int = 100
    iterations: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (
            ("groups", "the parameters are split into so many"),
            ("every", "the bases serve so many steps"),
            ("iterations", "the first round already starts from random directions"),
        ):
            object.__setattr__(self, name, check_count(name, getattr(self, name), why, at_least=1))
