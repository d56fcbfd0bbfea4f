"""docs/settings.md: every setting of a training job, from the classes that read them.

python tools/settings_table.py        writes the page; a test compares it with the code
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inlay.cli.eval import command as evaluation
from inlay.cli.flags import flags
from inlay.config import Config
from inlay.data.sources import Data
from inlay.runs.joint_settings import JointSettings
from inlay.runs.settings import SPELT, FusionOptions, Settings
from inlay.training.recipe import Generation, Recipe

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
TOP = """# All settings

Every setting has one name: in Python (`Settings(lr=1e-4)`), in YAML (`lr: 1e-4` in the file of `--config`) and as a
flag (`--lr 1e-4`; words are joined by `-`, and what is on or off is `--norms` or `--no-norms`). What is `from` in YAML
and as a flag is `start` in Python, where `from` is a word of its own. Flags win over the file, and both win over a
recipe. A setting that nothing in the job would use is refused; all of them are named at once. A method's own settings
(`options`) are on its page. With at most 1,000 training rows and no recipe named, the recipe `few-labels` stands in for
some of the defaults below: see [Recipes](learner.md#recipes).

This page is made from the code by `python tools/settings_table.py`.
"""
PARTS: tuple[tuple[str, type[Config]], ...] = (
    ("What is trained", Settings),
    ("Several tasks together", JointSettings),
    ("Fusion", FusionOptions),
    ("How it is trained", Recipe),
    ("How texts are written", Generation),
    ("Rows", Data),
)


def page() -> str:
    """The whole page."""
    text = TOP
    for title, part in PARTS:
        others = [other for _, other in PARTS if other is not part and issubclass(part, other)]
        names = [name for name in part.model_fields if not any(name in other.model_fields for other in others)]
        names = ["mode", *names] if part is JointSettings else names
        text += f"\n## {title}\n\n| setting | default | meaning |\n|---|---|---|\n"
        text += "".join(
            f"| `{SPELT.get(name, name)}` | {_default(part, name)} | {_meaning(part, name)} |\n" for name in names
        )
    text += "\n## `inlay eval`\n\n| flag | meaning |\n|---|---|\n"
    options = [option for option in evaluation.params if isinstance(option, click.Option)]
    return text + "".join(f"| `{option.opts[0]}` | {_cell(option.help or '')} |\n" for option in options)


def _default(part: type[Config], name: str) -> str:
    field = part.model_fields[name]
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    return (
        ""
        if value in (None, (), {})
        else f"`{value}`"
        if not isinstance(value, tuple)
        else f"`{', '.join(map(str, value))}`"
    )


def _meaning(part: type[Config], name: str) -> str:
    return _cell(" ".join((part.model_fields[name].description or "").split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def flag_names() -> set[str]:
    """Every setting that some verb has a flag for."""
    return {str(flag.name) for flag in flags(JointSettings)}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
