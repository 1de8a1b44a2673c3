"""The mathematics of coordinate maps: torch tensors only."""
