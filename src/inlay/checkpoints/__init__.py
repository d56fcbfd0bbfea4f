"""Save and load: our own folders, and those of adapters and peft."""
