"""Every kind of layer against gradients one record at a time."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import hush
from hush.gradients.losses import per_sample_loss
from hush.gradients.recording import record
from hush.gradients.rules import RULES, recurrent
from tests.gradients.oracle import check_tape, flat, one_at_a_time


class Recurrent(nn.Module):
    """Uses the outputs at all positions and the last states."""

    def __init__(self, kind: str, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(5, 6, batch_first=batch_first, **options)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.layer(x if self.batch_first else x.transpose(0, 1))
        outputs = outputs if self.batch_first else outputs.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([outputs.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], dim=1)


class Started(nn.Module):
    """A recurrent layer whose first states are trained."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(5, 6, **options)
        directions, states = 2 if self.layer.bidirectional else 1, 2 if kind == "LSTM" else 1
        self.starts = nn.ParameterList(torch.randn(directions, 1, 6) for _ in range(states))

    def forward(self, x: Tensor) -> Tensor:
        starts = [start.expand(-1, len(x), -1).contiguous() for start in self.starts]
        outputs: Tensor = self.layer(x.transpose(0, 1), tuple(starts) if len(starts) > 1 else starts[0])[
            0
        ]
        return outputs.transpose(0, 1).flatten(1)


class Attention(nn.Module):
    """Self-attention, or attention of the first two positions to all."""

    def __init__(self, batch_first: bool = True, cross: bool = False, mask: Any = None, **options: Any):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.batch_first, self.cross, self.mask = batch_first, cross, mask

    def forward(self, x: Tensor) -> Tensor:
        keys = x if self.batch_first else x.transpose(0, 1)
        query = (keys[:, :2] if self.batch_first else keys[:2]) if self.cross else keys
        output, shares = self.layer(query, keys, keys, attn_mask=self.mask)
        return torch.cat(
            [(output if self.batch_first else output.transpose(0, 1)).flatten(1), shares.flatten(1)], 1
        )


def frozen_norm(channels: int, affine: bool = True) -> nn.Module:
    """A batch norm in evaluation mode, with statistics and weights as after some training."""
    norm = nn.BatchNorm2d(channels, affine=affine).eval()
    for value in norm.state_dict().values():
        if value.is_floating_point():
            nn.init.uniform_(value, 0.5, 2.0)
    return norm


class Language(nn.Module):
    """Words, learned positions, a token of its own, and the first table again at the end."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6, padding_idx=-8), nn.Embedding(9, 6)
        self.start = nn.Parameter(torch.randn(1, 1, 6))
        self.norm = nn.RMSNorm(6)
        self.scores = nn.Linear(6, 11, bias=False)
        if tied:
            self.scores.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = torch.cat([self.start.expand(len(x), -1, -1), torch.tanh(x)], dim=1)
        scores: Tensor = self.scores(self.norm(x))
        return scores


class Bare(nn.Module):
    """Parameters that belong to no layer, one of them without dimensions, and one used in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(1.5))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        for _ in range(3):
            x = torch.tanh(x @ self.matrix)
        return torch.einsum("bi,ji->bj", x, self.table) + self.matrix.square().sum()


class Products(nn.Module):
    """Matrix products under each of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.matrices = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(torch.addmm(self.bias, x, self.matrices[0]))
        output: Tensor = torch.tanh(torch.matmul(x, self.matrices[1])) @ self.matrices[2]
        return output


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x[:, :3], x[:, 3:])
        return output


class Marked(nn.Linear):
    """Marks what it returns, as gradient checkpointing of the transformers library does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).requires_grad_()


