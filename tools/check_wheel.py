"""Build the wheel, install it into a clean environment, and use it as the README does.

    python tools/check_wheel.py [--uv]

The wheel is left in dist/. In the new environment `inlay --help` and `inlay --version` run, and the README's Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(map(str, words))}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", action="store_true", help="install with uv, and torch for CPUs only")
    uv = parser.parse_args().uv
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder)
        run(sys.executable, "-m", "venv", new / "venv")
        python = new / "venv" / "bin" / "python"
        run(python, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", "dist", ".")
        (wheel,) = (ROOT / "dist").glob("*.whl")
        pip = [python, "-m", "pip", "install", "--quiet"]
        install = ["uv", "pip", "install", "--torch-backend", "cpu", "--python", python] if uv else pip
        run(*install, "--constraint", "constraints.txt", "torch")
        run(*install, "--constraint", "constraints.txt", wheel)
        assert "Usage" in run(new / "venv" / "bin" / "inlay", "--help", cwd=new)
        print(run(new / "venv" / "bin" / "inlay", "--version", cwd=new).strip(), "from", wheel.name)
        (lines,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
        (new / "readme.py").write_text(lines, encoding="utf-8")
        print(run(python, "readme.py", cwd=new).strip())


if __name__ == "__main__":
    main()
