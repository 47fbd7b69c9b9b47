"""The fine-tuning example on a tiny encoder with random weights."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
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
from examples.finetune.classifier import NEGATIVE, POSITIVE, load_adapter, load_encoder, with_lora
from examples.finetune.experiment import Experiment
from examples.finetune.reviews import (
    END,
    PADDING,
    START,
    Reviews,
    load_reviews,
    read_reviews,
    save_reviews,
)
from examples.finetune.search import Log, search
from examples.finetune.training import Settings
from hush.core.errors import DataError, HushError, Unsupported

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


def test_without_peft_the_way_out_is_said(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Unsupported, match="pip install peft"):
        experiment.run(TINY, BUDGET, seed=0)


def test_the_head_begins_with_public_sentences(experiment: Experiment) -> None:
    for sign, texts in ((-1, NEGATIVE), (1, POSITIVE)):
        tokens = experiment.tokenizer(list(texts), padding=True, return_tensors="pt")["input_ids"]
        assert sign * scores(experiment.classifier(TINY), tokens).diff(dim=1).mean() > 0


def test_long_reviews_keep_their_first_and_last_pieces() -> None:
    pieces = np.arange(200, 211, dtype=np.int16)
    reviews = Reviews(pieces, np.array([2, 9]), np.array([0, 1]))
    short, long = reviews.rows(7, first=2).tolist()
    assert short == [START, 200, 201, END, PADDING, PADDING, PADDING]
    assert long == [START, 202, 203, 208, 209, 210, END]
    assert reviews.rows(7)[1].tolist() == [START, *range(206, 211), END]
    assert reviews.part(1, 2).rows(7).tolist() == reviews.rows(7)[1:].tolist()


@pytest.mark.real_data("imdb")
@pytest.mark.slow
def test_published_reviews_are_words_of_the_tokenizer(experiment: Experiment) -> None:
    train, test = read_reviews(experiment.tokenizer)
    assert len(train) == len(test) == 25000
    assert train.labels.mean() == 0.5
    assert 0 < train.labels[:100].mean() < 1, "published sorted by class"
    assert len(train.pieces) == train.lengths.sum()


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="does not load as an encoder"):
        load_encoder(tmp_path)
    with pytest.raises(DataError, match="prepare"):
        load_reviews(tmp_path / "none.npz")


def test_a_search_takes_what_is_better_and_ends_in_time(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(self: Experiment, settings: Settings, budget: hush.Budget, seed: int) -> Any:
        asked.append(settings)
        right = 80 - 10 * abs(settings.learning_rate - 0.2) - (not settings.train_a)
        return type("Outcome", (), {"accuracy": right, "seconds": 0.0, "guarantee": None})

    monkeypatch.setattr(Experiment, "run", run)
    best = search(experiment, TINY, BUDGET, Log(None, float("inf")))
    assert best == replace(TINY, learning_rate=4 * TINY.learning_rate), "nothing else was better"
    assert len(asked) == len(set(asked)) > 10
    asked.clear()
    assert search(experiment, TINY, BUDGET, Log(None, 0.0)) == TINY
    assert asked == [TINY]
    assert "rate x 2" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("train", ["--settings", "{bad"], "must be a JSON object"),
        ("train", ["--settings", '{"nosuch": 1}'], "'nosuch' are not of the names and kinds"),
        ("train", ["--settings", '{"learning_rate": "x"}'], "'learning_rate' are not of"),
        ("train", ["--settings", '{"steps": 0}'], "steps=0 must be a whole number >= 1"),
        ("train", ["--settings", '{"head_scale": 0}'], "head_scale=0 must be a finite number > 0"),
        ("train", ["--settings", '{"first": 7}'], "first=7 tokens .* do not fit a length of 8"),
        ("train", ["--settings", '{"length": 64}'], "length=64 must be at most 32"),
        ("train", ["--settings", '{"targets": ["query", "nosuch"]}'], "targets has 'nosuch'"),
        ("train", ["--settings", '{"batch": 91}'], "batch=91 must be at most 90"),
        ("validate", ["--frozen", '{"batch": 90}', "--held-out", "30"], "batch=90 must be at most 60"),
        ("validate", ["--seconds", "nan"], "--seconds=nan must be a finite number >= 0"),
        ("train", ["--epsilon", "0"], "epsilon"),
        ("train", ["--device", "tpu"], "tpu"),
        ("train", ["--model", "/nonexistent"], "has no config.json"),
        ("final", ["--out", __file__], "must be a folder that files can be written to"),
        ("validate", ["--held-out", "90"], "at least 1 and fewer than the 90"),
    ],
)
def test_what_is_wrong_is_said_before_any_training(
    name: str,
    options: list[str],
    reason: str,
    command: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Experiment, "run", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(Experiment, "run_frozen", lambda *_: pytest.fail("trained"))
    with pytest.raises(HushError, match=reason):
        command(name, *options)


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


def test_final_runs_are_summed_up(command: Callable[..., str], tmp_path: Path) -> None:
    printed = command("final", "--seeds", "2")
    assert "adapter saved and loaded" in printed
    rows = noted(tmp_path / "final.jsonl")
    assert len(rows) == 2 * (3 + 1 + 3 + 1)
    for name in {row["run"] for row in rows}:
        right = [row["accuracy"] for row in rows if row["run"] == name]
        assert f"{name:<24} {sum(right) / 2:6.2f} +- {abs(right[0] - right[1]) / 2**0.5:.2f}" in printed
    assert "no time left" in command("final", "--seeds", "1", "--seconds", "0")
