"""tests/golden/text_metrics.json: texts of ours, and what pycocoevalcap's own program says of them.

python tools/make_text_fixture.py [PYMTEVAL]     needs Java; PYMTEVAL: the file pymteval.py of the E2E challenge's scripts

NIST is written only where that file is given. Every row has three references, because pymteval takes another length where
their number differs from row to row than the challenge's Perl script does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

FILE = Path(__file__).parent.parent / "tests" / "golden" / "text_metrics.json"
ROWS = [
    ["The Old Mill is a cheap pub by the river.", "Near the river there is The Old Mill, a cheap pub.", "The Old Mill pub is cheap, and it's by the river!", "By the river, The Old Mill is a cheap pub."],
    ["Café Rosa serves Italian food for £20-25.", "Italian food at Café Rosa costs £20-25.", "You can eat Italian at Café Rosa (£20-25).", "Café Rosa serves Italian food; it costs £20-25."],
    ["Families are welcome at the Blue Boat.", "The Blue Boat is family friendly.", "The Blue Boat welcomes families.", "Blue Boat isn't for families."],
    ["Ada Lovelace was born in London in 1815.", "London is where Ada Lovelace was born, in 1815.", "Born in 1815 in London: Ada Lovelace.", "Ada Lovelace, born in London, lived from 1815."],
    ["It has a rating of 5 out of 5.", "Customers rate it 5 out of 5.", "Its rating is 5 out of 5.", "The customers' rating is five out of five."],
]  # fmt: skip
"""Three references, and what was said."""


def official(rows: list[list[str]]) -> dict[str, float]:
    """METEOR, ROUGE-L and CIDEr as the E2E scripts compute them."""
    cut = PTBTokenizer()
    refs = cut.tokenize({i: [{"caption": text} for text in row[:-1]] for i, row in enumerate(rows)})
    said = cut.tokenize({i: [{"caption": row[-1]}] for i, row in enumerate(rows)})
    scorers: dict[str, Any] = {"meteor": Meteor(), "rouge_l": Rouge(), "cider": Cider()}
    return {name: float(scorer.compute_score(refs, said)[0]) for name, scorer in scorers.items()}


def nist(file: str) -> float:
    """NIST as pymteval computes it."""
    spec = importlib.util.spec_from_file_location("pymteval", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = module.NISTScore()
    for row in ROWS:
        score.append(row[-1], row[:-1])
    return float(score.score())


if __name__ == "__main__":
    found = official(ROWS) | ({"nist": nist(sys.argv[1])} if len(sys.argv) > 1 else {})
    FILE.write_text(json.dumps({"rows": ROWS, "e2e": found}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
