"""Samples that models write: what a generator is asked, what is kept, and what the texts share with others."""
