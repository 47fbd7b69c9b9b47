"""Per-sample gradients: recorded by layer, measured by ghost norms, clipped and summed.

Read `probe` (mistakes found before the first draw), `recording` (one pass leaves a tape), `rules` (how
layers leave their factors), `tape` (norms and weighted sums of a batch), `terms` (the same for one
parameter), `precision` and `products` (arithmetic with bounded rounding), `cuda_graph` (replays on a
GPU). Soundness: docs/guarantees/tape.md.
"""
