"""Private selection: the cost of releasing the best of a random number of runs."""
