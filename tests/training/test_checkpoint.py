from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from hush.core.errors import CheckpointError
from hush.training.checkpoint import load, save, save_weights

STATE = {
    "numbers": [1, 2.5, float("inf"), True, None, "text"],
    "tuple": (0.9, 0.999),
    "by id": {0: {"momentum": torch.randn(3)}, 1: {"momentum": None}},
    "counter": Counter({3: 1, 5: 2}),
    "tensors": [torch.zeros(0), torch.tensor(3, dtype=torch.int64), torch.ones(2).bfloat16()],
    "empty": {},
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_state_comes_back_with_its_types(tmp_path: Path) -> None:
    save(tmp_path / "c", STATE)
    assert same(load(tmp_path / "c"), STATE)


def test_a_damaged_file_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path, STATE)
    whole = path.read_bytes()
    for position in [*range(0, len(whole), 37), len(whole) - 1]:
        flipped = bytearray(whole)
        flipped[position] ^= 1
        path.write_bytes(bytes(flipped))
        try:
            restored = load(path)
        except CheckpointError as error:
            assert "cannot be used" in str(error)  # noqa: PT017
        else:
            assert same(restored, STATE), f"damage at byte {position} went unnoticed"
    for keep in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match="cannot be used"):
            load(path)


def test_code_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="/scheduler/f is a function"):
        save(tmp_path / "c", {"scheduler": {"f": lambda x: x}})
    assert not (tmp_path / "c").exists()


def test_published_weights_hold_the_weights_and_nothing_else(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_weights(tmp_path / "m", model)
    weights = safetensors.torch.load_file(tmp_path / "m")
    assert same(weights, dict(model.state_dict()))
