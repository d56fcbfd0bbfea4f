"""Files of other libraries: JSON with known options, and tensors read without running code.

Nothing here trusts a file. A `.bin` is a pickle: it is opened only when the user says so, and then by torch's
`weights_only` reader, which knows tensors and containers and executes nothing.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from pydantic import AfterValidator
from torch import Tensor

from inlay.checkpoints.fitting import misfit
from inlay.config import Config
from inlay.errors import CheckpointError, ConfigError, InlayError
from inlay.storage.plain_json import read_json

C = TypeVar("C", bound=Config)
Tensors = dict[str, Tensor]
JsonObject = dict[str, Any]
Files = dict[str, JsonObject | Tensors]
"""What a folder holds, by file name."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def only(*allowed: Any, why: str) -> AfterValidator:
    """For a field of which Inlay can follow only some values."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{why}; Inlay reads only {' or '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


@contextmanager
def blaming(folder: Path) -> Iterator[None]:
    """Name this folder in every error of the block: it is the folder that does not fit the host."""
    try:
        yield
    except CheckpointError:
        raise
    except InlayError as error:
        raise misfit(folder, [str(error)]) from None


class Folder:
    """A folder to read. Each of its JSON files is read once, however often it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects: dict[str, JsonObject] = {}

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def object(self, name: str) -> JsonObject:
        """The JSON object that a file of the folder holds."""
        if name not in self._objects:
            self._objects[name] = read_object(self.path / name)
        return self._objects[name]


def read_object(file: Path) -> JsonObject:
    """A JSON file that holds one object."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} should hold a JSON object, but holds {type(found).__name__}.")
    return found


def options(kind: type[C], found: Any, file: Path) -> C:
    """The options in a config. One error names the file and every option that is unknown or cannot be used."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: the config should be an object, but is {found!r}.")
    try:
        return kind(**{str(key): value for key, value in found.items()})
    except ConfigError as error:
        raise CheckpointError(
            f"{file} has options that Inlay cannot follow:\n  - " + str(error).replace("\n", "\n  - ")
        ) from None


def read_tensors(folder: Path, safe: str, pickle: str, pickled: bool) -> Tensors:
    """The tensors of a folder: its safetensors file, or with `pickled` its `.bin`."""
    if (folder / safe).is_file():
        return _checked(folder / safe, _opened(folder / safe, safetensors.torch.load_file))
    if not (folder / pickle).is_file():
        raise CheckpointError(f"{folder} has no {safe}.")
    if not pickled:
        raise CheckpointError(
            f"{folder / pickle} is a pickle, a kind of file that can run code. inlay.load(…, pickled=True) reads "
            f"its tensors and executes nothing; {safe} would be better."
        )
    return _checked(folder / pickle, _opened(folder / pickle, _unpickled))


def _opened(file: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(file)
    except Exception as error:  # hostile bytes can make a reader raise anything; the file is to blame
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file} is not a readable file of tensors: {reason[:300]}") from None


def _unpickled(file: Path) -> Any:
    """torch writes its archives uncompressed: a member larger than the archive means a decompression bomb.

    Of all that `weights_only` allows, a bytearray alone takes and fills as much memory as it says.
    """
    with file.open("rb") as stream:
        if stream.read(2) == b"PK":
            with zipfile.ZipFile(stream) as archive:
                parts = archive.infolist()
                if sum(part.file_size for part in parts) > file.stat().st_size:
                    raise ValueError("it is compressed")
                pickled = [archive.read(part) for part in parts if part.filename.lower().endswith(".pkl")]
        else:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                pickled = [b"bytearray"] if whole.find(b"bytearray") >= 0 else []
    if any(b"bytearray" in part for part in pickled):
        raise ValueError("it holds a bytearray, which no file of tensors needs")
    return torch.load(file, map_location="cpu", weights_only=True)


def _checked(file: Path, found: Any) -> Tensors:
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise CheckpointError(f"{file} should hold tensors by name.")
    odd = [f"{shown(key)} ({tensor.dtype}, {tensor.layout})" for key, tensor in found.items() if not _plain(tensor)]
    if odd:
        raise CheckpointError(
            f"{file} has tensors that are not plain floating-point numbers: {', '.join(sorted(odd))}."
        )
    return dict(found)


def _plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if not dense or tensor.dtype not in _FLOATS:
        return False
    claimed = tensor.numel() * tensor.element_size()  # an expanded view claims more numbers than it stores
    return claimed <= tensor.untyped_storage().nbytes()


def shown(key: str) -> str:
    """A key from somebody else's file, safe to print on a terminal."""
    return key if key.isprintable() else ascii(key)


def check_size(what: str, wanted: int, tensors: Tensors) -> None:
    """Refuse a config that needs more numbers than its file holds, before allocating any of them."""
    have = sum(tensor.numel() for tensor in tensors.values())
    if wanted > have:
        raise ConfigError(f"{what} needs at least {wanted:,} numbers, but the file has {have:,}")
