"""Files and folders that are whole or not there, locks, the cache folder, JSON."""
