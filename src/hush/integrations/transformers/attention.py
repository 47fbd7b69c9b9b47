"""Attention masks of transformers models that `torch.vmap` can build for all records at once."""

from typing import Any

from torch import nn

_NAME = "sdpa_vectorized"


def vectorize_attention(model: nn.Module) -> None:
    """Let transformers models build their attention masks without reading them.

    With `sdpa` attention, a model tests whether the mask masks anything, and skips it if not.
    `torch.vmap` cannot run that test, so a private step would compute one record at a time. This sets an
    attention implementation that is `sdpa` without the test. Other implementations are left as they are.

    Args:
        model: Model of the transformers library, or a module that contains some.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(_NAME, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(_NAME, mask)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == "sdpa":
            module.set_attn_implementation(_NAME)
