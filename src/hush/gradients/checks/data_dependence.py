"""Data-dependent control flow: each record takes its own branch, in a batch of the same shape."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.core.randomness import Stream, fill_state
from hush.gradients.tree import tree_leaves, tree_map

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Records of a batch that took the same branch, and their places in the batch computed for it."""

    rows: Tensor
    """Which records of the batch."""
    places: Tensor
    """Their places in the computed batch; the other places held copies and count for nothing."""

    def spread(self, values: Tensor, size: int) -> Tensor:
        """Values of the whole batch at these places of a batch of `size`, zero elsewhere."""
        return values.new_zeros(size).index_put((self.places,), values[self.rows])


class DataDependentBranch(BaseException):
    """Raised where records branch differently; no error, so that no model catches it as one.

    `values` are the truth values by place, None if every record is to be computed alone.
    """

    def __init__(self, values: Tensor | None) -> None:
        super().__init__("records decide differently")
        self.values = values


class SharedWrite(Unsupported):
    """Raised where something of a record is written into a tensor that all records share.

    `constant` is the number of that tensor among the constants that the pass has made, None if it was
    there before: then it must not be written.
    """

    def __init__(self, message: str, target: Tensor) -> None:
        super().__init__(message)
        self.target = target
        self.constant: int | None = None


class Path:
    """The truth values that the records of one pass read, in order, and what they draw after each.

    Records at `rows` decide; those at other places are copies that go along. A decision may hang on what
    a record has drawn: it draws the same again in the pass of its branch. After a decision against, it
    draws from a stream of its path's own, whatever the others decide, so that no two records share a
    number: docs/guarantees/tape.md, 3.
    """

    def __init__(
        self,
        rows: Tensor,
        states: list[Tensor],
        decisions: tuple[bool, ...] = (),
        *,
        own_constants: frozenset[int] = frozenset(),
    ) -> None:
        self.rows = rows
        self.decisions = decisions
        """Those known from earlier passes, then those of this one."""
        self.own_constants = own_constants
        """Constants that the model makes, by number, of which each record has a copy to write into."""
        self.reads_values = False
        """Whether a truth value or number of a record was read, or decided on a shape."""
        self.lockstep = False
        """Whether the pass ends where a value is read, whatever it is: other ranks end theirs there."""
        self.error_raised = False
        """Whether a call has raised, which values may decide on: known to the model if it goes on."""
        self.interruption: DataDependentBranch | SharedWrite | None = None
        """Why the pass is computed again, even if the model catches it."""
        self._states = states
        self._seeds = _seeds()
        self.rerun = bool(own_constants or decisions)
        """Whether the records were computed before, up to an interruption."""
        self._known, self._read = len(decisions), 0

    def truth_value(self, values: Tensor) -> bool:
        """The truth value that all records share; raises `DataDependentBranch` if they differ.

        Args:
            values: (places, ...), one number a place.
        """
        if values[0].numel() != 1:
            raise RuntimeError("the value of a tensor with more than one element is ambiguous")
        self.check_not_seeded()
        self._note_read()
        by_place = values.flatten().bool().to(self.rows.device)
        by_record = set(by_place[self.rows].tolist())
        if self._read < self._known:
            if by_record != {self.decisions[self._read]}:
                raise Unsupported(
                    "the model decides otherwise when the same records are computed again with the same "
                    "random numbers: by something that is neither the record nor drawn by torch, or by "
                    "a kernel that rounds differently each time, and what a record adds would depend on "
                    "the others. Decide by the record, or choose with torch.where."
                )
        elif len(by_record) > 1:
            self.interrupt(DataDependentBranch(by_place))
        else:
            self.decisions = (*self.decisions, *by_record)
        self._read += 1
        decision = self.decisions[self._read - 1]
        if not decision:
            self.reseed()
        return decision

    @property
    def read(self) -> int:
        """How many truth values were read so far."""
        return self._read

    @contextmanager
    def recomputing(self, read: int) -> Iterator[None]:
        """Context in which a part of the pass is computed again, from where `read` values were read."""
        before = self._known, self._read, self._seeds
        self._known, self._read, self._seeds = len(self.decisions), read, _seeds()
        try:
            yield
            self.check_not_seeded()
        finally:
            self._known, self._read, self._seeds = before

    def check_alone(self, records: int) -> None:
        """Raise `DataDependentBranch` where there are several records, before a number is read."""
        self._note_read()
        if records > 1:
            self.interrupt(DataDependentBranch(None))

    def note_error(self, records: int) -> None:
        """Note an error of a call, which one record's values may have caused: each record is run alone.

        A model that catches the error would decide by it for all of them.
        """
        self.error_raised = True
        if records > 1 and not self.lockstep:
            self.interrupt(DataDependentBranch(None))

    def note_caught_error(self) -> None:
        """Count an error as a value read, where the model has caught it and goes on."""
        if self.error_raised:
            self.error_raised = False
            self._note_read()

    def _note_read(self) -> None:
        self.reads_values = True
        if self.lockstep:
            self.interrupt(DataDependentBranch(None))

    def interrupt(self, reason: "DataDependentBranch | SharedWrite") -> NoReturn:
        """End the pass, to compute its records again."""
        self.interruption = reason
        raise reason

    def check_not_seeded(self) -> None:
        """Raise if torch draws from another stream than that of the path."""
        if any(now != own for now, own in zip(_seeds(), self._seeds, strict=False)):
            raise Unsupported(
                "the model seeds torch in forward(), or sets its random state back to what it was "
                "before it decided by a value (torch.manual_seed, fork_rng around an `if`): records "
                "that decide differently would draw the same numbers, and what is proved of sampling "
                "takes them to be independent. Leave it out, or decide outside of it."
            )

    def end(self, written: bool) -> None:
        """Raise what interrupted the pass, also where the model has caught it.

        Args:
            written: whether the pass wrote into the inputs or the model, and so cannot be run again.
        """
        if self.interruption is None:
            return
        if written and isinstance(self.interruption, SharedWrite):
            raise Unsupported(str(self.interruption))
        if written:
            raise Unsupported(
                "the model writes into its inputs or buffers and then decides by a value: records that "
                "decide differently are worked out again, and what is written twice would tell that "
                "there are some. Decide first, or write nothing."
            )
        raise self.interruption

    def reseed(self, *label: int) -> None:
        """Let torch draw from a stream of these decisions and this label, in this batch."""
        name = repr((self.decisions[: self._read], label)).encode()
        states = b"".join(state.numpy().tobytes() for state in self._states)
        stream = Stream(torch.device("cpu"), hashlib.sha256(states + name).digest())
        for generator in _shared_generators():
            fill_state(generator, stream)
        self._seeds = _seeds()

    def begin(self) -> None:
        """Start a pass: the stream from which torch draws now is the path's."""
        if self.rerun:
            set_random_state(self._states)
        self._seeds = _seeds()


