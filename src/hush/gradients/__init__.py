"""Per-sample gradients: recorded by layer, clipped by ghost norms, and summed.

Read `probe` (checks before the first draw), `recording` (forward and backward pass that record a tape),
`rules` (layers and their factors), `tape` (norms and weighted sums of a batch), `terms` (the same for
one parameter), `precision` and `products` (arithmetic with bounded rounding), `cuda_graph` (replays on a
GPU). Soundness: docs/guarantees/tape.md.
"""
