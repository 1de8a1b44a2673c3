"""Builders that the tests share: tiny models, folders, data and adapters."""
