"""What a process that a test forks begins with: importing takes the longest, and is done once."""

from importlib import import_module

from hush.noise.exact.layers import layers

for name in (
    "cryptography.hazmat.primitives.ciphers",
    "hush.audit.canaries",
    "hush.training.loop",
    "pytest",
    "torch._dynamo",  # an optimizer imports it
    "torch.distributed",
):
    import_module(name)
layers(2.0)  # the table of normal noise
