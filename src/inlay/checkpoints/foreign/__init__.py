"""Folders of other libraries."""
