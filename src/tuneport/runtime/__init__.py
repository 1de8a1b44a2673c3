"""Fit a job to a machine: memory, time, processes, resuming."""
