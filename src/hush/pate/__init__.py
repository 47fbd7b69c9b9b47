"""Teachers, noisy votes, student."""
