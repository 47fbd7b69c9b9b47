"""Replacement of layers that a private step does not support."""

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hush.core.errors import Unsupported
from hush.core.value import with_article
from hush.gradients.models import layer_at, uses_batch_statistics

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fix(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Replace the layers of a model that cannot be trained privately.

    | layer | replacement |
    |---|---|
    | `BatchNorm2d`, `BatchNorm3d`, `SyncBatchNorm` | `GroupNorm` with up to 32 groups of 4 channels |
    | `BatchNorm1d` | `GroupNorm` with one group, which also normalises vectors |
    | `InstanceNorm` with running statistics | `InstanceNorm` without running statistics |
    | `Embedding`, `EmbeddingBag` with `max_norm` | same layer without `max_norm` |
    | activation or dropout with `inplace=True` | `inplace=False`, which is faster in a private step |

    Modifies the model in place; returns a new object only if the model itself is a batch norm. A group
    norm keeps the weight, the bias and the `eps` of the batch norm that it replaces, but not the running
    statistics, so a pretrained model needs further training. If the model is in training mode, batch
    norms in `.eval()` mode are frozen and are not replaced.

    Args:
        model: Model to modify, before creating its optimizer.

    Returns:
        The model, and one line of text per change.

    Raises:
        Unsupported: The model contains a subclass of batch norm, which may compute something else. The
            model is unchanged.

    >>> from torch import nn
    >>> layers = nn.Conv2d(3, 256, 3), nn.BatchNorm2d(256), nn.ReLU(inplace=True)
    >>> model, changes = fix(nn.Sequential(*layers))
    >>> print(*changes, sep="\\n")
    layer '1': BatchNorm2d(256) -> GroupNorm(32, 256)
    layer '2': ReLU(inplace=True) -> inplace=False
    """
    norms: dict[nn.Module, nn.GroupNorm] = {
        module: _group_norm(name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (uses_batch_statistics(module) or not model.training)
    }
    changes = []
    for name, module in model.named_modules():
        kind, before, after = type(module).__name__, "", ""
        if module in norms:
            norm = norms[module]
            before, after = str(norm.num_channels), f"GroupNorm({norm.num_groups}, {norm.num_channels})"
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            before, after = "track_running_stats=True", "track_running_stats=False"
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            before, after = f"max_norm={module.max_norm:g}", "max_norm=None"
            module.max_norm = None
        elif getattr(module, "inplace", None) is True:
            before, after = "inplace=True", "inplace=False"
            module.inplace = False
        if after:
            changes.append(f"{layer_at(name)}: {kind}({before}) -> {after}")
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in norms:
                parent._modules[name] = norms[child]
    return norms.get(model, model), changes


def _group_norm(name: str, module: _BatchNorm) -> nn.GroupNorm:
    """Group norm with the parameters of a batch norm.

    Groups have at least 4 channels. The output of smaller groups can be constant on feature maps of one
    pixel, and they normalise worse (Wu and He, 2018, table 3).
    """
    if type(module) not in _BATCH_NORMS:
        raise Unsupported(
            f"{layer_at(name)} is {with_article(type(module).__name__)}, and only torch's own batch "
            "norms have a known replacement. Use torch.nn.GroupNorm. If the model has Lazy modules, run "
            "it once on public or synthetic inputs first."
        )
    channels = module.num_features
    groups = 1 if isinstance(module, nn.BatchNorm1d) else math.gcd(32, channels)
    while groups > 1 and channels < 4 * groups:
        groups //= 2
    norm = nn.GroupNorm(groups, channels, eps=module.eps, affine=False)
    norm.affine = module.affine
    norm.weight, norm.bias = module.weight, module.bias
    return norm.train(module.training)
