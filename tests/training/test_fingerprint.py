"""Fingerprints of what is released."""

import torch

from hush.training.fingerprint import fingerprint


def test_equal_bits_have_equal_names_and_any_change_shows() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.randn(3, 50).to(dtype)
        name = fingerprint([tensor])
        assert name == fingerprint([tensor.clone()])
        names = {name}
        for i in range(tensor.numel()):
            changed = tensor.clone()
            changed.view(-1)[i] = (
                torch.nextafter(changed.view(-1)[i].float(), torch.tensor(torch.inf)).to(dtype)
                if dtype == torch.float32
                else changed.view(-1)[i] * 1.5
            )
            names.add(fingerprint([changed]))
        assert len(names) == tensor.numel() + 1
