"""Whole files and folders, locks, the cache folder, JSON."""
