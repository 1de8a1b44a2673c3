"""Run models on samples and return numbers."""
