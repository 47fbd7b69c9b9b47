"""Per-sample gradients: recorded by layer, clipped by ghost norms, and summed.

Modules, in reading order: `probe` (checks before the first draw), `recording` (forward and backward pass
that record a tape), `rules` (layers and their factors), `tape` (norms and weighted sums of a batch),
`terms` (norms and weighted sums of one parameter), `precision` and `products` (arithmetic with bounded
rounding), `cuda_graph` (CUDA graphs). docs/guarantees/tape.md has the proofs.
"""
