"""Where cells run: in processes of this machine, or as tasks of a Ray cluster."""
