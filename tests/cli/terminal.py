"""A terminal to run things in: what was written to it, and what it shows in the end."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WIDTH, HEIGHT = 120, 40
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\](?:.*?)(?:\x07|\x1b\\)", re.S)


def plain(written: str) -> str:
    """What was written, without colours and movements."""
    return CONTROL.sub("", written)


def screen(written: str) -> list[str]:
    """The lines that are seen after all was written: as much of a terminal as a progress bar uses."""
    lines, row, column, at = [""], 0, 0, 0
    hidden = False
    while at < len(written):
        control = CONTROL.match(written, at)
        if control:
            at, (argument, letter) = control.end(), control.groups()
            count = int(argument) if (argument or "").isdigit() else 1
            if letter is None:  # a title or a link
                continue
            if letter == "A":
                row = max(0, row - count)
            elif letter == "K":
                lines[row] = "" if argument == "2" else lines[row][:column]
            elif letter in "lh" and argument == "?25":
                hidden = letter == "l"
            elif letter != "m":
                raise AssertionError(f"a movement that is not known here: {control.group()!r}")
            continue
        letter, at = written[at], at + 1
        if letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            assert letter.isprintable(), repr(letter)
            lines[row] = lines[row].ljust(column)[:column] + letter + lines[row][column + 1 :]
            column += 1
    assert not hidden, "the cursor stays hidden"
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.rstrip() for line in lines]


@contextmanager
def terminal() -> Iterator[tuple[int, list[str]]]:
    """The end to write to, and what has been written, which is whole after the `with`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    pieces: list[bytes] = []
    written: list[str] = []

    def listen() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError as error:  # Linux says so when the other end is closed
                if error.errno != errno.EIO:
                    raise
                return
            if not piece:
                return
            pieces.append(piece)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield theirs, written
    finally:
        os.close(theirs)
        listener.join(timeout=60)
        os.close(ours)
        written.append(b"".join(pieces).decode("utf-8"))


def run_in_terminal(command: list[str], **options: object) -> tuple[int, str]:
    """The exit code of a command whose output and errors go to a terminal, and what it wrote there."""
    with terminal() as (end, written):
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=end, stderr=end, timeout=300, **options
        ).returncode  # type: ignore[call-overload]
    return code, written[0]
