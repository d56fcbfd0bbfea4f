"""What can go wrong, under one base class. Every message says what was seen, what is allowed and what to do.

Settings and arguments stand in back quotes, as in `batch_size`; the command line shows them as its flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


class InlayError(ValueError):
    """Base of every error that Inlay raises on purpose."""


class NamingError(InlayError):
    """A name is taken, unknown or badly formed."""


class ConfigError(InlayError):
    """A method, head or other setting has a value that cannot be used."""


class SetupError(InlayError):
    """A setup makes no sense, or does not fit what is on the host."""


class AnatomyError(InlayError):
    """Inlay is not certain where things are in this host."""


class CheckpointError(InlayError):
    """A folder on disk is not a complete, unaltered inlay for this host."""


class Problems:
    """Collects what is wrong with a job, so that the user is told all of it at once.

    problems = Problems()
    config = problems.attempt(lambda: open_config(name))      None where that cannot be had
    problems.refuse()                                         raises, if there was a problem
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def attempt(self, make: Callable[[], T], prefix: str = "") -> T | None:
        """What a function gives; an error of Inlay's is noted instead of raised."""
        try:
            return make()
        except InlayError as error:
            self.found.append(f"{prefix}{error}")
            return None

    def add(self, problems: Iterable[str]) -> None:
        self.found += problems

    def refuse(self) -> None:
        """Raise all problems as one error; do nothing if there are none."""
        if self.found:
            raise ConfigError("\n".join(self.found))


ELSEWHERE = {
    # transformers
    "learning_rate": "lr", "num_train_epochs": "epochs", "num_epochs": "epochs", "lr_scheduler_type": "schedule",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size", "max_seq_length": "max_length",
    "gradient_accumulation_steps": "accumulate", "warmup_ratio": "warmup", "warmup_steps": "warmup",
    "max_grad_norm": "clip", "label_smoothing_factor": "label_smoothing", "adam_epsilon": "eps",
    "eval_steps": "eval_every", "save_steps": "save_every", "metric_for_best_model": "select", "bf16": "precision",
    "fp16": "precision", "report_to": "trackers", "output_dir": "out", "model": "host", "model_name": "host",
    "model_name_or_path": "host", "base_model": "host", "num_beams": "beams", "num_labels": "labels",
    # peft
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
    "use_rslora": "rank_stabilised", "rank_pattern": "ranks", "alpha_pattern": "alphas",
    "num_virtual_tokens": "length", "query": "q", "key": "k", "value": "v", "q_proj": "q", "k_proj": "k",
    "v_proj": "v", "o_proj": "o", "c_attn": "qkv",
    # adapters
    "reduction_factor": "reduction", "bottleneck_size": "size", "non_linearity": "activation", "phm_dim": "n",
    "prefix_length": "length", "prompt_length": "length",
}  # fmt: skip
"""What other libraries call a setting or a place → what it is called here."""


def nearest(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or the known words when none is near."""
    known = sorted(set(known))
    close = [here] if (here := ELSEWHERE.get(word)) in known else get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(known) or 'none'}."


def first_line(error: BaseException) -> str:
    """What another library says went wrong, without what it adds below."""
    return str(error).strip().partition("\n")[0]


LEARN = (
    "accelerate", "click", "datasets", "jinja2", "markupsafe", "matplotlib", "pyarrow", "rich", "scipy", "sklearn",
    "yaml",
)  # fmt: skip
"""Modules that come with the extra `learn`: `import inlay` and the maths do without them."""
SERVE = ("fastapi", "httpx2", "prometheus_client", "starlette", "uvicorn")
"""Modules that come with the extra `serve`."""


def extra_for(error: ModuleNotFoundError) -> str | None:
    """What to install for a module that is missing, as pip takes it; None: Inlay does not know the module."""
    name = (error.name or "").partition(".")[0]
    if name in LEARN:
        return "inlay[learn]"
    return "inlay[study]" if name == "ray" else "inlay[serve]" if name in SERVE else None
