"""Sources of random bits: cryptographic streams and torch's generators."""

import hashlib
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from hush.core.errors import InvalidValue, Unsupported
from hush.core.value import check_kind

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.ciphers import CipherContext

# state of torch's CPU generator (Mersenne Twister): three 8-byte words, then 624 words of 32 bits
_STATE_BYTES = 5056
_TWISTER = slice(3, 627)
_KEY_BYTES = 32
_MAX_BYTES = 2**38
"""Maximum length of a ChaCha20 stream under one nonce, from its 32-bit block counter."""
_ZEROS = memoryview(bytes(2**20))
_KERNEL_FROM = 2**12
"""Minimum number of words for which a GPU kernel is faster than the CPU followed by a copy."""
_COINS_ON_CPU = 2**16
"""Maximum number of Bernoulli draws for which the CPU is faster than a busy GPU."""


class Stream:
    """Cryptographic random stream (ChaCha20) with a secret 256-bit key, for numbers on `device`.

    Call k uses nonce k, so a run that is resumed from a checkpoint draws the same numbers. The key must
    stay secret, because it determines all numbers.
    """

    def __init__(self, device: "torch.device", key: bytes | Callable[[], bytes]) -> None:
        self.device = device
        self._key = key
        self._calls = 0
        self._cipher: CipherContext | None = None

    @property
    def key(self) -> bytes:
        """The 256-bit key, computed on first use."""
        if not isinstance(self._key, bytes):
            self._key = self._key()
        return self._key

    def array(self, count: int) -> npt.NDArray[np.int64]:
        """`count` 64-bit random integers, on the CPU."""
        return self.at(self.reserve(count), count)

    def at(self, nonce: int, count: int) -> npt.NDArray[np.int64]:
        """`count` 64-bit random integers under a reserved nonce."""
        if not count:
            return np.empty(0, np.int64)
        buffer = bytearray(8 * count)
        encryptor, view = self._encryptor(nonce), memoryview(buffer)
        for start in range(0, len(buffer), len(_ZEROS)):
            part = view[start : start + len(_ZEROS)]
            encryptor.update_into(_ZEROS[: len(part)], part)
        return np.frombuffer(buffer, dtype="<i8").astype(np.int64, copy=False)

    def made_on_gpu(self, count: int) -> bool:
        """Whether it is faster to compute `count` words on the GPU than to copy them there."""
        return self.device.type == "cuda" and count >= _KERNEL_FROM and has_triton()

    def block(self, nonce: int, counter: int) -> list[int]:
        """The eight words of one block under a reserved nonce."""
        stream = self._encryptor(nonce, counter).update(bytes(64))
        return [int(word) for word in np.frombuffer(stream, dtype="<i8")]

    def _encryptor(self, nonce: int, counter: int = 0) -> "CipherContext":
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        start = counter.to_bytes(4, "little") + nonce.to_bytes(12, "little")
        if self._cipher is None:  # creating a cipher takes longer than encrypting a short text
            self._cipher = Cipher(algorithms.ChaCha20(self.key, start), None).encryptor()
        else:
            self._cipher.reset_nonce(start)
        return self._cipher

    def reserve(self, count: int) -> int:
        """Reserve a nonce for `count` words."""
        if 8 * count > _MAX_BYTES:
            limit = f"the {_MAX_BYTES // 8} words of ChaCha20 for one nonce"
            raise Unsupported(f"{count} random words exceed {limit}. Draw them in several calls.")
        self._calls += 1
        return self._calls - 1

    def skip(self, calls: int) -> None:
        """Skip the nonces of `calls` calls."""
        self._calls += calls

    def get_state(self) -> "torch.Tensor":
        """Key and number of calls as bytes. The state must stay secret, as it determines the noise."""
        import torch

        state = self.key + self._calls.to_bytes(8, "little")
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_state(self, state: "torch.Tensor") -> None:
        """Restore a state from `get_state`."""
        content = bytes(state.cpu().numpy().tobytes())
        if len(content) != _KEY_BYTES + 8:
            raise ValueError(f"{len(content)} bytes are not the state of a Stream")
        self._key, self._calls = content[:_KEY_BYTES], int.from_bytes(content[_KEY_BYTES:], "little")
        self._cipher = None


RandomSource: TypeAlias = "torch.Generator | Stream"


