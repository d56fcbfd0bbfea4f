import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

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


LONGEST = (
    "studies/test_cells.py", "cli/test_demo.py", "cli/test_verbs.py", "host/test_order.py", "studies/test_tables.py",
    "studies/test_ways.py", "cli/test_mistakes.py", "training/test_joint.py", "studies/test_file.py", "test_docs.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take the longest come first, so that none of them runs when all other processes have ended."""
    order = {str(Path(__file__).parent / name): at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))


@pytest.fixture(autouse=True)
def steady() -> None:
    """The same random numbers in every test, and one thread: two busy cores make two threads slower."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
