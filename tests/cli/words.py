"""Words of the command line that many tests say."""

from __future__ import annotations

import sys

RUN = [sys.executable, "-W", "error::UserWarning:inlay", "-c", "from inlay.cli import main; main()"]
TRAIN = "--train-file"
"""The flag of one's own training rows."""
ROWS = (TRAIN, "train.jsonl", "--validation-file", "validation.jsonl")
DATA = ("--host", "bert", *ROWS, "--batch-size", "16", "--epochs", "3", "--lr", "0.02")
JOB = ("train", "--host", "bert", "--validation-file", "validation.jsonl", "--out", "run", "--threads", "1", "--quiet")
"""A short training, but for its rows."""
