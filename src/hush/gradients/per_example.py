"""Per-example gradients through `torch.func`: simple, general, and kept whole for one batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hush.core.errors import Unsupported

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of a batch to one value per record."""


@dataclass(frozen=True)
class PerExample:
    """A tape that holds every record's gradient: name -> (records, *shape).

    Norms and sums are worked out in single precision at least, whatever the model or autocast use:
    a sum rounded to half precision can jump by many clipping norms when one record joins it.
    """

    gradients: dict[str, Tensor]

    def norms(self, order: float) -> Tensor:
        per_parameter = [
            torch.linalg.vector_norm(_precise(gradient).unsqueeze(-1).flatten(1), ord=order, dim=1)
            for gradient in self.gradients.values()
        ]
        total: Tensor = torch.linalg.vector_norm(torch.stack(per_parameter), ord=order, dim=0)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        keep = weights != 0
        rows = slice(None) if bool(keep.all()) else keep
        with torch.autocast(weights.device.type, enabled=False):
            return {
                name: torch.tensordot(weights[rows].to(part.dtype), part[rows], dims=1)
                for name, gradient in self.gradients.items()
                for part in (_precise(gradient),)
            }


def record(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> PerExample:
    """The tape of one batch: the gradient of each record's own loss.

    Every record is a batch of one to the model, so no other record enters its gradient, unless the
    model keeps what it saw in attributes of its own (buffers are watched; plain Python is not). Only
    parameters that require a gradient take part.
    """
    values = {name: value.detach() for name, value in model.named_parameters()}
    trainable = {k: values[k] for k, v in model.named_parameters() if v.requires_grad}
    if len(inputs) == 0:
        return PerExample({k: v.new_zeros(0, *v.shape) for k, v in trainable.items()})
    buffers = dict(model.named_buffers())
    places = _places(model)

    def one_loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        known = values | parameters
        filled = {place: known[name] for place, name in places.items()}
        output = functional_call(model, (filled, buffers), (x.unsqueeze(0),), tie_weights=False)
        each = loss(output, y.unsqueeze(0))
        if each.shape != (1,):
            raise Unsupported(
                f"the loss returned shape {tuple(each.shape)} for a batch of one record, not (1,): "
                "each record's own gradient is clipped, and a loss that is already reduced has no "
                'such thing. Pass one with reduction="none", e.g. torch.nn.CrossEntropyLoss('
                'reduction="none"), or a loss module that says how it reduces.'
            )
        return each[0]

    one_gradient = grad(one_loss)
    try:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            # Recurrent layers have no batching rule; a loop over records is what vmap would do.
            rows = [one_gradient(trainable, x, y) for x, y in zip(inputs, targets, strict=True)]
            return PerExample({k: torch.stack([row[k] for row in rows]) for k in trainable})
        every_gradient = vmap(one_gradient, in_dims=(None, 0, 0), randomness="different")
        return PerExample(every_gradient(trainable, inputs, targets))
    except RuntimeError as error:
        if "vmap" in str(error):
            raise Unsupported(
                "the model or the loss does something that cannot be done for each record on its own, "
                f"and a record's own gradient is what is clipped: {str(error).splitlines()[0]}"
            ) from error
        if "would mutate a captured Tensor" not in str(error):
            raise
        raise Unsupported(
            "the model changes one of its buffers during the forward pass: what it keeps of the "
            f"records would leave the room without noise (buffers: {', '.join(buffers)}). Use a "
            "module without running statistics."
        ) from error


def _precise(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _places(model: nn.Module) -> dict[str, str]:
    """Every place that holds a parameter, once, with the name the parameter is known by.

    Left to itself, `functional_call` fills a module that is used twice two times over and then
    puts a stand-in back where the parameter was.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{prefix}.{name}" if prefix else name: names[parameter]
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
