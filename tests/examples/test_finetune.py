"""The fine-tuning example on a tiny encoder with random weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import hush
from examples.finetune import __main__ as commands
from examples.finetune.classifier import NEGATIVE, POSITIVE, load_adapter, with_lora
from examples.finetune.experiment import Experiment
from examples.finetune.reviews import Reviews, read_reviews, save_reviews
from examples.finetune.training import Settings

BUDGET = hush.Budget(epsilon=8.0, delta=1e-3)
TINY = Settings(learning_rate=0.05, batch=30, steps=2, rank=2, alpha=8.0, length=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained encoder and tokenized reviews on disk, as a user has them."""
    path = tmp_path_factory.mktemp("finetune")
    words = sorted({word for text in (*NEGATIVE, *POSITIVE) for word in text.split()})
    special = ["[PAD]", *(f"[unused{each}]" for each in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: place for place, word in enumerate([*special, *words])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(path / "model")
    torch.manual_seed(0)
    bert: Any = transformers.BertModel
    bert(
        transformers.BertConfig(
            vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=24, max_position_embeddings=32, initializer_range=0.3,
        )
    ).save_pretrained(path / "model")  # fmt: skip
    draw = np.random.default_rng(0)
    parts = []
    for count in (90, 20):
        lengths = draw.integers(1, 12, count)
        pieces = draw.integers(104, len(vocabulary), lengths.sum()).astype(np.int16)
        parts.append(Reviews(pieces, lengths, draw.integers(0, 2, count)))
    save_reviews(path / "reviews.npz", *parts)
    return path


@pytest.fixture(scope="module")
def experiment(folder: Path) -> Experiment:
    return Experiment.read(folder / "model", folder / "reviews.npz", "cpu")


@torch.no_grad()
def scores(model: Any, tokens: Tensor) -> Tensor:
    result: Tensor = model.eval()(tokens)
    return result


def test_an_adapter_that_was_saved_is_the_one_that_was_trained(
    experiment: Experiment, tmp_path: Path
) -> None:
    """Loaded by PEFT on a fresh encoder, it predicts as the trained model does, and not as before."""
    _, (tokens, _) = experiment.data(TINY)
    torch.manual_seed(0)
    untrained = with_lora(experiment.classifier(TINY), rank=2, alpha=8.0, targets=("query", "value"))
    before = scores(untrained, tokens)
    outcome = experiment.run(TINY, BUDGET, seed=0)
    outcome.model.save_pretrained(tmp_path)
    after = scores(outcome.model, tokens)
    assert (after - before).abs().max() > 0.01
    again = scores(load_adapter(experiment.classifier(TINY), tmp_path), tokens)
    assert torch.equal(again, after)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in saved if "lora" in name} == {"lora_A", "lora_B"}
    assert all(bool(value.any()) for name, value in saved.items() if "lora_B" in name)
    # the LoRA by itself: with the head as it was, predictions are others too
    without = {name: value for name, value in saved.items() if "head" not in name}
    assert len(without) == 4
    outcome.model.base_model.model.head.modules_to_save["default"].load_state_dict(
        untrained.base_model.model.head.modules_to_save["default"].state_dict()
    )
    assert (scores(outcome.model, tokens) - before).abs().max() > 1e-3


def test_a_lora_and_the_head_are_trained_and_charged(experiment: Experiment) -> None:
    outcome = experiment.run(TINY, BUDGET, seed=None)
    guarantee = outcome.guarantee
    assert guarantee is not None
    assert float(guarantee) <= BUDGET.epsilon
    assert guarantee.delta == BUDGET.delta
    assert "seeded" not in str(guarantee)
    trained = {name for name, value in outcome.model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 2 + 2
    assert all("lora" in name or "head" in name for name in trained)
    fresh = experiment.classifier(TINY).state_dict()
    encoder = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): value
        for name, value in outcome.model.state_dict().items()
        if ".encoder." in name and "lora" not in name
    }
    assert len(encoder) > 10
    assert all(torch.equal(value, fresh[name]) for name, value in encoder.items())


def test_the_head_begins_with_public_sentences(experiment: Experiment) -> None:
    for sign, texts in ((-1, NEGATIVE), (1, POSITIVE)):
        tokens = experiment.tokenizer(list(texts), padding=True, return_tensors="pt")["input_ids"]
        assert sign * scores(experiment.classifier(TINY), tokens).diff(dim=1).mean() > 0


@pytest.mark.real_data("imdb")
@pytest.mark.slow
def test_published_reviews_are_words_of_the_tokenizer(experiment: Experiment) -> None:
    train, test = read_reviews(experiment.tokenizer)
    assert len(train) == len(test) == 25000
    assert train.labels.mean() == 0.5
    assert 0 < train.labels[:100].mean() < 1, "published sorted by class"
    assert len(train.pieces) == train.lengths.sum()


@pytest.fixture
def command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command of the example with tiny settings; returns what it prints."""
    for name in ("START", "PRIVATE", "PLAIN", "FROZEN"):
        monkeypatch.setattr(commands, name, TINY)
    monkeypatch.setattr(commands, "DELTA", 1e-3)
    files = ["--model", str(folder / "model"), "--reviews", str(folder / "reviews.npz")]

    def run(name: str, *options: str) -> str:
        words = [name, *files, "--out", str(tmp_path), *options]
        return CliRunner().invoke(commands.app, words, catch_exceptions=False).stdout

    return run


def test_the_command_trains_compares_and_saves(command: Callable[..., str], tmp_path: Path) -> None:
    printed = command("train", "--delta", "1e-3")
    for line in (
        "public: the pretrained",
        "private: 90 reviews",
        "epsilon <= ",
        "not private: ",
        "frozen",
    ):
        assert line in printed
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
    assert (tmp_path / "adapter_model.safetensors").is_file()


def noted(path: Path) -> list[dict[str, Any]]:
    """Runs that a command has noted in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_settings_are_chosen_on_training_reviews(command: Callable[..., str], tmp_path: Path) -> None:
    printed = command("validate", "--held-out", "30", "--seconds", "0")
    assert "60 reviews to train on" in printed
    assert "30 of the private reviews" in printed
    assert [row["run"] for row in noted(tmp_path / "validate.jsonl")] == ["start"], "no time for more"
    printed = command("validate", "--held-out", "30", "--epsilon", "8", "--settings", '{"steps": 1}')
    assert "half as many steps: left out, as steps=0 must be" in printed
    first, *rows = noted(tmp_path / "validate.jsonl")
    assert first["epsilon"] == 3.0, "what was there is kept"
    assert {row["epsilon"] for row in rows if row["guarantee"] != "none"} == {8.0}
    assert [row["run"] for row in rows][-2:] == ["not private, rate 0.001", "not private, rate 0.003"]
    assert "double batch: left out, as batch=80 must be at most 60" in command(
        "validate", "--held-out", "30", "--settings", '{"batch": 40}'
    )