def run_by_branch(
    run: Callable[[Any, Any, Path], T],
    inputs: Any,
    targets: Any,
    after_pass: Callable[[bool], None] | None = None,
) -> "list[tuple[SubBatch, T]]":
    """Results of `run` for sub-batches whose records take the same branches; they partition the batch.

    **Guarantee.** What is computed for a record is a function of that record, its place, the size of
    the batch and torch's random state: others are replaced by copies of one that branches as it does,
    not taken out, because a kernel rounds by place and shape. A record that is read as a number is
    computed alone.

    Args:
        run: computes something for a batch; reads truth values and numbers by way of the path.
        inputs: of the batch.
        targets: of the batch.
        after_pass: called after every run, with whether it has read a value: whoever comes next must
            find nothing of these records.
    """
    after_pass = after_pass or (lambda reads_values: None)
    first = next(tree_leaves(inputs))
    indices = torch.arange(len(first), device=first.device)
    states = random_state()
    results: list[tuple[SubBatch, T]] = []
    pending = [Path(indices, states)]
    while pending:
        path = pending.pop()
        some_inputs, some_targets = inputs, targets
        if len(path.rows) < len(indices):
            source = path.rows[:1].repeat(len(indices)).index_copy(0, path.rows, path.rows)
            some_inputs, some_targets = tree_map((inputs, targets), partial(_take_rows, source))
        path.begin()
        try:
            result = run(some_inputs, some_targets, path)
            after_pass(path.reads_values)
            results.append((SubBatch(path.rows, path.rows), result))
        except SharedWrite as error:
            if error.constant is None:
                raise
            after_pass(path.reads_values)
            # a copy may be read where the constant was: decisions are not known before
            pending.append(Path(path.rows, states, own_constants=path.own_constants | {error.constant}))
        except DataDependentBranch as branch:
            after_pass(path.reads_values)
            if branch.values is None:
                results += _run_alone(run, inputs, targets, path, after_pass)
                continue
            for decision in (False, True):
                rows = path.rows[branch.values[path.rows] == decision]
                decisions = (*path.decisions, decision)
                pending.append(Path(rows, states, decisions, own_constants=path.own_constants))
    return results


def _run_alone(
    run: Callable[[Any, Any, Path], T],
    inputs: Any,
    targets: Any,
    path: Path,
    after_pass: Callable[[bool], None],
) -> "list[tuple[SubBatch, T]]":
    """Results of `run` for each record of a path in a batch of one, with random numbers of its own."""
    results = []
    for row in path.rows.split(1):
        path.reseed(int(row))
        some_inputs, some_targets = tree_map((inputs, targets), partial(_take_rows, row))
        alone = run_by_branch(run, some_inputs, some_targets, after_pass)
        results += [(SubBatch(row, part.places), result) for part, result in alone]
    return results


def gather_records(parts: "list[tuple[SubBatch, Tensor]]") -> Tensor:
    """Values computed by sub-batch, in the order of the records of the whole batch."""
    values = torch.cat([computed[part.places] for part, computed in parts])
    return values[torch.cat([part.rows for part, _ in parts]).argsort()]


def _shared_generators() -> list[torch.Generator]:
    """Torch's shared generators: a captured CUDA graph advances its own."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def _seeds() -> list[int]:
    """Seeds of torch's shared generators, by which states of one stream are told from another's."""
    return [generator.initial_seed() for generator in _shared_generators()]


def random_state() -> list[Tensor]:
    """States of torch's shared generators."""
    return [generator.get_state() for generator in _shared_generators()]


def set_random_state(states: list[Tensor]) -> None:
    """Set torch's shared generators to states that `random_state` returned."""
    for generator, state in zip(_shared_generators(), states, strict=True):
        generator.set_state(state)


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Context in which torch draws the same numbers each time; its generators are left as they were."""
    with torch.random.fork_rng({value.device for value in model.parameters() if value.is_cuda}):
        torch.manual_seed(0)
        yield


def _take_rows(index: Tensor, rows: Tensor) -> Tensor:
    return rows[index.to(rows.device)]
