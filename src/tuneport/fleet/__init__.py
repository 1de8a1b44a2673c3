"""Upgrades of many fine-tunes: the list, the workers, the summary."""
