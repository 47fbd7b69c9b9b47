"""Gradient checkpointing on the tape, against the tape of the same model without it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import Path, random_state
from hush.gradients.forward import checkpointing
from hush.gradients.forward.interception import Recording
from hush.gradients.recording import per_sample_losses, record
from hush.gradients.tree import tree_leaves
from hush.training.checks.probe_batch import activations

RECORDS = 5
recomputed = partial(checkpoint, use_reentrant=False)
Checkpoint = Callable[..., Any]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """All per-sample gradients, in the order in which the tape has them."""
    chunks = record(model, cross_entropy, inputs, targets).chunks()
    return [part.clone() for _, parts in chunks for part in parts.values()]


class Transformer(nn.Module):
    """Two layers of a stock transformer, with dropout and a scale that is derived from a parameter."""

    def __init__(self, through: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.through = through
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.randn(8))
        self.scores = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = self.through(lambda x, layer=layer: layer(x) * self.scale.tanh(), x)
        scores: Tensor = self.scores(x.mean(1))
        return scores


class Parts(nn.Module):
    """Layers that the segments below are made of."""

    def __init__(self, segment: "Segment", through: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.segment, self.through = segment, through
        self.weight = nn.Parameter(torch.randn(4))
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.segment(self, x))
        return scores


Segment = Callable[[Parts, Tensor], Tensor]


def derived_value(parts: Parts, x: Tensor) -> Any:
    """Saves nothing for the records' own graph: it is recomputed for the derived value alone."""
    return parts.second(parts.through(lambda x: x + parts.weight.tanh(), parts.first(x)))


def parameters_alone(parts: Parts, x: Tensor) -> Any:
    value = parts.through(lambda: parts.weight.tanh().exp())
    return parts.second(parts.first(x) * value) + value


def nested(parts: Parts, x: Tensor) -> Any:
    """Tuples, None, dictionaries, keywords, and a segment that is used twice in another one."""

    def inner(x: Tensor) -> Any:
        return parts.dropout(torch.tanh(parts.first(x))) * parts.weight.exp()

    def outer(x: Tensor, factor: Tensor) -> Any:
        again = parts.dropout(parts.through(inner, parts.second(x * factor)))
        return parts.through(inner, x) + again, None, {"sine": x.sin()}

    total, _, named = parts.through(outer, x, factor=x.cos())
    return total * named["sine"]


def closure(parts: Parts, x: Tensor) -> Any:
    hidden = parts.second(x).tanh()
    return parts.through(lambda x: parts.dropout(parts.first(x) * hidden.sin()), x) + hidden


def branch(parts: Parts, x: Tensor) -> Any:
    def by_sign(hidden: Tensor) -> Any:
        hidden = parts.dropout(parts.first(hidden))
        return hidden.sin() * parts.weight if x.sum() > 0 else hidden.cos()

    return parts.through(by_sign, parts.second(x))


def low_precision(parts: Parts, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        return parts.through(lambda x: parts.second(parts.first(x).sin()), x).float()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_bit_for_bit(reentrant: bool) -> None:
    tokens, targets = torch.randint(0, 20, (RECORDS, 7)), torch.randint(0, 3, (RECORDS,))
    results, draws = [], []
    for through in (plain, partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)):
        model = Transformer(through).train()
        results.append(gradients(model, tokens, targets))
        draws.append(torch.rand(4))
    assert all(map(torch.equal, *results))
    assert torch.equal(*draws), "the second pass leaves the generator where it was"


@pytest.mark.parametrize(
    "segment", [derived_value, parameters_alone, nested, closure, branch, low_precision]
)
def test_segments_of_every_kind(segment: Segment) -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    expected = gradients(Parts(segment, plain), inputs, targets)
    selective = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for through in (recomputed, partial(recomputed, context_fn=selective)):
        actual = gradients(Parts(segment, through), inputs, targets)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected))


def test_other_draws_in_the_second_pass_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    expected = gradients(Parts(closure, plain), inputs, targets)
    monkeypatch.setattr(checkpointing, "set_random_state", lambda states: None)
    actual = gradients(Parts(closure, recomputed), inputs, targets)
    assert not all(map(torch.equal, actual, expected))


def recording_of(model: nn.Module) -> Recording:
    path = Path(torch.arange(RECORDS), random_state())
    return Recording(model, dict(model.named_parameters()), RECORDS, torch.device("cpu"), path)


def decides(parts: "Parts", x: Tensor) -> Any:
    """Decides by the record, writes into a constant, and draws: before, in and after the segment."""
    if x.sum() > 0:
        x = parts.dropout(x)

    def segment(x: Tensor) -> Tensor:
        hidden = torch.zeros(1, 4)
        hidden += parts.first(x)
        own: Tensor = parts.dropout(hidden if hidden.mean() > 0 else hidden.tanh())
        return own

    out = parts.second(parts.through(segment, x))
    return parts.dropout(out) if out.sum() > 0 else out


