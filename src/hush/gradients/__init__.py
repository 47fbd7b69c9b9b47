"""Per-sample gradients: recorded by layer, measured by ghost norms, clipped and summed.

Read `recording` (one pass leaves a tape), `forward` (how it is intercepted), `rules` (how layers leave
their factors), `tape` (norms and weighted sums of a batch), `terms` (the same for one parameter),
`precision` and `products` (arithmetic whose rounding is bounded), `cuda_graphs` (replays on a GPU).
Soundness: docs/guarantees/tape.md.
"""
