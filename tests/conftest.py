import atexit
import os
import shutil
import signal
import tempfile

CACHE = tempfile.mkdtemp(prefix="inlay-cache-")  # no test reads or writes the user's own
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["INLAY_CACHE"] = CACHE
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

# As on a terminal: whoever starts the tests with nohup or in the background has these ignored, and so their children.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def steady() -> None:
    """The same random numbers in every test, and one thread: two busy cores make two threads slower."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
