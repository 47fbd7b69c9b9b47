"""Parameters sharded by `fully_shard`, gathered only while their module runs.

FSDP's hooks reduce gradients that are already summed over records, and do not support `vmap` or
per-sample clipping. `ShardedModules` replaces these hooks by hooks that gather the weights of a module
before its forward and backward pass, and free them afterwards.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.fsdp import FSDPModule

from hush.core.errors import Unsupported
from hush.core.value import with_article
from hush.gradients.models import WholeModules


class ShardedModules(WholeModules):
    """Access to the sharded parameters of a model, gathered and freed by module.

    **Guarantee.** Inside `gathering`, the weights of a module are gathered during its forward pass. In
    the backward pass they are gathered when the gradient of the module's output is available, and freed
    when the gradient of another module's output is available. Autograd runs nodes in the reverse order
    of their creation, so all nodes that read the weights have run before the weights are freed.
    """

    sharded = True

    def __init__(self, model: nn.Module, guarded: Callable[[str], AbstractContextManager[None]]) -> None:
        """Collect the sharded modules of a model; a collective call on all ranks."""
        self.modules = {
            name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        self.whole: set[str] = set()
        """Names of the currently gathered modules."""
        self._guarded = guarded
        self._gathering = False
        self._hooks: list[tuple[dict[int, Any], int, Any, Any]] = []
        """Hook dictionary of a module, key of FSDP's hook, original hook, and replacement."""
        module: Any
        for name, module in self.modules.items():
            state = module._get_fsdp_state()
            first, last = module._forward_pre_hooks, module._forward_hooks
            before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
            self._hooks.append((first, before, first[before], partial(self.enter, name)))
            self._hooks.append((last, after, last[after], partial(self._after_forward, name)))
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """Parameters of the optimizer: this rank's shards."""
        self.module_of: dict[str, str] = {}
        """Name of the sharded module of each parameter, by parameter name."""
        self.gathered: dict[str, nn.Parameter] = {}
        """Parameters that forward passes use; FSDP fills and frees them."""
        for name in self.modules:
            self.enter(name)
            for parameter, value in model.named_parameters():
                if value is not self.parameters[parameter]:
                    self.gathered.setdefault(parameter, value)
                    self.module_of.setdefault(parameter, name)
        self.release()

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {
            name: self.gathered[name] for name, value in self.parameters.items() if value.requires_grad
        }

    def shards(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [self.parameters[name] for name in names]

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Context that gathers modules one by one in forward and backward passes."""
        if self._gathering:
            yield
            return
        for table, place, _, own in self._hooks:
            table[place] = own
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            for table, place, original, _ in self._hooks:
                table[place] = original
            self.release()

    def enter(self, name: str, *_: Any) -> None:
        """Gather the parameters of a module, and free modules that do not contain it.

        This is a hook for the forward pass of the module and for the gradient of its output.
        """
        path = [
            other for other in self.modules if not other or name == other or name.startswith(f"{other}.")
        ]
        with (
            torch._C.DisableTorchFunction(),  # the recording must not intercept these calls
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

    def release(self) -> None:
        """Free the gathered parameters of all modules, including those gathered by FSDP's hooks."""
        for name in self.modules:
            self._free(name)

    def _free(self, name: str) -> None:
        with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack(), torch.no_grad():
            self.modules[name].reshard()
        self.whole.discard(name)

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for value in _outputs(output, name):
            while is_batchedtensor(value):
                value = get_unwrapped(value)
            # the output of an inner module may also be this module's output; its hook gathers both
            hooks = (value._backward_hooks or {}).values()
            gathers = any(getattr(hook, "func", None) == self.enter for hook in hooks)
            if value.requires_grad and not gathers:
                with torch._C.DisableTorchFunction():
                    value.register_hook(partial(self.enter, name))
        recomputed = torch._C._current_graph_task_id() != -1  # the backward pass follows
        if name and not recomputed:
            self._free(name)


def _outputs(output: Any, name: str) -> Iterator[Tensor]:
    """Iterate over the tensors of a module's output; raise for unsupported types."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _outputs(part, name)
    elif output is not None and not isinstance(output, (bool, int, float, str)):
        raise Unsupported(
            f"the sharded module {name!r} returns {with_article(type(output).__name__)}: weights are "
            "gathered when gradients of the output arrive, and hush cannot find the tensors in such an "
            "object. Return tensors, or tuples, lists and dictionaries of tensors."
        )
