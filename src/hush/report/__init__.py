"""Privacy reports of runs, and text tables."""
