"""Task vectors: what a fine-tune changed."""
