"""Geometry of a convolution: its gradients, its input patches and their Gram matrices."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hush.gradients.products import gram, record_gradients, uses_kernels
from hush.gradients.terms import CHUNK_ENTRIES

_LARGE, _FEW_CHANNELS = 2**16, 4
"""From this many weights on, or below this many channels, unfolding beats one grouped convolution."""

_MATRIX = 2**14
"""Entries of a matrix up to which a depthwise convolution is a matrix product for each channel."""


@dataclass(frozen=True, eq=False)
class ConvolutionShape:
    """Shape of a convolution's weight, and its stride, padding (equal on both sides) and dilation."""

    shape: torch.Size
    """(out, in / groups, *kernel)."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._multiplies(x):
            return self._convolve(x, weight, bias)
        matrices, outputs = self._matrices(weight, x)
        output: Tensor = _by_channel(x, matrices).unflatten(2, outputs)
        return output if bias is None else output + bias.view(-1, *(1 for _ in outputs))

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if self._multiplies(x):
            return _by_channel(grad, self._matrices(weight, x)[0].mT).view(x.shape)
        return self._backward(grad, x, weight, self.groups, [True, False, False])[0]

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, summed over images."""
        like = grad.new_empty(1).expand(self.shape)
        return self._backward(grad, x, like, self.groups, [False, True, False])[1]

    def per_sample_weight_gradients(self, grad: Tensor, x: Tensor, *, tf32: bool = False) -> Tensor:
        """The gradient of the weight for each image: (images, *shape), in single precision at least.

        Args:
            grad: (images, out, *positions).
            x: (images, in, *sizes).
            tf32: whether a kernel of its own may multiply in TensorFloat-32; torch's ask torch.
        """
        images, out = grad.shape[:2]
        if self.has_kernel(x):
            from hush.gradients.kernels.convolution_kernel import weighted_block_sums

            ones = torch.ones(images, device=x.device)
            return weighted_block_sums(grad, x, ones, self, 1, tf32=tf32)
        small = math.prod(self.shape[2:]) == 1 or self.shape[1] < _FEW_CHANNELS
        if self.groups == 1 and (x.is_cuda or small or math.prod(self.shape) >= _LARGE):
            step = self.unfolded_at_once(grad) if x.is_cuda else images
            parts = [
                record_gradients(some.flatten(2).mT, self.unfold(inputs, grad.shape[2:]).mT)
                for some, inputs in zip(grad.split(step), x.split(step), strict=True)
            ]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(images, *self.shape)
        # One grouped convolution: all images side by side as channels, a group of channels to each.
        # Strides afresh: those of one position could still say "channels last", and torch believes it.
        grads, inputs = (part.reshape(-1).view(1, -1, *part.shape[2:]) for part in (grad, x))
        like = grad.new_empty(1).expand(images * out, *self.shape[1:])
        _, stacked, _ = self._backward(grads, inputs, like, images * self.groups, [False, True, False])
        return stacked.view(images, *self.shape)

    def unfolded_at_once(self, grad: Tensor) -> int:
        """Images whose input patches are written out at the same time."""
        size = math.prod(self.shape[1:]) * math.prod(grad.shape[2:])
        return max(1, CHUNK_ENTRIES[grad.device.type] // size)

    def unfold(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """The input patch of each output position, as im2col: (images, in * kernel, positions)."""
        size = math.prod(self.shape[1:]), math.prod(outputs)
        return self._windows(x, outputs).reshape(len(x), *size)

    def patches(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """`unfold` with positions first, as a linear layer has them: (images, positions, entries)."""
        axes = len(outputs)
        windows = self._windows(x, outputs).movedim(tuple(range(-axes, 0)), tuple(range(1, 1 + axes)))
        return windows.reshape(len(x), math.prod(outputs), math.prod(self.shape[1:]))

    def patch_gram(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """Gram matrix of the input patches: (images, positions, positions).

        Its entries are sums over the kernel of inner products between two pixels: nothing is unfolded,
        unless the patches have fewer entries than there are pairs of pixels.
        """
        sizes = x.shape[2:]
        if math.prod(outputs) * math.prod(self.shape[1:]) < math.prod(sizes) ** 2:
            return gram(self.patches(x, outputs))
        pixels = x.flatten(2).mT @ x.flatten(2)
        pixels = functional.pad(pixels.view(len(x), *sizes, *sizes), self._sides * 2)
        gram_matrix = x.new_zeros(len(x), *outputs, *outputs)
        for offset in itertools.product(*(range(size) for size in self.shape[2:])):
            axes = zip(offset, self.dilation, self.stride, outputs, strict=True)
            window = tuple(slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in axes)
            gram_matrix += pixels[(slice(None), *window, *window)]
        return gram_matrix.view(len(x), math.prod(outputs), -1)

    def has_kernel(self, x: Tensor) -> bool:
        """Whether per-sample gradients of an input are formed by a kernel that unfolds nothing."""
        sizes = zip(x.shape[2:], self.padding, self.stride, strict=True)
        pixels = math.prod(size + 2 * sides + step + 4 for size, sides, step in sizes)
        # its offsets within a record, unfolded along its width, are 32 bits
        fits = pixels * max(self.shape[0], self.shape[1] * self.shape[-1]) < 2**31
        return self.groups == 1 and len(self.stride) <= 2 and fits and uses_kernels(x)

    @property
    def splits_input(self) -> bool:
        """Whether no two patches overlap and none leaves the image: a linear layer on a part of each."""
        apart = self.stride == tuple(self.shape[2:]) and not any(self.padding)
        return apart and self.groups == 1 and set(self.dilation) == {1}

    @property
    def pointwise(self) -> bool:
        """Whether it is a linear layer on the channels of each position."""
        return self.splits_input and math.prod(self.stride) == 1

    def _multiplies(self, x: Tensor) -> bool:
        """Whether it is depthwise, on images so small that a product with all pixels of each is faster.

        torch's own kernels for depthwise convolutions take several times as long there.
        """
        small = math.prod(x.shape[2:]) ** 2 <= _MATRIX * math.prod(self.stride)
        return x.is_cuda and 1 < self.groups == self.shape[0] == x.shape[1] and small

    def _matrices(self, weight: Tensor, x: Tensor) -> tuple[Tensor, torch.Size]:
        """A depthwise convolution as a matrix a channel, (channels, pixels, positions), and its output's
        shape."""
        pixels = math.prod(x.shape[2:])
        ones = torch.eye(pixels, dtype=weight.dtype, device=weight.device)
        images = ones.view(pixels, 1, *x.shape[2:]).expand(-1, self.groups, *x.shape[2:])
        answers = self._convolve(images, weight, None)
        return answers.flatten(2).movedim(0, 1), answers.shape[2:]

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, self._zero, self.groups
        )

    def _windows(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """View of the padded input: (images, in, *kernel, *positions)."""
        padded = functional.pad(x, self._sides)
        image, channel, *pixel = padded.stride()
        return padded.as_strided(
            (*x.shape[:2], *self.shape[2:], *outputs),
            (
                image,
                channel,
                *(a * b for a, b in zip(pixel, self.dilation, strict=True)),
                *(a * b for a, b in zip(pixel, self.stride, strict=True)),
            ),
        )

    @property
    def _sides(self) -> list[int]:
        """The padding as `pad` takes it: last dimension first, both of its sides."""
        return [side for size in reversed(self.padding) for side in (size, size)]

    @property
    def _zero(self) -> tuple[int, ...]:
        return (0,) * len(self.stride)

    def _backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, groups: int, mask: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            self._zero,
            groups,
            mask,
        )
        return parts


def _by_channel(images: Tensor, matrices: Tensor) -> Tensor:
    """Products of a matrix (channels, before, after) with each channel: (images, channels, after)."""
    return torch.bmm(images.flatten(2).transpose(0, 1), matrices).transpose(0, 1).contiguous()