class Cell(nn.Module):
    """A recurrent cell called position by position."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return torch.cat(state, dim=1) if isinstance(state, tuple) else torch.as_tensor(state)


def used_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))


def convolution_twice() -> nn.Module:
    layer = nn.Conv1d(2, 2, 3, padding=1)
    return nn.Sequential(layer, nn.Tanh(), layer)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


class LowRank(nn.Module):
    """Frozen products and normalisations between trained ones, which must get their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 6), nn.Linear(6, 3)
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        nn.init.normal_(self.norm.weight)
        self.plain_norm = nn.LayerNorm(6, elementwise_affine=False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.register_buffer("rotation", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        x = functional.relu(self.base(x), inplace=True) + self.up(self.down(x))
        x = self.norm(x) @ self.rotation + self.base(x.mT.contiguous().mT)
        output: Tensor = self.outward(self.plain_norm(x))
        return output


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def frozen_convolutions() -> nn.Module:
    between = nn.Sequential(
        *(nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.GroupNorm(3, 3), nn.Conv2d(3, 4, 2, bias=False))
    )
    return nn.Sequential(nn.Conv2d(2, 3, 1), between.requires_grad_(False), nn.Conv2d(4, 2, 1))


def normed(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(nn.Linear(6, 5)), nn.Tanh(), kind(nn.Linear(5, 4)))


def frozen_recurrence(kind: str) -> nn.Module:
    frozen = Recurrent(kind, bidirectional=True).requires_grad_(False)
    return nn.Sequential(nn.Linear(5, 5), frozen, nn.Linear(72 if kind == "LSTM" else 60, 3))


def no_features() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no weight to initialise
        return nn.Sequential(nn.Linear(0, 5), nn.Tanh(), nn.Linear(5, 3))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def same_mask(size: int) -> Tensor:
    return torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)


IMAGE, SIGNAL, SEQUENCE, WIDE = (2, 7, 6), (2, 9), (4, 5), (4, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (6,)),
    "linear, no features": (no_features, (0,)),
    "linear, few positions": (lambda: nn.Linear(30, 40), (2, 30)),
    "linear, many positions": (lambda: nn.Linear(6, 5), (2, 3, 4, 6)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 4, stride=2, padding=1, dilation=2), SIGNAL),
    "conv1d same": (lambda: nn.Conv1d(2, 4, 4, padding="same"), SIGNAL),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=(2, 1), padding=(1, 2)), IMAGE),
    "conv2d valid": (lambda: nn.Conv2d(2, 4, (3, 2), padding="valid"), IMAGE),
    "conv2d patches": (lambda: nn.Conv2d(2, 4, (3, 2), stride=(3, 2)), IMAGE),
    "conv2d, large patches": (lambda: nn.Conv2d(3, 40, 8, stride=8), (3, 17, 16)),
    "conv2d 1 x 1": (lambda: nn.Conv2d(2, 4, 1), IMAGE),
    "conv2d, many channels": (lambda: nn.Conv2d(20, 30, 3, padding=1, stride=2, dilation=2), (20, 4, 5)),
    "conv2d, many weights": (lambda: nn.Conv2d(64, 128, 3), (64, 3, 3)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    "conv2d by channel": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"), IMAGE),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), IMAGE),
    "conv2d replicate": (lambda: nn.Conv2d(20, 30, 3, padding=1, padding_mode="replicate"), (20, 2, 2)),
    "max pooling": (lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.MaxPool2d(2, 1, padding=1)), IMAGE),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=(1, 0, 1)), (2, 3, 3, 3)),
    "conv transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 3, 3)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm((3, 6)), nn.Linear(6, 3)), (2, 3, 6)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), IMAGE),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True), IMAGE),
    "RMS norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "batch norm, frozen": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), frozen_norm(4)), IMAGE),
    "batch norm, statistics alone": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), frozen_norm(4, affine=False)),
        IMAGE,
    ),
    "PReLU": (lambda: nn.PReLU(2), IMAGE),
    "bilinear": (TwoInputs, (7,)),
    "bare parameters": (Bare, (4,)),
    "matrix products": (Products, (4,)),
    "language model": (lambda: Language(tied=False), None),
    "language model, tied": (lambda: Language(tied=True), None),
    "sparse embedding": (lambda: nn.Embedding(11, 40, sparse=True), None),
    "LSTM": (lambda: Recurrent("LSTM", bidirectional=True, num_layers=2), SEQUENCE),
    "LSTM, time first": (lambda: Recurrent("LSTM", batch_first=False, bias=False), SEQUENCE),
    "LSTM, trained start": (lambda: Started("LSTM", bidirectional=True), SEQUENCE),
    "GRU, trained start": (lambda: Started("GRU"), SEQUENCE),
    "LSTM, frozen": (lambda: frozen_recurrence("LSTM"), SEQUENCE),
    "GRU, frozen": (lambda: frozen_recurrence("GRU"), SEQUENCE),
    "GRU": (lambda: Recurrent("GRU", bidirectional=True, num_layers=2), SEQUENCE),
    "GRU without bias": (lambda: Recurrent("GRU", bias=False), SEQUENCE),
    "RNN": (lambda: Recurrent("RNN", batch_first=False), SEQUENCE),
    "RNN, relu": (lambda: Recurrent("RNN", nonlinearity="relu", bidirectional=True), SEQUENCE),
    "LSTM cell": (lambda: Cell(nn.LSTMCell(5, 6)), SEQUENCE),
    "GRU cell": (lambda: Cell(nn.GRUCell(5, 6, bias=False)), SEQUENCE),
    "RNN cell": (lambda: Cell(nn.RNNCell(5, 6)), SEQUENCE),
    "RNN cell, relu": (lambda: Cell(nn.RNNCell(5, 6, nonlinearity="relu")), SEQUENCE),
    "attention": (Attention, WIDE),
    "attention, time first": (lambda: Attention(batch_first=False), WIDE),
    "attention, masked": (lambda: Attention(mask=same_mask(4)), WIDE),
    "attention to others": (lambda: Attention(cross=True, add_bias_kv=True, add_zero_attn=True), WIDE),
    "attention, own sizes": (lambda: Attention(cross=True, kdim=8, vdim=8, bias=False), WIDE),
    "transformer layer": (encoder, WIDE),
    "marked": (lambda: nn.Sequential(Marked(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "used twice": (used_twice, (6,)),
    "convolution used twice": (convolution_twice, SIGNAL),
    "tied": (tied, (6,)),
    "partly frozen": (partly_frozen, (6,)),
    "frozen convolutions": (frozen_convolutions, IMAGE),
    "low-rank update": (LowRank, (4, 6)),
    "in-place": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (6,)),
    "weight norm": (lambda: normed(parametrizations.weight_norm), (6,)),
    "spectral norm": (lambda: normed(parametrizations.spectral_norm).eval(), (6,)),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_sums_and_chunks_equal_one_record_at_a_time(name: str, reduction: str) -> None:
    torch.manual_seed(len(name))
    make, shape = LAYERS[name]
    model = nn.Sequential(make(), nn.Flatten())
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model.to(dtype)
        for records in (0, 1, 7):
            inputs = (
                torch.randn(records, *shape).to(dtype) if shape else torch.randint(0, 11, (records, 6))
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch announces that padding="same" may copy
                width = model(torch.cat([inputs, inputs[:0]]) if records else _some(shape, dtype)).shape[
                    1
                ]
                if reduction == "none":
                    loss: Any = nn.CrossEntropyLoss(reduction="none")
                    targets = torch.randint(0, width, (records,))
                else:
                    loss = nn.MSELoss(reduction=reduction)
                    targets = torch.randn(records, width).to(dtype)
                expected = one_at_a_time(model, loss, inputs, targets, records)
            check_tape(record(model, per_sample_loss(loss), inputs, targets), expected, tolerance)


def _some(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, *shape).to(dtype) if shape else torch.zeros(1, 6, dtype=torch.long)


@pytest.mark.parametrize("name", ["LSTM", "LSTM, trained start"])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_lstm_may_take_some_steps_at_once(
    name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "_BLOCK", steps * 2 * 7 * 4 * 6)  # both directions of seven records
    test_norms_sums_and_chunks_equal_one_record_at_a_time(name, "none")


WITHOUT_POSITIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "large linear": lambda: nn.Sequential(nn.Linear(8, 90), nn.Linear(90, 8)),
    "layer norm": lambda: nn.LayerNorm(8),
    "RMS norm": lambda: nn.RMSNorm(8),
    "group norm": lambda: Transposed(nn.GroupNorm(2, 8)),
    "instance norm": lambda: Transposed(nn.InstanceNorm1d(8, affine=True)),
    "batch norm, frozen": lambda: Transposed(nn.BatchNorm1d(8).eval()),
    "attention": encoder,
    "embedding": lambda: nn.Embedding(11, 8),
    "patches": lambda: OfRows(nn.Conv2d(1, 1, 1), 1, 2, 4),
    "convolution": lambda: OfRows(nn.Conv2d(1, 1, 3, padding=1), 1, 2, 4),
    "transposed convolution": lambda: OfRows(nn.ConvTranspose1d(1, 1, 1), 1, 8),
    "images": lambda: OfRows(nn.Sequential(nn.GroupNorm(1, 1), nn.MaxPool2d(1)), 1, 2, 4),
    "cell": lambda: OfRows(nn.GRUCell(8, 8), 8),
    "PReLU": lambda: OfRows(nn.PReLU(8), 8),
}


class OfRows(nn.Module):
    """A layer of all rows of a record, such as the frames of a video."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.reshape(x.shape[:2].numel(), *self.shape)).reshape(x.shape)
        return output


class Transposed(nn.Module):
    """A layer of channels first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.mT).mT
        return output


class Pooled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(x).sum(1))
        return scores


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_no_position_of_a_record_reaches_a_layer(name: str) -> None:
    """As of records of padding alone: the layer has no gradient, and the rest has its own."""
    torch.manual_seed(0)
    model = Pooled(WITHOUT_POSITIONS[name]()).double()
    inputs = (
        torch.zeros(3, 0, dtype=torch.long) if name == "embedding" else torch.zeros(3, 0, 8).double()
    )
    tape = record(model, nn.CrossEntropyLoss(reduction="none"), inputs, torch.arange(3))
    expected = torch.softmax(model.head.bias, 0) - torch.eye(3)
    torch.testing.assert_close(tape.norms(2.0), expected.norm(dim=1))
    for total in (tape.weighted_sum(torch.ones(3)), hush.Linf(1.0).clip(tape).total):
        torch.testing.assert_close(total.pop("head.bias"), expected.sum(0))
        assert not any(bool(part.any()) for part in total.values())


