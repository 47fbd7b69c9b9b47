"""Python state of modules: attributes that a forward pass changes depending on a record.

The tape isolates records in tensor operations. A plain attribute (a running mean as a Python float, the
activations of the call before) escapes it: what one record leaves there enters the next one's gradient,
or the next step, without being clipped.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.gradients.checks.attribute_contents import (
    AttributeReader,
    Content,
    copied_there,
    differing_copies,
    holds_record,
    read_later,
)
from hush.gradients.checks.data_dependence import same_draws
from hush.gradients.checks.fixed_attributes import Attribute, FixedAttributes, fixed_attributes
from hush.gradients.checks.host_randomness import HostState, check_host_draws, host_random_state
from hush.gradients.checks.rewind import Restorers, restore, restorers
from hush.gradients.forward.module_tree import ModuleTree
from hush.gradients.tree import tree_leaves, tree_map, watched_passes

_COMPARED_ENTRIES = 4096
"""The largest tensor whose contents are compared in every step."""


class ModuleState:
    """Watches the plain attributes and the buffers of a model, and of a loss and views that are modules.

    **Guarantee.** Where `check` does not raise, no watched attribute has changed since `begin`. Those
    that took the same value for two different records in `probe` (a cache of masks or positions, a
    counter of calls) are put back as they were. After a pass that turned values of records into Python
    numbers, none has changed, or to the value that it took in `probe` alone, before the next pass
    begins. State outside of modules, such as a global dictionary, is not seen.
    """

    def __init__(self, model: nn.Module, loss: Any = None, views: Any = None) -> None:
        self._model = model
        parts = {"": model, "loss": loss, "views": views}
        self._trees = {
            name: ModuleTree(part) for name, part in parts.items() if isinstance(part, nn.Module)
        }
        self._fixed: dict[int, FixedAttributes] = {}
        """By the number of the module, as of the last snapshot."""
        self._record_independent: set[Attribute] = set()
        """Attributes that forward passes change in a way that does not depend on a record."""
        self._constant: dict[Attribute, Content] = {}
        """The same, where passes read values: their contents for both records, which must stay."""
        self._before: dict[Attribute, Content] | None = None
        self._begin_later = False
        """Whether the snapshot of the step at hand is taken when somebody asks for it."""
        self._host_state: HostState | None = None
        """The host's random state before the first forward pass; None: none is known to have run."""
        self._left: dict[Attribute, Content] = {}
        """Attributes that passes of a step which was stopped have changed, with what they were."""
        self._read_later: dict[Attribute, Tensor] = {}
        """Small buffers on a GPU in the last snapshot, of whose contents it has none."""
        self._copies: dict[Attribute, Tensor] = {}
        """Their bytes when the step began."""
        self._rewound: Restorers | None = None
        """Of what passes may change, as it was when the step began; None: before the first pass."""
        self._references: list[Tensor] = []
        """Tensors compared by identity: referenced, so that no other one can get it."""

    @property
    def changing(self) -> bool:
        """Whether forward passes change attributes: known after `probe`."""
        return bool(self._may_change)

    @property
    def _may_change(self) -> set[Attribute]:
        return self._record_independent | self._constant.keys()

    def changing_names(self) -> set[str]:
        """Names of what forward passes change in a way that does not depend on a record."""
        return set(self._names(self._may_change)) if self.changing else set()

    @property
    def before(self) -> object:
        """Contents of the attributes when the step began; None outside of one.

        Without the numbers in small buffers on a GPU, which a captured graph reads where they are.
        """
        if self._begin_later:
            self._begin_later = False
            self._before, self._references = self._snapshot(_COMPARED_ENTRIES)
            self._copies = copied_there(self._read_later)
        return self._before

    @contextmanager
    def watch(self, *, later: bool = False) -> Iterator[None]:
        """Context of forward passes: `begin`, then `check`, or `stop` where something raised."""
        self.begin(later=later)
        try:
            with watched_passes(self._model, self._after_pass):
                yield
            self.check()
        except BaseException:
            self.stop()
            raise

    def _after_pass(self, reads_values: bool) -> None:
        """Put back what a pass may have changed; raise if it has left something of a record.

        Only one that reads values can.
        """
        if reads_values:
            self._refuse_reads_where_state_changes()
            self._refuse_changed()
        self.rewind()

    def _refuse_reads_where_state_changes(self) -> None:
        if self._record_independent:
            names = ", ".join(self._names(self._record_independent)[:3])
            raise Unsupported(
                "the model reads values of records as Python numbers in some of its passes, and changes "
                f"{names} in others, which read none: what it changes in those could be a record's. "
                "Compute without reading values (torch.where for if), or keep no state."
            )

    def begin(self, *, later: bool = False) -> None:
        """Take a snapshot of the attributes, and of the host's random state, after `check_left`.

        Args:
            later: there may be no forward pass: `expect_forward` is called before the first.
        """
        self.check_left()
        self._begin_later, self._before, self._host_state, self._rewound = True, None, None, None
        if not later:
            self.expect_forward()

    def expect_forward(self) -> None:
        """Take the snapshots that `begin` left for later, before a forward pass."""
        if self.before is not None and self._host_state is None:
            self._host_state = host_random_state()
            if self.changing:
                self._rewound = restorers(self._modules(), self._may_change)

    def rewind(self) -> None:
        """Put back what passes since `begin` may have changed: after each, and before each batch."""
        if self._rewound is not None:
            restore(self._modules(), self._may_change, self._rewound)

    def _refuse_changed(self) -> None:
        if self._before is not None and (changed := self._changed(self._before)):
            raise Unsupported(self._reason(changed))

    def check_left(self) -> None:
        """Raise if something is still there that a step which was stopped has left.

        Nothing would tell it from what was there before, and it may be a record's.
        """
        if self._left:
            now, _ = self._snapshot(_COMPARED_ENTRIES)
            self._left = {key: was for key, was in self._left.items() if now.get(key) != was}
        if self._left:
            raise Unsupported(
                f"{self._reason(self._left)} A step that was stopped has left it so: put back what was "
                "there before."
            )

    def check(self) -> None:
        """Raise if a forward pass since `begin` has changed an attribute, before a release.

        So too if it drew from numpy or Python's `random`.
        """
        if self._before is None or self._host_state is None:
            return
        check_host_draws(self._host_state)
        self._refuse_changed()
        self.rewind()
        self._before = None

    def stop(self) -> None:
        """Note what forward passes since `begin` have changed, where the step is not to be finished."""
        if self._before is not None and self._host_state is not None:
            self._left |= self._changed(self._before)
            self.rewind()
        self._before = None

    def _changed(self, before: dict[Attribute, Content]) -> dict[Attribute, Content]:
        """Attributes that have changed and may not have, with what they were."""
        after, _ = self._snapshot(_COMPARED_ENTRIES)
        copies = differing_copies(self._copies, copied_there(self._read_later))
        changed = {key: before.get(key) for key in _differing(before, after)}
        changed |= {key: ("on a device", object()) for key in copies}  # which nothing is equal to
        changed = {key: was for key, was in changed.items() if key not in self._record_independent}
        if any(key in self._constant for key in changed):
            full, _ = self._snapshot()
            changed = {
                key: was for key, was in changed.items() if full.get(key) != self._constant.get(key)
            }
        return changed

    def probe(self, run: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> Any:
        """The value of `run` for a few records, after a check that the model keeps nothing of them.

        Args:
            run: Forward passes over inputs and targets, recorded.
            inputs: Inputs of one or two records.
            targets: Their targets.

        Raises:
            Unsupported: an attribute took a value that depends on a record. It is put back.
        """
        modules = self._modules()
        were = restorers(modules)
        before, _ = self._snapshot(by_identity=True)
        host_state = host_random_state()
        refused = True
        reads: list[bool] = []
        try:
            with watched_passes(self._model, reads.append):
                result = run(inputs, targets)
            check_host_draws(host_state)
            if any(reads):
                self._refuse_reads_where_state_changes()
            changed = _differing(before, self._snapshot(by_identity=True)[0])
            if changed:
                restore(modules, changed, were)
                after = []
                for row in range(len(next(tree_leaves(inputs)))):
                    only_row = partial(_row, row)
                    with same_draws(self._model):
                        run(tree_map(inputs, only_row), tree_map(targets, only_row))
                    after.append(self._snapshot()[0])
                    restore(modules, changed, were)
                self._compare(changed, after)
                self._allow(changed, after[0], reads_values=any(reads))
            refused = False
        finally:
            if refused:
                restore(modules, _differing(before, self._snapshot(by_identity=True)[0]), were)
        return result

    def _compare(self, changed: list[Attribute], after: list[dict[Attribute, Content]]) -> None:
        """Raise if a changed attribute depends on the record."""
        dependent = [
            key
            for key in changed
            if len({state.get(key) for state in after}) > 1 or holds_record(after[0].get(key))
        ]
        if dependent or len(after) == 1:
            raise Unsupported(self._reason(dependent or changed))

    def _allow(
        self, changed: list[Attribute], after: dict[Attribute, Content], *, reads_values: bool
    ) -> None:
        """Let these attributes change, to the same contents only where passes read values."""
        if reads_values:
            self._constant |= {key: after.get(key) for key in changed}
        else:
            known = {key for key in changed if key in self._constant}
            self._record_independent |= {
                key for key in changed if key not in known or self._constant[key] != after.get(key)
            }

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Context of forward passes that leave attributes and buffers as they were."""
        were, (before, _) = restorers(self._modules()), self._snapshot(by_identity=True)
        try:
            yield
        finally:
            changed = _differing(before, self._snapshot(by_identity=True)[0])
            restore(self._modules(), self._may_change.union(changed), were)

    def _modules(self) -> list[nn.Module]:
        """All modules; an attribute knows its own by its place here."""
        return [module for tree in self._trees.values() for module in tree.modules().values()]

    def _snapshot(
        self, max_entries: int | None = None, *, by_identity: bool = False
    ) -> tuple[dict[Attribute, Content], list[Tensor]]:
        """Contents of all watched attributes, and the tensors that were compared by identity."""
        modules = self._modules()
        known = {id(value) for module in modules for value in module._parameters.values()}
        reader = AttributeReader(max_entries, by_identity, known.union(map(id, modules)))
        self._read_later = {}
        contents: dict[Attribute, Content] = {}
        for number, module in enumerate(modules):
            attributes = module.__dict__
            fixed = self._fixed.get(number)
            if fixed is None or not fixed.current(attributes):
                fixed = self._fixed[number] = fixed_attributes(number, attributes, reader)
            if fixed.contents:
                contents.update(fixed.contents)
            for name in fixed.others:
                contents[number, name] = reader.content(attributes[name])
            for name, value in module._buffers.items():
                if value is not None and max_entries is not None and read_later(value, max_entries):
                    contents[number, name] = "read later", value.shape, value.dtype
                    self._read_later[number, name] = value
                else:
                    contents[number, name] = reader.content(value)
        return contents, reader.references

    def _names(self, attributes: Iterable[Attribute]) -> list[str]:
        paths = [f"{root}.{path}" for root, tree in self._trees.items() for path in tree.modules()]
        return [f"{paths[number].strip('.')}.{name}".lstrip(".") for number, name in attributes]

    def _reason(self, attributes: Iterable[Attribute]) -> str:
        names = ", ".join(self._names(attributes)[:3])
        return (
            f"the model keeps {names} from its forward pass: what one record leaves there enters "
            "the gradients of others without being clipped, or is released without noise. Compute "
            "it anew in every call, or set it between steps from what is public."
        )


def _row(row: int, rows: Tensor) -> Tensor:
    return rows[row : row + 1]


def _differing(before: dict[Attribute, Content], after: dict[Attribute, Content]) -> list[Attribute]:
    return [key for key in before | after if before.get(key) != after.get(key)]
