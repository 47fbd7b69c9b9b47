"""The GPU's keystream against the CPU's, which is held against RFC 8439."""

import pytest
import torch

from hush.core.randomness import Stream, random_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("words", [2**12, 2**16 + 1, 3_000_003])
def test_a_gpu_gives_the_same_stream(words: int) -> None:
    key = bytes(range(32))
    gpu, cpu = Stream(torch.device("cuda"), key), Stream(torch.device("cpu"), key)
    for _ in range(2):
        drawn = random_bits(words, gpu)
        assert drawn.is_cuda
        assert torch.equal(drawn.cpu(), random_bits(words, cpu))
