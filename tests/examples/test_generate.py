"""The example of synthetic text on its tiny decoder."""

from pathlib import Path
from typing import Any

import peft
import pytest
from typer.testing import CliRunner

from examples.generate import Characters, app, encoded, tiny_decoder


def test_it_prints_texts_and_the_guarantee_that_covers_them(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a warm film\na cold film\n" * 20)
    options = ["--texts", str(texts), "--steps", "2", "--batch", "10", "--length", "12"]
    options += [
        "--samples",
        "3",
        "--epsilon",
        "4",
        "--delta",
        "1e-3",
        "--out",
        str(tmp_path / "adapter"),
    ]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert "epsilon <= 3.99" in lines[-1]
    assert "delta 0.001" in lines[-1]
    adapter = peft.PeftModel.from_pretrained(tiny_decoder(32), tmp_path / "adapter")
    assert any("lora_A" in name for name, _ in adapter.named_parameters())


def test_texts_have_a_public_length() -> None:
    rows = encoded(["ab", "a longer text"], Characters(), 6)
    assert rows["input_ids"].tolist()[0] == [1, 3, 4, 1, 0, 0]
    assert rows["attention_mask"].sum(1).tolist() == [4, 6]
    assert Characters().decode(rows["input_ids"].tolist()[0]) == "ab"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base(bits: int, tmp_path: Path) -> None:
    """Runs if bitsandbytes is installed."""
    pytest.importorskip("bitsandbytes")
    import tokenizers
    import transformers

    words = {word: place for place, word in enumerate(["<pad>", "<end>", "<unk>", "a", "warm", "film"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(
        tokenizer_object=model, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "model")
    tiny_decoder(6).save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts.txt"
    texts.write_text("a warm film\n" * 20)
    options = ["--texts", str(texts), "--model", str(tmp_path / "model"), "--bits", str(bits)]
    options += ["--steps", "2", "--batch", "10", "--length", "6", "--delta", "1e-3", "--samples", "1"]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert "proved, publishable" in done.stdout
