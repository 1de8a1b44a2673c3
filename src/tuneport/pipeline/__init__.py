"""One transfer, from inputs to a Result."""
