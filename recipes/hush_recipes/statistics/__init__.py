"""Private statistics: moments, whitening, and quantiles of norms."""
