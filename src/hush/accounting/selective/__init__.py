"""Selective release (DPSUR): what one trial costs."""
