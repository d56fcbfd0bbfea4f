"""Looking inside: what a fusion attends to, and pictures of it."""
