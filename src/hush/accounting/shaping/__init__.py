"""Block-wise Gaussian noise of least total variance."""
