"""Embeddings: rows of a table looked up by index."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hush.core.errors import Unsupported
from hush.gradients.factors import RowFactors

if TYPE_CHECKING:
    from hush.gradients.interception import Recording, Weight


@dataclass(frozen=True, eq=False)
class Lookup:
    """The rows of a table at each record's indices; the padding row is never trained."""

    weight: "Weight"
    padding: int | None

    def forward(self, index: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return functional.embedding(index, self.weight.value), (index,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        index = saved[0].flatten(1) if saved[0].dim() > 1 else saved[0].unsqueeze(1)
        right = grad.reshape(*index.shape, grad.shape[-1])
        if self.padding is not None:
            right = right.masked_fill((index == self.padding).unsqueeze(-1), 0)
        assert self.weight.terms is not None
        self.weight.terms.append(RowFactors(index, right, self.weight.value.shape))
        return (None,)


def embedding(
    recording: "Recording",
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """The rule for `F.embedding`; `sparse` makes no difference to a sum that gets noise everywhere."""
    _check_not_rescaled(max_norm)
    weights = recording.as_weights(weight)
    if weights is None or weights[0] is None:
        return NotImplemented
    if scale_grad_by_freq:
        raise Unsupported(
            "an Embedding with scale_grad_by_freq divides a record's gradient by how often the whole "
            "batch uses a row, so one record changes the others' gradients. Leave it out."
        )
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    layer = Lookup(weights[0], padding)
    return recording.run_batched(partial(recording.capture, layer), index)


def embedding_bag(
    recording: "Recording",
    index: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    *others: Any,
    **options: Any,
) -> Any:
    """The rule for `F.embedding_bag`: the general way, once it is known to change no row."""
    _check_not_rescaled(max_norm)
    return NotImplemented


def _check_not_rescaled(max_norm: float | None) -> None:
    """Raise before torch rescales the rows in place, which it does to frozen ones too."""
    if max_norm is not None:
        raise Unsupported(
            "an embedding with max_norm rescales the rows that a batch uses, so the weights show which "
            "rows those were. Leave max_norm out."
        )
