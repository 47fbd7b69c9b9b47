"""One private step, the loop around it, and what survives a crash."""
