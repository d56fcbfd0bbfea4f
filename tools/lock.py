"""Write requirements.lock: the versions of constraints.txt with the hashes of their files, for `pip --require-hashes`.

    python tools/lock.py            # needs the package index
    python tools/lock.py --check    # only compares names and versions with constraints.txt; needs nothing

pip resolves Inlay's own dependencies (not the developers' tools) under constraints.txt, without installing them, and
reports the file it would take for each with its hash. They are the files for this machine's Python and platform.
torch is left out: which build of it is right, and so its hash, depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
LEFT_OUT = ("torch",)
HEADER = """\
# Made by tools/lock.py from constraints.txt, for CPython {python} on {platform}: the tested versions, with hashes of
# their files. torch=={torch} is not in it: its builds differ by machine. Install that first, by its version, and then
#     pip install --require-hashes --no-deps --requirement requirements.lock
#     pip install --no-deps inlay
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def locked() -> dict[str, str]:
    return {canonical(n): v for n, v in re.findall(r"^(\S+)==(\S+)", LOCK.read_text(encoding="utf-8"), re.M)}


def check() -> None:
    pinned, found = constraints(), locked()
    wrong = {name: version for name, version in found.items() if pinned.get(name) != version}
    if wrong or not found:
        sys.exit(f"requirements.lock and constraints.txt differ: {wrong}; run tools/lock.py")
    print(f"{len(found)} packages, as in constraints.txt")


def report(*wanted: str, **settings: str) -> list[dict]:
    """What pip would install, each with its file and hash. Nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "report.json"))
        words = [
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
            "--constraint",
            str(ROOT / "constraints.txt"),
        ]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *words, "--report", file, *wanted]
        subprocess.run(command, check=True, env=os.environ | settings)
        return json.loads(Path(file).read_text(encoding="utf-8"))["install"]


def files() -> list[dict]:
    """The files of the package index itself. A copy of this machine's own might be another build with another hash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"]["learn"]]
    found = [(canonical(item["metadata"]["name"]), item["metadata"]["version"]) for item in report(*direct)]
    pins = [f"{name}=={version}" for name, version in found if name not in LEFT_OUT]
    no_copies = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_CACHE_DIR": "1",
    }
    items = report("--no-deps", *pins, **no_copies)
    local = [item["metadata"]["name"] for item in items if not item["download_info"]["url"].startswith("https:")]
    if local:
        sys.exit(f"not from the package index: {', '.join(local)}")
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with constraints.txt, without the index")
    if parser.parse_args().check:
        return check()
    lines = []
    for item in sorted(files(), key=lambda item: canonical(item["metadata"]["name"])):
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{digest}\n")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    header = HEADER.format(python=python, platform=sys.platform, torch=constraints()["torch"])
    LOCK.write_text(header + "".join(lines), encoding="utf-8")
    return check()


if __name__ == "__main__":
    main()
