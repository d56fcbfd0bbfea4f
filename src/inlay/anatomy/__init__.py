"""Where things are in a host: places, families, probing."""
