"""Reading what others wrote: JSON of a known form, and tensors that cannot run code.

Nothing here trusts a file. A `.bin` is a pickle: it is opened only when the user says so, and then by torch's
`weights_only` reader, which knows tensors and containers and executes nothing.
"""

from __future__ import annotations

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
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def only(*allowed: Any, why: str) -> AfterValidator:
    """For a field that Inlay reads at some values only."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{why}; Inlay reads only {' or '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Say of every error in the block which folder does not fit the host."""
    try:
        yield
    except CheckpointError:
        raise
    except InlayError as error:
        raise misfit(folder, [str(error)]) from None


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds one object."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} should hold a JSON object, but holds {type(found).__name__}.")
    return found


def options(kind: type[C], found: Any, file: Path) -> C:
    """A config's options; all that are unknown or unusable are named at once, with the file."""
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
    except Exception as error:  # whatever a reader makes of hostile bytes: it is the file that is wrong
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file} is not a readable file of tensors: {reason[:300]}") from None


def _unpickled(file: Path) -> Any:
    """torch writes its archives uncompressed, so that nothing in an honest one is larger than the file."""
    with file.open("rb") as stream:
        archived = stream.read(2) == b"PK"
    if archived:
        with zipfile.ZipFile(file) as archive:
            if sum(part.file_size for part in archive.infolist()) > file.stat().st_size:
                raise ValueError("it is compressed")
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
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()  # one number is not a million


def shown(key: str) -> str:
    """A key that somebody else wrote, fit for a terminal."""
    return key if key.isprintable() else ascii(key)


def check_size(what: str, wanted: int, tensors: Tensors) -> None:
    """Refuse a config that asks for more numbers than its file has, before anything of that size is made."""
    have = sum(tensor.numel() for tensor in tensors.values())
    if wanted > have:
        raise ConfigError(f"{what} needs at least {wanted:,} numbers, but the file has {have:,}")
