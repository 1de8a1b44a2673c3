"""Samples: datasets, formats, samplers and augmentation. Public: Dataset and read_data."""

from .dataset import Dataset
from .tasks import read_data

__all__ = ["Dataset", "read_data"]
