"""RDP of selective release (DPSUR): a proposal, a noisy test, and the model only if it is accepted."""