def source_for(device: "torch.device", generator: "torch.Generator | None" = None) -> Stream:
    """Cryptographic stream for numbers on `device`.

    Args:
        device: Device of the numbers.
        generator: Source of the seed, for reproducible runs. The seed reveals the noise, so it must stay
            secret.
    """
    import torch

    if generator is not None:
        check_kind("generator", generator, torch.Generator)
        shared = (torch.default_generator, *torch.cuda.default_generators)
        if any(generator is each for each in shared):
            text = (
                "generator is torch's global generator, which other code also uses: published weights "
            )
            text += "could reveal the noise. Omit it, or pass a torch.Generator() with a secret seed."
            raise InvalidValue(text, key="generator")
    if generator is None:
        return Stream(device, secrets.token_bytes(_KEY_BYTES))
    return Stream(device, substream(generator).key)


def substream(source: RandomSource) -> Stream:
    """Independent stream with a key drawn from the source."""
    if isinstance(source, Stream):
        nonce, key, device = source.reserve(_KEY_BYTES // 8), source.key, source.device
        return Stream(device, lambda: Stream(device, key).at(nonce, _KEY_BYTES // 8).tobytes())
    return Stream(source.device, random_words(_KEY_BYTES // 8, source).tobytes())


def derive_source(source: Stream, label: bytes) -> Stream:
    """Derive an independent stream for one label (domain separation).

    An empty label returns the stream itself.
    """
    return Stream(source.device, hashlib.sha256(source.key + label).digest()) if label else source


def random_bits(count: int, source: RandomSource) -> "torch.Tensor":
    """`count` random 64-bit integers on the source's device."""
    import torch

    if isinstance(source, Stream) and source.made_on_gpu(count):
        from hush.core.chacha_kernel import keystream

        return keystream(source.key, source.reserve(count), count, source.device)
    if isinstance(source, Stream):
        return torch.from_numpy(source.array(count)).to(source.device)
    empty = torch.empty(count, dtype=torch.int64, device=source.device)
    return empty.random_(-(2**63), None, generator=source)


def random_words(count: int, source: RandomSource) -> npt.NDArray[np.int64]:
    """`count` random 64-bit integers on the CPU."""
    if isinstance(source, Stream):
        return source.array(count)
    return np.asarray(random_bits(count, source).cpu())


def seed_from(source: RandomSource) -> int:
    """Random 62-bit seed for another generator."""
    return int(random_words(1, source)[0]) & 2**62 - 1


def uniform(count: int, source: RandomSource) -> "torch.Tensor":
    """`count` uniform numbers in [0, 1), in double precision: multiples of 2**-53."""
    import torch

    return (random_bits(count, source) >> 11 & 2**53 - 1).to(torch.float64).mul_(2.0**-53)


def bernoulli(count: int, rate: float, source: RandomSource) -> "torch.Tensor":
    """`count` independent Bernoulli(`rate`) draws.

    The rate is rounded down to a multiple of 2**-62, which does not increase the privacy cost. Small
    counts are drawn on the CPU, from the same words, to avoid waiting for a busy GPU.
    """
    import torch

    if isinstance(source, Stream) and count <= _COINS_ON_CPU:
        words = torch.from_numpy(random_words(count, source))
    else:
        words = random_bits(count, source)
    return (words >> 1 & 2**62 - 1) < int(rate * 2.0**62)


def fresh_generator(device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Torch generator (not cryptographic) with a random state from the operating system."""
    import torch

    generator = torch.Generator(device)
    fill_state(generator, source_for(torch.device("cpu")))
    return generator


def fill_state(generator: "torch.Generator", source: RandomSource) -> None:
    """Fill the whole state of a torch generator from the source.

    On the CPU a seed is not enough: torch uses 32 bits of it, so an attacker can try all four billion
    sequences. Other devices use 64 bits.
    """
    import torch

    seed = seed_from(source)
    generator.manual_seed(seed)
    if generator.device.type != "cpu":
        return
    state = generator.get_state().numpy().copy()
    words = state.view(np.uint64)[_TWISTER] if len(state) == _STATE_BYTES else np.zeros(1, np.uint64)
    if words[0] != seed % 2**32:
        raise Unsupported(
            f"the random state of torch {torch.__version__} has an unknown format, and a 32-bit seed "
            "can be guessed. Install a torch version that hush was tested with."
        )
    words[:] = random_words(len(words) // 2, source).view(np.uint32)
    generator.set_state(torch.from_numpy(state))


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed with tensor descriptors (CUDA builds of torch 2.8 or later)."""
    from importlib.util import find_spec

    return find_spec("triton") is not None and find_spec("triton.tools.tensor_descriptor") is not None
