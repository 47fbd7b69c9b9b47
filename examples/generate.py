"""`python -m examples.generate`: synthetic text from a decoder that is fine-tuned on private texts.

The base is public and frozen, and a LoRA is trained. One record is one text.
"""

from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import transformers
import typer
from torch import Tensor

import hush
from hush.integrations.transformers import vectorize_attention

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SENTENCES = (
    "the film was slow and the end was sad",
    "the film was warm and the cast was fine",
    "the book was long and the end was good",
)


class Characters:
    """Public tokens for the demonstration: one for each character."""

    alphabet = " abcdefghijklmnopqrstuvwxyz.,'"
    pad_token_id = 0
    eos_token_id = 1

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.alphabet.index(each) + 2 for each in text.lower() if each in self.alphabet]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[token - 2] for token in tokens if token > 1)


def tiny_decoder(vocabulary: int) -> Any:
    """A Llama of two layers with random weights."""
    llama: Any = transformers.LlamaForCausalLM
    return llama(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


def encoded(texts: list[str], tokenizer: Any, length: int) -> dict[str, Tensor]:
    """Tokens that begin and end with the end token, padded or cut to a public length."""
    end = tokenizer.eos_token_id
    rows = [([end, *tokenizer.encode(text, add_special_tokens=False), end])[:length] for text in texts]
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean loss of the tokens of each text; padding is -100."""
    scores = outputs.logits[:, :-1].transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(scores, targets[:, 1:], reduction="none")
    return losses.sum(1) / (targets[:, 1:] != -100).sum(1).clamp(min=1)


@app.command()
def generate(
    texts: Annotated[Path | None, typer.Option(help="Private texts, one per line.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or name of a public decoder.")] = None,
    bits: Annotated[int, typer.Option(help="Bits of the frozen base: 4, 8 or 16.")] = 16,
    epsilon: Annotated[float, typer.Option(help="Budget for the model and all samples.")] = 8.0,
    delta: Annotated[float, typer.Option()] = 1e-5,
    steps: Annotated[int, typer.Option()] = 60,
    batch: Annotated[int, typer.Option(help="Expected number of texts per step.")] = 256,
    length: Annotated[int, typer.Option(help="Public number of tokens per text.")] = 48,
    samples: Annotated[int, typer.Option(help="Number of generated texts.")] = 5,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.01,
    device: Annotated[str, typer.Option()] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for the adapter.")] = None,
) -> None:
    """Fine-tune on private texts, print synthetic texts and their guarantee.

    Without options: a tiny decoder with random weights and 2,000 texts of three sentences.
    """
    records = texts.read_text().splitlines() if texts else [*SENTENCES] * 667
    if model is None:
        tokenizer: Any = Characters()
        base = tiny_decoder(len(tokenizer.alphabet) + 2)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        options: dict[str, Any] = {}
        if bits < 16:
            options["device_map"] = {"": device}
            quantized: Any = transformers.BitsAndBytesConfig
            options["quantization_config"] = quantized(
                load_in_4bit=bits == 4, load_in_8bit=bits == 8, llm_int8_threshold=0.0
            )
        base = transformers.AutoModelForCausalLM.from_pretrained(model, **options)
    settings = peft.LoraConfig(
        r=8,
        lora_alpha=32,
        target_modules="all-linear",
        modules_to_save=None if model else ["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    decoder: Any = peft.get_peft_model(base if bits < 16 else base.to(device), settings)
    vectorize_attention(decoder)

    inputs = encoded(records, tokenizer, length)
    targets = inputs["input_ids"].where(inputs["attention_mask"] > 0, -100)
    budget = hush.Budget(epsilon=epsilon, delta=delta)
    plan = hush.Plan(
        sampling=hush.Poisson(min(1.0, batch / len(records))),
        clipping=hush.L2(0.1),
        noise=hush.Gaussian(1.0),
    )
    plan = hush.calibrate(plan, budget, steps=steps)
    trained = [value for value in decoder.parameters() if value.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=rate)
    run = hush.train(decoder, loss, optimizer, plan, (inputs, targets), budget=budget, steps=steps)

    decoder.eval()
    start = torch.full((samples, 1), tokenizer.eos_token_id, device=device)
    mask = torch.ones_like(start)
    with torch.no_grad():
        rows = decoder.generate(
            input_ids=start, attention_mask=mask, do_sample=True, max_new_tokens=length, temperature=0.7
        )
    for row in rows.tolist():
        print(tokenizer.decode([token for token in row if token != tokenizer.eos_token_id]))
    print(run.guarantee)
    if out is not None:
        decoder.save_pretrained(out)


if __name__ == "__main__":
    app()
