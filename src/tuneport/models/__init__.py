"""Everything that must be known of a model."""