def test_a_segment_that_decides_takes_the_same_path_and_draws_again() -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    expected = gradients(Parts(decides, plain), inputs, targets)
    actual = gradients(Parts(decides, recomputed), inputs, targets)
    assert all(map(torch.equal, actual, expected))


def test_a_second_pass_that_reads_on_from_the_first_would_draw_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    expected = gradients(Parts(decides, plain), inputs, targets)
    monkeypatch.setattr(Path, "recomputing", lambda self, read: nullcontext())
    monkeypatch.setattr(Path, "check_not_seeded", lambda self: None)  # which would find it out
    actual = gradients(Parts(decides, recomputed), inputs, targets)
    assert not all(map(torch.equal, actual, expected))


def test_every_use_leaves_its_term_once() -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    counts = []
    for through in (plain, recomputed):
        model = Parts(nested, through)
        recording = recording_of(model)
        recording.backward(recording.losses(cross_entropy, inputs, targets))
        counts.append({name: len(terms) for name, terms in recording.terms.items()})
    assert counts[0] == counts[1]
    assert counts[0]["first.weight"] == 2, "inner() is called twice"


def test_losses_alone_need_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    monkeypatch.delattr(checkpointing.Segment, "recompute")
    losses = [
        per_sample_losses(Parts(nested, through).eval(), cross_entropy, inputs, targets)
        for through in (plain, recomputed)
    ]
    assert torch.equal(*losses)


def test_sequential_checkpoints() -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))

    def sequential(parts: Parts, x: Tensor) -> Any:
        layers = [parts.first, nn.Tanh(), parts.dropout, parts.second]
        if parts.through is plain:
            return nn.Sequential(*layers)(x)
        return checkpoint_sequential(layers, 2, x, use_reentrant=False)

    expected = gradients(Parts(sequential, plain), inputs, targets)
    assert all(map(torch.equal, gradients(Parts(sequential, recomputed), inputs, targets), expected))


class LiveBytes(TorchDispatchMode):
    """Counts the memory of what was computed and is still referred to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            storage = StorageWeakRef(value.untyped_storage())
            self._storages[storage.cdata] = storage, value.untyped_storage().nbytes()
        return output

    def count(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def test_activations_are_not_kept_between_the_passes() -> None:
    tokens, targets = torch.randint(0, 20, (RECORDS, 64)), torch.randint(0, 3, (RECORDS,))
    kept, estimates = [], []
    for through in (plain, recomputed):
        model = Transformer(through).train()
        recording = recording_of(model)
        with LiveBytes() as live:
            losses = recording.losses(cross_entropy, tokens, targets)
            kept.append(live.count())
            recording.backward(losses)
        estimates.append(activations(model, cross_entropy, tokens, targets))
    assert kept[1] < kept[0] / 20
    inputs = 2 * RECORDS * 64 * 8 * 4
    assert inputs < kept[1] < 2 * inputs, "the arguments of the two segments, and little else"
    assert estimates[0] / 2 < estimates[1] < 0.6 * estimates[0], "one of two layers at a time"


def in_place_input(parts: Parts, x: Tensor) -> Any:
    return parts.through(
        lambda x: parts.second(nn.functional.dropout(x, 0.5, inplace=True)), parts.first(x)
    )


def in_place_saved(parts: Parts, x: Tensor) -> Any:
    def twice(x: Tensor) -> Tensor:
        product = x * x.sin()
        x.add_(1)
        return product

    return parts.through(lambda x: twice(parts.second(x)), parts.first(x))


def own_transform(parts: Parts, x: Tensor) -> Any:
    return torch.vmap(lambda row: parts.through(torch.sin, row))(parts.second(parts.first(x)))


def other_work(parts: Parts, x: Tensor) -> Any:
    calls = []

    def counted(x: Tensor) -> Any:
        calls.append(x)
        return parts.second(x).sin() if len(calls) == 1 else parts.second(x).sin().cos()

    return parts.through(counted, parts.first(x))


def other_shape(parts: Parts, x: Tensor) -> Any:
    sizes = [4, 2]

    def shrinking(x: Tensor) -> Any:
        return parts.second(x)[..., : sizes.pop(0)].sin().sum(-1, keepdim=True)

    return parts.first(x) * parts.through(shrinking, x)


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (in_place_input, "inputs changed in place"),
        (in_place_saved, "changes a value in place"),
        (own_transform, "inside of a torch.func transform"),
        (other_work, "it saved 3 tensors and not 2"),
        (other_shape, r"it saved a tensor of .*2\]"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(segment: Segment, reason: str) -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    with pytest.raises(Unsupported, match=reason):
        record(Parts(segment, recomputed), cross_entropy, inputs, targets)


def test_checkpointing_is_put_back() -> None:
    model = Parts(own_transform, recomputed)
    with pytest.raises(Unsupported):
        record(model, cross_entropy, torch.randn(2, 4), torch.tensor([0, 1]))
    weight = torch.randn(4, requires_grad=True)
    recomputed(torch.exp, weight).sum().backward()
    torch.testing.assert_close(weight.grad, weight.exp())
