"""The short form of tools/campaign.py: kills, flipped bits and hostile files leave nothing broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_short_night():
    tool = Path(__file__).parent.parent / "tools" / "campaign.py"
    told = subprocess.run([sys.executable, str(tool), "--short"], capture_output=True, text=True, timeout=900)
    assert told.returncode == 0, told.stdout + told.stderr
    counts = json.loads(told.stdout.splitlines()[-1])
    assert (counts["kills"], counts["flips"], counts["hostile"]) == (5, 12, 16)
    assert not any(counts[name] for name in ("tracebacks", "changed", "lost", "endless"))
