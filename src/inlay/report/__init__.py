"""Pictures and pages from records."""
