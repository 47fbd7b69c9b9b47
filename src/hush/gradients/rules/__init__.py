"""How the layers that have one keep their per-example gradients: torch function -> rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hush.gradients.rules import decompositions
from hush.gradients.rules.attention import attention, dot_product
from hush.gradients.rules.convolution import convolution
from hush.gradients.rules.embedding import embedding, embedding_bag
from hush.gradients.rules.linear import addmm, linear, matmul
from hush.gradients.rules.normalisation import group_norm, instance_norm, layer_norm, rms_norm
from hush.gradients.rules.recurrent import gru, lstm, rnn_relu, rnn_tanh

RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: linear,
    torch.addmm: addmm,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    torch.conv3d: convolution,
    functional.embedding: embedding,
    functional.embedding_bag: embedding_bag,
    functional.layer_norm: layer_norm,
    functional.group_norm: group_norm,
    functional.instance_norm: instance_norm,
    functional.rms_norm: rms_norm,
    functional.multi_head_attention_forward: attention,
    functional.scaled_dot_product_attention: dot_product,
    torch._VF.lstm: lstm,
    torch._VF.gru: gru,
    torch._VF.rnn_tanh: rnn_tanh,
    torch._VF.rnn_relu: rnn_relu,
    torch._VF.lstm_cell: decompositions.lstm_cell,
    torch._VF.gru_cell: decompositions.gru_cell,
    torch._VF.rnn_tanh_cell: decompositions.rnn_tanh_cell,
    torch._VF.rnn_relu_cell: decompositions.rnn_relu_cell,
    functional.bilinear: decompositions.bilinear,
}
"""A rule answers NotImplemented where it does not apply; the call then takes the general way."""
