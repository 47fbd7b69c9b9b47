"""Attention of all records in one kernel, against each record's own gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hush.gradients.recording import record
from tests.gradients.oracle import check_tape, flat, one_at_a_time

RECORDS, POSITIONS, HEADS, SIZE = 5, 6, 4, 2
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Projections(nn.Module):
    """Queries, keys and values of trained projections, and some attention between them."""

    def __init__(self, attend: Attend, heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.heads = attend, heads
        self.query, self.key, self.value = (nn.Linear(3, h * SIZE) for h in (HEADS, heads, heads))
        self.bias = nn.Parameter(torch.randn(HEADS, POSITIONS, POSITIONS))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(-2, -3) for part in parts)
        outputs = self.attend(query, key, value, x)
        return outputs.flatten(1) + 0 * self.bias.sum()


def own_mask(x: Tensor) -> Tensor:
    """Keys that a record masks, never all: (batch, 1, 1, positions)."""
    hidden = x[:, None, None, :, 0] < 0
    return ~hidden | (torch.arange(POSITIONS) == 0)


CASES: dict[str, Attend] = {
    "plain": lambda q, k, v, x: scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v, x: scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
    "mask of each record": lambda q, k, v, x: scaled_dot_product_attention(
        q, k, v, own_mask(x).expand(-1, -1, POSITIONS, -1)
    ),
    "mask that is broadcast": lambda q, k, v, x: scaled_dot_product_attention(q, k, v, own_mask(x)),
    "mask of the keys alone": lambda q, k, v, x: scaled_dot_product_attention(
        q[0, 0], k[0, 0], v[0, 0], own_mask(x)[0, 0, 0]
    )[None],
    "mask that all share": lambda q, k, v, x: scaled_dot_product_attention(
        q, k, v, torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril()
    ),
    "one head alone": lambda q, k, v, x: scaled_dot_product_attention(q[0, 1], k[0, 1], v[0, 1])[None],
    "no batch": lambda q, k, v, x: scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)[None],
    "two batches": lambda q, k, v, x: scaled_dot_product_attention(
        q.expand(3, 2, -1, -1, -1), k.expand(3, 2, -1, -1, -1), v[None]
    ).sum((0, 1))[None],
    "one head of keys for all": lambda q, k, v, x: scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], own_mask(x)
    ),
}  # fmt: skip


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).sin().sum(1) - targets).square()


def problem() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(RECORDS, POSITIONS, 3, dtype=torch.float64), torch.randn(RECORDS).double()


def checked(model: Projections) -> Tensor:
    """The gradients of one record at a time, which those of the tape equal."""
    inputs, targets = problem()
    expected = one_at_a_time(model, loss, inputs, targets, RECORDS)
    check_tape(record(model, loss, inputs, targets), expected, 1e-9)
    return expected


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_record_at_a_time(name: str) -> None:
    checked(Projections(CASES[name]))


def test_heads_that_share_keys() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, own_mask(x), enable_gqa=True)

    checked(Projections(attend, heads=2))


def test_a_trained_bias() -> None:
    model = Projections(
        lambda q, k, v, x: scaled_dot_product_attention(q, k, v, model.bias + own_mask(x).log())
    )
    assert (checked(model)[:, : model.bias.numel()].abs().amax(1) > 0).all()


def test_dropout_is_drawn_for_every_place() -> None:
    inputs, targets = problem()
    model = Projections(lambda q, k, v, x: scaled_dot_product_attention(q, k, v, dropout_p=0.4))
    torch.manual_seed(2)
    tape = record(model, loss, inputs, targets)
    torch.manual_seed(2)
    shape = (RECORDS, HEADS, POSITIONS, POSITIONS)
    draws = nn.functional.dropout(torch.ones(shape, dtype=torch.float64), 0.4)
    rows = []
    for i in range(RECORDS):

        def attend(q: Tensor, k: Tensor, v: Tensor, x: Tensor, i: int = i) -> Tensor:
            return ((q @ k.mT / math.sqrt(SIZE)).softmax(-1) * draws[i]) @ v

        model.attend = attend
        rows.append(one_at_a_time(model, loss, inputs[i : i + 1], targets[i : i + 1], 1))
    check_tape(tape, torch.cat(rows), 1e-9)


def test_a_record_without_a_key_reaches_no_other() -> None:
    model = Projections(
        lambda q, k, v, x: scaled_dot_product_attention(q, k, v, x[:, None, None, :, 0] < 9)
    )
    inputs, targets = problem()
    expected = one_at_a_time(model, loss, inputs, targets, RECORDS)[1:]
    results = []
    for masked in (0.0, 10.0, math.nan):
        inputs[0, :, 0] = masked
        tape = record(model, loss, inputs, targets)
        results.append(flat(next(iter(tape.chunks(entries=10**9)))[1], 1)[1:])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], expected)


class Calls(TorchDispatchMode):
    """Notes under which settings torch's kernels are called."""

    def __init__(self, failing: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failing = failing
        self.deterministic: dict[str, bool] = {}
        self.cudnn: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        self.deterministic[name] = torch.are_deterministic_algorithms_enabled() and strict
        self.cudnn[name] = torch.backends.cuda.cudnn_sdp_enabled()
        if name == self.failing:
            raise MemoryError(name)
        return func(*args, **(kwargs or {}))


FUSED = "_scaled_dot_product_flash_attention_for_cpu"


class MultiHead(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiHead(8, 2, batch_first=True),
        lambda: MultiHead(8, 2),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval(), 2
        ).eval(),
    ],
)
def test_layers_of_torch_use_the_fused_kernel(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = make().double(), torch.randn(RECORDS, POSITIONS, 8).double()
    with Calls() as calls:
        tape = record(model, loss, inputs, torch.zeros(RECORDS))
    assert f"{FUSED}_backward" in calls.deterministic
    check_tape(tape, one_at_a_time(model, loss, inputs, torch.zeros(RECORDS), RECORDS), 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="other kernels add in a fixed order")
@pytest.mark.parametrize("low", [True, False])
def test_a_gpu_gives_the_same_gradients_every_time(low: bool) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).cuda()
    inputs, targets = torch.randn(2, 2048, 64, device="cuda"), torch.zeros(2, device="cuda")
    results = []
    with Calls() as calls:
        for _ in range(5):
            torch.manual_seed(1)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
                chunks = record(model, loss, inputs, targets).chunks(entries=10**9)
            results.append(flat(next(iter(chunks))[1], 1))
    kind = "flash" if low else "efficient"
    assert calls.deterministic[f"_scaled_dot_product_{kind}_attention_backward"]
    assert all(torch.equal(result, results[0]) for result in results)
