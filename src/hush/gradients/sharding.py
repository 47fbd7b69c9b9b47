"""Parameters that `fully_shard` has split over ranks: whole only while their module is at work.

FSDP's own hooks attach to the tensors of a plain forward pass, and reduce gradients that were summed
over records; under `vmap`, and for gradients that are clipped one by one, they do not serve. Hooks in
their places do the half that is needed here: gather a module's weights before its forward pass and
before its backward pass, and free them afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.fsdp import FSDPModule

from hush.core.errors import Unsupported
from hush.core.value import with_article


class ShardedModules:
    """Modules of a model whose parameters are split over ranks, and which of them are whole now.

    **Guarantee.** In `gathering`, a module is whole while its forward pass runs and from the gradient of
    its output until the gradient of another module's output is known. autograd works off its nodes in
    the reverse order of their making, so that all nodes that read the module's weights have run by then.
    """

    def __init__(self, model: nn.Module, guarded: Callable[[str], AbstractContextManager[None]]) -> None:
        """Sharded modules of a model; every rank of the group makes one at the same time.

        Args:
            model: with `fully_shard` applied to it, to some of its modules, or both.
            guarded: context for a collective of the given name, which says what its failure means.
        """
        self.modules = {
            name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        self.whole: set[str] = set()
        """Names of the modules whose parameters this rank holds whole now."""
        self.largest = 0
        """Most numbers of whole parameters that this rank has held at one time."""
        self._guarded = guarded
        self._gathering = False
        self._hooks = {name: _Hooks(module) for name, module in self.modules.items()}
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """The parameters as the optimizer has them, each rank with its shard."""
        self.module_of: dict[str, str] = {}
        """Name of the sharded module that a parameter is gathered with."""
        self.gathered: dict[str, nn.Parameter] = {}
        """The parameters as forward passes see them; FSDP fills and empties the same ones every time."""
        for name in self.modules:
            self.enter(name)
            for parameter, value in model.named_parameters():
                if value is not self.parameters[parameter]:
                    self.gathered.setdefault(parameter, value)
                    self.module_of.setdefault(parameter, name)
        self.release()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that require a gradient now, as forward passes see them."""
        return {
            name: self.gathered[name] for name, value in self.parameters.items() if value.requires_grad
        }

    def versions(self) -> list[int]:
        """How often each parameter was written to, other than by gathering it."""
        return [value._version for value in self.gathered.values()]

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Context in which modules are gathered one by one, in forward and in backward passes."""
        if self._gathering:
            yield
            return
        for name, hooks in self._hooks.items():
            hooks.replace(self._before_forward(name), self._after_forward(name))
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            for hooks in self._hooks.values():
                hooks.restore()
            self.release()

    def enter(self, name: str) -> None:
        """Gather a module's parameters, and free those of modules that it is not inside of."""
        path = [other for other in self.modules if _contains(other, name)]
        with (
            torch._C.DisableTorchFunction(),  # of the recording, which takes calls for the model's
            temporarily_clear_interpreter_stack(),
            torch.no_grad(),
            self._guarded("gathering the weights"),
        ):
            for other in self.whole.difference(path):
                self._free(other)
            for other in path:
                if other not in self.whole:
                    self.modules[other].unshard()
                    self.whole.add(other)
        held = sum(
            value.numel() for part, value in self.gathered.items() if self.module_of[part] in self.whole
        )
        self.largest = max(self.largest, held)

    def release(self) -> None:
        """Free the whole parameters of all modules, also where FSDP's own hooks have gathered them."""
        for name in self.modules:
            self._free(name)

    def _free(self, name: str) -> None:
        with (
            torch._C.DisableTorchFunction(),
            temporarily_clear_interpreter_stack(),
            torch.no_grad(),
        ):
            self.modules[name].reshard()
        self.whole.discard(name)

    def _before_forward(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.enter(name)

        return hook

    def _after_forward(self, name: str) -> Callable[..., None]:
        entering = _Entering(self, name)

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for value in _outputs(output, name):
                while is_batchedtensor(value):
                    value = get_unwrapped(value)
                # of an output that is also that of a module inside, or of one before, the nodes that
                # are next are that one's: it is gathered with all around it, and stays so
                if value.requires_grad and not _entered(value):
                    with torch._C.DisableTorchFunction():
                        value.register_hook(entering)
            recomputed = torch._C._current_graph_task_id() != -1  # its backward pass is next
            if name and not recomputed:
                self._free(name)

        return hook


@dataclass(frozen=True, eq=False)
class _Entering:
    """Hook of a module's output, which gathers the module when the output's gradient is known."""

    modules: ShardedModules
    name: str

    def __call__(self, gradient: Tensor) -> None:
        self.modules.enter(self.name)


def _entered(output: Tensor) -> bool:
    """Whether a module is gathered when the gradient of a tensor is known."""
    return any(isinstance(hook, _Entering) for hook in (output._backward_hooks or {}).values())


class _Hooks:
    """The hooks of a module's forward pass that FSDP has registered, and their places."""

    def __init__(self, module: Any) -> None:
        state = module._get_fsdp_state()
        before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
        self._places = (
            (module._forward_pre_hooks, before, module._forward_pre_hooks[before]),
            (module._forward_hooks, after, module._forward_hooks[after]),
        )

    def replace(self, *hooks: Callable[..., None]) -> None:
        for (table, place, _), hook in zip(self._places, hooks, strict=True):
            table[place] = hook

    def restore(self) -> None:
        for table, place, original in self._places:
            table[place] = original


def _contains(outer: str, inner: str) -> bool:
    """Whether a module is another, or has it inside, by their names."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _outputs(output: Any, name: str) -> Iterator[Tensor]:
    """Tensors of a module's output; raises where some may be hidden, and their gradients with them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _outputs(part, name)
    elif isinstance(output, dict):
        for part in output.values():
            yield from _outputs(part, name)
    elif output is not None and not isinstance(output, (bool, int, float, str)):
        raise Unsupported(
            f"the sharded module {name!r} returns {with_article(type(output).__name__)}: its weights "
            "are gathered again when the gradient of its output is known, which is not seen in there. "
            "Return tensors, or tuples, lists and dictionaries of them."
        )
