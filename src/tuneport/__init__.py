"""tuneport: port a fine-tune to a new base model, without training."""

__version__ = "0.1.0"
