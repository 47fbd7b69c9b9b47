"""The values everything speaks."""
