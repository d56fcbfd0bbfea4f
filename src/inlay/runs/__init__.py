"""A training job as a folder: settings, record, training, use."""