def test_the_padding_row_has_no_gradient() -> None:
    table = nn.Embedding(5, 3, padding_idx=2)
    tokens = torch.tensor([[2, 1, 2], [0, 2, 2]])
    tape = record(
        table, lambda o, _: (o * torch.arange(9.0).view(3, 3)).sum((1, 2)), tokens, torch.zeros(2)
    )
    assert tape.weighted_sum(torch.ones(2))["weight"][2].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_inside_a_recurrent_layer_draws_for_each_record(dropout: float) -> None:
    torch.manual_seed(0)
    model = Recurrent("LSTM", num_layers=2, dropout=dropout)
    inputs = torch.randn(1, 4, 5).repeat(6, 1, 1)
    norms = record(model, lambda o, _: o.sum(1), inputs, torch.zeros(6)).norms(2.0)
    # a sigmoid may round by place
    assert len({round(norm, 3) for norm in norms.tolist()}) == (6 if dropout else 1)


def test_every_rule_is_run_by_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that declines every case would pass the comparison too, by the general way."""
    applied = set()

    def noting(function: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            output = rule(*args, **kwargs)
            if output is not NotImplemented:
                applied.add(function)
            return output

        return noted

    for function, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, function, noting(function, rule))
    for make, shape in LAYERS.values():
        model = nn.Sequential(make(), nn.Flatten())
        inputs = torch.randn(2, *shape) if shape else torch.randint(0, 11, (2, 6))
        record(model, lambda output, _: output.flatten(1).sum(1), inputs, torch.zeros(2))
    record(nn.Linear(4, 3), nn.CrossEntropyLoss(reduction="none"), torch.randn(2, 4), torch.arange(2))
    assert applied == set(RULES)


def test_a_sparse_table_and_a_layer_without_features_have_exact_gradients() -> None:
    torch.manual_seed(0)
    table = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    inputs, targets = torch.randint(0, 10, (4, 2)), torch.randint(0, 2, (4,))
    loss = per_sample_loss(nn.CrossEntropyLoss())
    expected = one_at_a_time(table, loss, inputs, targets, 4)
    check_tape(record(table, loss, inputs, targets, one_by_one=True), expected, 1e-5)

    empty, inputs = no_features(), torch.zeros(4, 0)
    expected = one_at_a_time(empty, loss, inputs, targets, 4).clamp(-0.1, 0.1)
    clamped = hush.Linf(0.1).clip(record(empty, loss, inputs, targets)).total
    torch.testing.assert_close(flat(dict(clamped), 0), expected.double().sum(0))
