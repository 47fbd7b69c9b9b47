"""Work of a physical batch on a GPU, captured once as a CUDA graph and replayed."""
