"""Samples: data sets, formats, samplers and augmentation."""
