"""Errors of torch on a record's data, or under `vmap`, in words that help and show no value."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch._C._functorch import is_batchedtensor

from hush.core.errors import DataError, HushError, Unsupported
from hush.gradients.tree import submodules


@contextmanager
def translate_data_errors(model: nn.Module) -> Iterator[None]:
    """Context that says which dtypes, shapes or indices do not fit.

    torch's own errors speak of its kernels, and show the private value of an index out of range.
    """
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, HushError):
            raise
        # Python's own errors, and those on dimensions, are of the code
        of_code = re.match("(list|tuple|string|range object|Dimension|pop) .*out of range", str(error))
        if re.search("out of (bounds|range)|not in the valid range", str(error)) and not of_code:
            raise DataError(
                "an index of some record is out of range: a label that is no class, a token that is not "
                "in the embedding, or a sequence longer than its positions (the value is private and "
                "not shown). Check the labels and inputs against the model's sizes."
            ) from None
        if "escaped from inside a function being vmapped" in str(error):
            raise Unsupported(
                "the model or the loss keeps a tensor of a record from one pass to the next, outside of "
                "its modules (in a global list, a closure or a cache): what one record leaves there "
                "would enter the gradients of others without being clipped. Compute it anew in every "
                "call."
            ) from error
        text = str(error).split("\n", maxsplit=1)[0]
        reasons = [reason for pattern, reason in _MISMATCHES.items() if re.search(pattern, text)]
        if not reasons:
            raise
        kind = str(next(model.parameters()).dtype)
        raise DataError(reasons[0].format(text=text, kind=kind)) from error


_MISMATCHES = {
    "same (dtype|datatype)|mixed dtype|expected scalar type|[Ii]nput type": (
        "the inputs, or class weights of the loss, are of another type than the model, which computes "
        "in {kind} ({text}): torch does not convert them. Pass inputs.to({kind}), or a model of the "
        "inputs' type; of weights, loss.to({kind})."
    ),
    "target dtype|Expected dtype int32/int64 for index": (
        "the labels are of a type that numbers no classes ({text}). Pass targets.long(), or "
        "floating-point probabilities of shape (records, classes)."
    ),
    "can't be cast to the desired output type": (
        "the targets are of another type than the outputs ({text}): a loss of differences needs "
        "floating-point ones. Pass targets.float()."
    ),
    "scalar types: Long, Int": (
        "numbers of an embedding's rows are of a type that numbers nothing ({text}). Pass inputs.long()."
    ),
    "arget size[^s]": (
        "the outputs and the targets of a record have different shapes ({text}): broadcast against "
        "each other they would compare records. Pass targets of the outputs' shape, e.g. "
        "targets.unsqueeze(1) for outputs of shape (records, 1)."
    ),
    "cannot be multiplied|Given (groups|normalized_shape)|must match the (existing )?size": (
        "the shapes of a record's tensors do not fit each other or the model ({text}). Check the "
        "model's sizes against the data's, without the first dimension, which is the records."
    ),
}
"""Patterns of torch's errors on dtypes and shapes, which are not private, and their meaning here."""


@contextmanager
def translate_vmap_errors(model: nn.Module, reads_values: Callable[[], bool]) -> Iterator[None]:
    """Context that says what an error of `vmap` means for privacy, and restores replaced buffers.

    Where the model has read a value, any new buffer could hold something of a record.
    """
    before = [(module, dict(module._buffers)) for module in submodules(model)]
    try:
        with translate_data_errors(model):
            yield
    except RuntimeError as error:
        if re.search("modified (by an )?in-?place|in-?place operation", str(error)):
            raise Unsupported(
                "the model changes a value in place that its gradient is still to be computed from, "
                "such as one it derives from its parameters (w = self.weight * 2, then w.mul_(3)): "
                "each record's gradient would be that of other weights. Make a new tensor: w = w * 3."
            ) from error
        if "setup_context" in str(error):
            raise Unsupported(
                "the model has an autograd.Function whose forward() takes the context: torch cannot run "
                "it for each record on its own, and a record's own gradient is what is clipped. Write "
                "it in plain torch operations, or with setup_context and generate_vmap_rule = True. (Of "
                "Bloom: for block in model.transformer.h: block.mlp.gelu_impl = "
                'torch.nn.GELU("tanh").)'
            ) from error
        # autograd's own functions in forward() see no graph below vmap
        if not re.search("vmap|functorch|storage|Batching rule|not require grad", str(error)):
            raise
        raise Unsupported(
            "the model or the loss does something that cannot be done for each record on its own, and "
            f"a record's own gradient is what is clipped: {str(error).splitlines()[0]}"
        ) from error
    finally:
        replaced = []
        for module, buffers in before:
            for name, buffer in buffers.items():
                current = module._buffers.get(name)
                if (
                    current is not None
                    and current is not buffer
                    and (reads_values() or is_batchedtensor(current))
                ):
                    module._buffers[name] = buffer
                    replaced.append(name)
    if replaced:
        raise Unsupported(
            f"the model replaces its buffer(s) {', '.join(replaced)} by what it computes for a record: "
            "what it keeps of the records would be released without noise. Use a module without running "
            "statistics."
        )
