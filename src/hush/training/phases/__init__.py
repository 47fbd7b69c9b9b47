"""What a private step consists of: its state, its clipped sum, its noisy mean."""
