"""Folders of `adapters` (AdapterHub)."""
