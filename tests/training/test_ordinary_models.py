"""Ordinary models: they train, on the clipped gradients of one record at a time."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, rnn

from tests.training.ordinary import (
    RECORDS,
    Case,
    Of,
    check,
    convolution,
    head,
    images,
    label,
    labels,
    masks,
    mlp,
    mlp_of,
    next_word,
    pictures,
    resnet,
    sequences,
    signals,
    squared,
    step_of,
    text,
    unet,
    vectors,
    words,
)


def densenet() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        x = torch.cat([x, m.first(x)], 1)
        x = torch.cat([x, m.second(x)], 1)
        return m.head(x)

    return Of(forward, first=convolution(3, 2), second=convolution(5, 2), head=head(7))


def convnext() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
        return x + (m.scale(m.up(F.gelu(m.down(y))))).permute(0, 3, 1, 2)

    block = Of(
        forward,
        depthwise=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        norm=nn.LayerNorm(4),
        down=nn.Linear(4, 8),
        up=nn.Linear(8, 4),
        scale=Scale(4),
    )
    return nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), block, head(4))


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def frozen_batch_norm() -> nn.Module:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self[1].eval()
            return self

    return Frozen(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), head(4))


def temporal() -> nn.Module:
    layers = nn.Conv1d(2, 4, 3, dilation=2), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.AdaptiveMaxPool1d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))


def volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(2, 3))


def last_state(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def forward(m: Any, x: Tensor) -> Any:
        return m.head(m.layer(x)[0][:, -1])

    def make() -> nn.Module:
        layer = getattr(nn, kind)(6, 5, batch_first=True, **options)
        width = options.get("proj_size", 5) * (2 if options.get("bidirectional") else 1)
        return Of(forward, layer=layer, head=nn.Linear(width, 3))

    return make


def packed(kind: str) -> Callable[[], nn.Module]:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Any:
        rows = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = rnn.pad_packed_sequence(m.layer(rows)[0], batch_first=True)
        return m.head(outputs.sum(1))

    return lambda: Of(forward, layer=getattr(nn, kind)(6, 5, batch_first=True), head=nn.Linear(5, 3))


def ragged() -> tuple[Any, Tensor]:
    return (torch.randn(RECORDS, 5, 6), torch.tensor([5, 2, 3, 4])), labels()


def cell() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        assert state is not None
        return m.head(state[0])

    return Of(forward, cell=nn.LSTMCell(6, 5), head=nn.Linear(5, 3))


def bag_of_words() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(20, 6), nn.Linear(6, 3))


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Of(lambda m, x: m.head(m.encoder(x).mean(1)), encoder=encoder, head=nn.Linear(6, 3))


def padding_mask() -> nn.Module:
    def forward(m: Any, tokens: Tensor, mask: Tensor) -> Any:
        x = m.layer(m.table(tokens), src_key_padding_mask=~mask)
        return m.head((x * mask.unsqueeze(-1)).sum(1))

    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return Of(forward, table=nn.Embedding(20, 6), layer=layer, head=nn.Linear(6, 3))


def masked_text() -> tuple[Any, Tensor]:
    mask = torch.arange(6) < torch.tensor([[6], [3], [4], [5]])
    return {"tokens": torch.randint(1, 20, (RECORDS, 6)), "mask": mask}, labels()


def vision_transformer() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        patches = m.patches(x).flatten(2).mT
        x = torch.cat([m.start.scale.expand(len(x), 1, -1), patches], 1) + m.places.weight
        return m.head(m.layer(x)[:, 0])

    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, activation="gelu")
    return Of(
        forward,
        patches=nn.Conv2d(3, 6, 4, stride=4),
        start=Scale(6),
        places=nn.Embedding(5, 6),
        layer=layer,
        head=nn.Linear(6, 3),
    )


def tied_language_model() -> nn.Module:
    def forward(m: Any, tokens: Tensor) -> Any:
        return m.layer(m.table(tokens))[0] @ m.table.weight.T

    return Of(forward, table=nn.Embedding(20, 5), layer=nn.GRU(5, 5, batch_first=True))


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(2, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )


def variational() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        mean, log_variance = m.encoder(x.flatten(1)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return m.decoder(z).view_as(x), mean, log_variance

    return Of(forward, encoder=nn.Linear(64, 6), decoder=nn.Linear(3, 64))


def evidence(outputs: Any, targets: Tensor) -> Any:
    image, mean, log_variance = outputs
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return squared(image, targets) + divergence


def coupling_flow() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        first, second = x.chunk(2, 1)
        shift, scale = m.net(first).chunk(2, 1)
        scale = torch.tanh(scale)
        return torch.cat([first, second * scale.exp() + shift], 1), scale.sum(1)

    return Of(forward, net=mlp_of(3, 6))


def likelihood(outputs: Any, _: Tensor) -> Any:
    z, log_determinant = outputs
    return 0.5 * z.square().sum(1) - log_determinant


def denoiser() -> nn.Module:
    def forward(m: Any, x: Tensor, time: Tensor, noise: Tensor) -> Any:
        weight = torch.cos(time)[:, None]
        return m.net(torch.cat([weight * x + (1 - weight) * noise, time[:, None]], 1))

    return Of(forward, net=mlp_of(7, 6))


def diffusion() -> tuple[Any, Tensor]:
    noise = torch.randn(RECORDS, 6)
    return (torch.randn(RECORDS, 6), torch.rand(RECORDS), noise), noise


def siamese() -> nn.Module:
    return Of(lambda m, a, b: (m.net(a), m.net(b)), net=mlp())


def pairs() -> tuple[Any, Tensor]:
    return (torch.randn(RECORDS, 6), torch.randn(RECORDS, 6)), torch.tensor([1, -1, 1, -1])


def two_heads() -> nn.Module:
    return Of(
        lambda m, x: {"label": m.first(m.body(x)), "value": m.second(m.body(x))},
        body=nn.Linear(6, 5),
        first=nn.Linear(5, 3),
        second=nn.Linear(5, 1),
    )


def joint(outputs: Any, targets: Any) -> Tensor:
    return label(outputs["label"], targets["label"]) + squared(outputs["value"], targets["value"])


def two_targets() -> tuple[Tensor, Any]:
    return torch.randn(RECORDS, 6), {"label": labels(), "value": torch.randn(RECORDS, 1)}


def weight_norm() -> nn.Module:
    first, last = nn.Linear(6, 5), nn.Linear(5, 3)
    return nn.Sequential(*(parametrizations.weight_norm(layer) for layer in (first, last)))


def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 64)), nn.Tanh(), nn.Linear(64, 3))


def positions() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 3), torch.randn(RECORDS, 3)


def energy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def force_field() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(m.energy(x).sum(), x, create_graph=True)[0]

    return Of(forward, energy=energy())


def transformed(transform: Any) -> Callable[[], nn.Module]:
    """A network whose output is the derivative of another, by a transform of torch.func."""

    def forward(m: Any, x: Tensor) -> Tensor:
        derivative: Tensor = torch.func.vmap(transform(lambda row: m.energy(row)[0]))(x)
        return derivative

    return lambda: Of(forward, energy=energy())


class AttentionMap(nn.Module):
    """Attention that keeps its map for inspection, which no later call reads."""

    def __init__(self, keep: Any = None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.map: Any = None
        self.maps: list[Tensor] = []
        self.by_layer: dict[str, Any] = {}
        self.keep = keep or (lambda model, kept: setattr(model, "map", kept))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x[:, None].expand(-1, 2, -1))
        attention = torch.softmax(hidden @ hidden.mT, -1)
        self.keep(self, attention)
        scores: Tensor = self.head((attention @ hidden).mean(1))
        return scores


class Reversal(torch.autograd.Function):
    """Gradient reversal of domain-adversarial networks, with the older signature."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def adversarial() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        hidden = torch.tanh(m.body(x))
        return m.head(hidden) + m.domain(Reversal.apply(hidden))  # type: ignore[no-untyped-call]

    return Of(forward, body=nn.Linear(6, 5), head=nn.Linear(5, 3), domain=nn.Linear(5, 3))


