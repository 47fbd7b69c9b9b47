"""Gradients held in a sensitivity set and summed, against one record at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hush
from hush.core.parts import Clipping
from hush.gradients import terms
from hush.gradients.recording import record
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from tests.gradients.oracle import flat, one_at_a_time

RECORDS, WIDTH = 7, 73
CLIPPINGS: list[Clipping] = [
    hush.Linf(0.03),
    hush.L2Linf(l2=0.5, linf=0.04),
    hush.L2Linf(l2=0.01, linf=1e6),
    hush.Box(bounds=[(60, 0.01), (5, 0.2), *[0.001 * k for k in range(1, 9)]]),
    hush.Subspaces(ranks=(40, 32, 1), l2=(0.2, 0.05, 0.3)),
    hush.Subspaces(ranks=(50, 23), l2=(0.2, 0.05), linf=(0.04, 0.02)),
]


def clip_alone(row: Tensor, clipping: Clipping) -> Tensor:
    """What one record may add: each block by the definition of its sensitivity set."""
    parts, start = [], 0
    for block in clipping.sensitivity(len(row)):
        part = row[start : start + (block.dimension or 0)]
        start += len(part)
        if block.p == 2:
            part = part * min(1.0, block.norm / max(float(part.norm()), 1e-300))
        limit = block.norm if block.p == math.inf else block.cap if block.cap is not None else math.inf
        parts.append(part.clamp(-limit, limit))
    assert start == len(row)
    return torch.cat(parts)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 2))


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return 3 * torch.randn(RECORDS, 1, 4, dtype=dtype), torch.randint(0, 2, (RECORDS,))


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 3 * WIDTH, 10**6])
def test_sums_equal_one_record_at_a_time(
    clipping: Clipping, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(terms.CHUNK_ENTRIES, "cpu", chunk)
    monkeypatch.setitem(terms.MATERIALISE_CHUNK, "cpu", chunk)
    model, (inputs, targets) = network().to(dtype), batch(dtype)
    loss = nn.CrossEntropyLoss(reduction="none")
    rows = one_at_a_time(model, loss, inputs, targets, RECORDS)
    assert rows.shape[1] == WIDTH
    expected = torch.stack([clip_alone(row, clipping) for row in rows]).double().sum(0)
    assert not torch.allclose(expected, rows.double().sum(0), rtol=1e-2), "nothing is clipped"
    tape = record(model, loss, inputs, targets)
    clipped = clipping.clip(tape)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(flat(clipped.total, 0), expected, rtol=tolerance, atol=tolerance)
    assert list(clipped.total) == [name for name, _ in model.named_parameters()]
    assert int(clipped.skipped) == 0
    assert not any(part.requires_grad for part in clipped.total.values())

    # Thinned: each number of each record is there or not, before the sum.
    masked: list[Tensor] = []

    def mask(values: Tensor) -> Tensor:
        masked.append(values)
        return values.masked_fill_(torch.zeros_like(values, dtype=torch.bool), 0.0)

    unchanged = clipping.clip(tape, mask)
    torch.testing.assert_close(flat(unchanged.total, 0), expected, rtol=tolerance, atol=tolerance)
    assert sum(values.numel() for values in masked) == RECORDS * WIDTH
    gone = clipping.clip(tape, lambda values: values.zero_())
    assert flat(gone.total, 0).abs().max() == 0


class Words(nn.Module):
    """A table that is looked up, and multiplied with where it is tied, and two factored layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.middle = nn.Linear(6, 6)
        self.scores = nn.Linear(6, 9, bias=False)
        if tied:
            self.scores.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.middle(self.words(tokens)).mean(1))
        return scores


TOKENS = torch.tensor([[0, 0, 3], [1, 2, 3], [8, 8, 8], [4, 0, 4]])
WANTED = torch.tensor([1, 8, 0, 3])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("linf", [1e-4, 0.02, 0.05, 10.0])
def test_factors_are_held_as_what_they_stand_for(tied: bool, linf: float) -> None:
    torch.manual_seed(0)
    model, loss = Words(tied).double(), nn.CrossEntropyLoss(reduction="none")
    rows = one_at_a_time(model, loss, TOKENS, WANTED, len(TOKENS))
    tape = record(model, loss, TOKENS, WANTED)
    for clipping in (hush.Linf(linf), hush.L2Linf(l2=0.3, linf=linf)):
        expected = torch.stack([clip_alone(row, clipping) for row in rows]).double().sum(0)
        for mask in (None, lambda values: values):
            clipped = clipping.clip(tape, mask)
            torch.testing.assert_close(flat(clipped.total, 0), expected, rtol=1e-10, atol=1e-12)
        assert flat(clipping.clip(tape, lambda values: values.zero_()).total, 0).abs().max() == 0


def rows_tape(rows: Tensor) -> GradientTape:
    return GradientTape({"a": Dense(rows[:, :2]), "b": Dense(rows[:, 2:])}, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4),
    l2=st.floats(1e-6, 1e6),
    linf=st.floats(1e-6, 1e6),
)
def test_one_record_lands_in_the_set(entries: list[float], l2: float, linf: float) -> None:
    row = torch.tensor([entries])
    many: list[Clipping] = [
        hush.Linf(linf),
        hush.L2Linf(l2=l2, linf=linf),
        hush.Box(bounds=(l2, (2, linf), l2)),
        hush.Subspaces(ranks=(1, 3), l2=(l2, linf), linf=(linf, l2)),
    ]
    for clipping in many:
        landed, start = flat(clipping.clip(rows_tape(row)).total, 0).double(), 0
        for block in clipping.sensitivity(4):
            part = landed[start : start + (block.dimension or 0)]
            start += len(part)
            assert part.norm(block.p) <= block.norm * (1 + 1e-6)
            assert part.abs().max() <= block.max_entry * (1 + 1e-6)


def test_records_that_are_not_finite_are_left_out_and_counted() -> None:
    rows = torch.tensor([[3.0, 4.0, 0, 0], [math.nan, 1, 0, 0], [0, 0, math.inf, 0], [0, 0, 0, 0]])
    for clipping in (hush.Linf(1.0), hush.Subspaces(ranks=(2, 2), l2=(1.0, 1.0))):
        clipped = clipping.clip(rows_tape(rows))
        assert int(clipped.skipped) == 2
        assert torch.isfinite(flat(clipped.total, 0)).all()
        assert flat(clipped.total, 0)[:2].abs().sum() > 1


@pytest.mark.parametrize("size", [1e14, 1e15, 1e16, 2e16, 5e16, 1e17])
def test_weights_too_small_for_their_precision_do_not_let_a_record_out(size: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    norm = 1e-12
    clippings: list[Clipping] = [
        hush.L2(norm),
        hush.L2Linf(l2=norm, linf=1.0),
        hush.Subspaces(ranks=(6,), l2=(norm,)),
        hush.Lp(p=1.0, norm=norm),
    ]
    for _ in range(10):
        inputs, targets = torch.randn(1, 3) * size, torch.randn(1, 2) * size
        tape = record(model, lambda out, to: (out * to).sum(1), inputs, targets)
        assert tape.norms(2.0).isfinite().all()
        for clipping in clippings:
            landed = flat(clipping.clip(tape).total, 0).double()
            assert landed.norm() <= norm * (1 + 1e-5)
