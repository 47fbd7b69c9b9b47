"""Programs to copy and change: each trains something real with hush."""