class Experts(nn.Module):
    """A mixture of experts that routes tokens by `nonzero` and `index_add`, as Mixtral does."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.gate, self.choices = nn.Linear(6, 4), choices
        self.experts = nn.ModuleList(mlp_of(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.choices, dim=-1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None])
        scores: Tensor = self.head(output.view_as(x).mean(1))
        return scores


def switch() -> nn.Module:
    """The best of four experts for a whole record; the others have no gradient for it."""

    def forward(m: Any, x: Tensor) -> Any:
        shares = m.gate(x).softmax(-1)
        weight, best = shares.max(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in m.experts], 1)
        return weight * outputs.take_along_dim(best[..., None], 1).squeeze(1)

    experts = nn.ModuleList(mlp_of(6, 3) for _ in range(4))
    return Of(forward, gate=nn.Linear(6, 4), experts=experts)


def heads_by_task() -> nn.Module:
    """A head for each task; a record has labels for one task and uses one head."""

    def forward(m: Any, x: Tensor) -> Any:
        body = m.body(x)
        return m.first(body), m.second(body)

    return Of(forward, body=mlp_of(6, 5), first=nn.Linear(5, 3), second=nn.Linear(5, 4))


def labelled_tasks(outputs: Any, targets: Any) -> Tensor:
    both = zip(outputs, targets, strict=True)
    return sum(F.cross_entropy(o, y, reduction="none", ignore_index=-100) for o, y in both)  # type: ignore[return-value]


def tasks() -> tuple[Tensor, Any]:
    return torch.randn(RECORDS, 6), (torch.tensor([0, -100, 2, -100]), torch.tensor([-100, 3, -100, 1]))


def kept_tokens() -> nn.Module:
    """A linear layer on the tokens that are no padding: none of them in one record."""

    def forward(m: Any, tokens: Tensor) -> Any:
        x, kept = m.table(tokens), tokens > 0
        hidden = x.new_zeros(*tokens.shape, 5)
        hidden[kept] = m.body(x[kept])
        return m.head(hidden.sum(1))

    return Of(forward, table=nn.Embedding(20, 6), body=nn.Linear(6, 5), head=nn.Linear(5, 3))


def padded_text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 20, (RECORDS, 6))
    tokens[1], tokens[2, 3:] = 0, 0
    return tokens, labels()


def reads_a_value() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        return m.first(x) if x.sum().item() > 0 else m.second(x)

    return Of(forward, first=nn.Linear(6, 3), second=nn.Linear(6, 3))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: nn.Module = torch.jit.script(mlp().double())
        return module


def activation(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), kind(**options), nn.Linear(8, 3))


def sparse_products() -> nn.Module:
    return Of(lambda m, x: torch.sparse.mm(x.to_sparse(), m.layer.weight.T), layer=nn.Linear(6, 3))


# fmt: off
MODELS: dict[str, Case] = {
    "logistic regression": (lambda: nn.Linear(6, 3), nn.CrossEntropyLoss(), vectors),
    "mlp": (mlp, nn.CrossEntropyLoss(), vectors),
    "resnet": (resnet, nn.CrossEntropyLoss(), images),
    "densenet": (densenet, nn.CrossEntropyLoss(), images),
    "convnext": (convnext, nn.CrossEntropyLoss(), images),
    "frozen batch norm": (frozen_batch_norm, nn.CrossEntropyLoss(), images),
    "cross-map response norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.CrossMapLRN2d(2),
        head(4)), nn.CrossEntropyLoss(), images),
    "u-net": (unet, nn.CrossEntropyLoss(), masks),
    "temporal convolution": (temporal, nn.CrossEntropyLoss(), signals),
    "3-d convolution": (volume, nn.CrossEntropyLoss(), lambda: (torch.randn(RECORDS, 1, 3, 3, 3),
        labels())),
    "LSTM": (last_state("LSTM"), nn.CrossEntropyLoss(), sequences),
    "LSTM, stacked": (last_state("LSTM", num_layers=2), nn.CrossEntropyLoss(), sequences),
    "LSTM, both ways": (last_state("LSTM", bidirectional=True), nn.CrossEntropyLoss(), sequences),
    "LSTM, projected": (last_state("LSTM", proj_size=4), nn.CrossEntropyLoss(), sequences),
    "LSTM, packed": (packed("LSTM"), nn.CrossEntropyLoss(), ragged),
    "LSTM cell": (cell, nn.CrossEntropyLoss(), sequences),
    "GRU": (last_state("GRU", num_layers=2, bidirectional=True), nn.CrossEntropyLoss(), sequences),
    "RNN": (last_state("RNN", nonlinearity="relu"), nn.CrossEntropyLoss(), sequences),
    "bag of words": (bag_of_words, nn.CrossEntropyLoss(), words),
    "transformer encoder": (transformer_encoder, nn.CrossEntropyLoss(), sequences),
    "transformer, padded": (padding_mask, nn.CrossEntropyLoss(), masked_text),
    "vision transformer": (vision_transformer, nn.CrossEntropyLoss(), images),
    "language model, tied": (tied_language_model, next_word, text),
    "autoencoder": (autoencoder, nn.MSELoss(), pictures),
    "normalising flow": (coupling_flow, likelihood, vectors),
    "diffusion": (denoiser, nn.MSELoss(), diffusion),
    "siamese": (siamese, lambda o, y: F.cosine_embedding_loss(o[0], o[1], y, margin=0.2,
        reduction="none"), pairs),
    "two heads": (two_heads, joint, two_targets),
    "weight norm": (weight_norm, nn.CrossEntropyLoss(), vectors),
    "gradient reversal": (adversarial, nn.CrossEntropyLoss(), vectors),
    "experts, best": (lambda: Experts(1), nn.CrossEntropyLoss(), sequences),
    "experts, best two": (lambda: Experts(2), nn.CrossEntropyLoss(), sequences),
    "experts by record": (switch, nn.CrossEntropyLoss(), vectors),
    "heads by task": (heads_by_task, labelled_tasks, tasks),
    "tokens without padding": (kept_tokens, nn.CrossEntropyLoss(), padded_text),
    "force field": (force_field, nn.MSELoss(), positions),
    "classes of a force": (force_field, nn.CrossEntropyLoss(), lambda: vectors(3)),
    "gradient of a network": (transformed(torch.func.grad), nn.MSELoss(), positions),
    "jacobian of a network": (transformed(torch.func.jacrev), nn.MSELoss(), positions),
    "attention map kept": (AttentionMap, nn.CrossEntropyLoss(), vectors),
    "reads a value": (reads_a_value, nn.CrossEntropyLoss(), vectors),
    "sparse products": (sparse_products, nn.CrossEntropyLoss(), vectors),
    "scripted": (scripted, nn.CrossEntropyLoss(), vectors),
    "PReLU": (activation(nn.PReLU), nn.CrossEntropyLoss(), vectors),
    "RReLU, fixed slope": (activation(nn.RReLU, lower=0.2, upper=0.2), nn.CrossEntropyLoss(), vectors),
}
# fmt: on


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    check(MODELS[name])


# fmt: off
DRAWS: dict[str, Case] = {
    "variational autoencoder": (variational, evidence, pictures),
    "dropout": (lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), nn.CrossEntropyLoss(), vectors),
    "dropout, reduced loss": (lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), F.cross_entropy, vectors),
    "RReLU": (activation(nn.RReLU), nn.CrossEntropyLoss(), vectors),
    "spectral norm": (spectral_norm, nn.CrossEntropyLoss(), vectors),
}
# fmt: on


@pytest.mark.parametrize("name", DRAWS)
def test_models_that_draw(name: str) -> None:
    check(DRAWS[name], draws=True)


def in_a_new_list(model: Any, kept: Tensor) -> None:
    model.map = [kept]


def appended(model: Any, kept: Tensor) -> None:
    model.maps.append(kept)


def in_a_dictionary(model: Any, kept: Tensor) -> None:
    model.by_layer["first"] = {"detached": [kept.detach()]}


@pytest.mark.parametrize("keep", [None, in_a_new_list, appended, in_a_dictionary])
def test_an_attention_map_that_is_kept_is_dropped_after_the_pass(keep: Any) -> None:
    model, (x, y) = AttentionMap(keep), vectors()
    step = step_of(model, nn.CrossEntropyLoss())
    for batch in step.batches((x, y), steps=1):
        step(batch)
    copy.deepcopy(model)  # of a tensor of torch.vmap there is none
    assert (model.map, model.maps) == (None, [])
