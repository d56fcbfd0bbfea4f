"""Metrics of generated texts, by the libraries that the official scripts are reproduced with (extra `nlg`).

metric    how it is computed                                                                 scoring
bleu      sacrebleu, 13a tokens; e2e: in lower case                                          both
nist      as mteval-v13a: 13a tokens, lower case, up to five words                           both
meteor    METEOR 1.5, -l en -norm; e2e: of the tokens of Stanford's PTB tokenizer            both   needs Java
rouge_l   of pycocoevalcap, of PTB tokens without punctuation                                both   needs Java
cider     of pycocoevalcap, of the same                                                      both   needs Java
ter       pyter, of 13a tokens: the mean over rows of the least over a row's references      both
chrf      chrF++ of sacrebleu: letters up to six, words up to two                            both

scoring e2e is that of the E2E scripts, webnlg that of GenerationEval, by which LoRA and AdaMix were scored on
WebNLG and DART. Every row counts once against all its references; neither the order of rows nor that of references
matters. BLEU, METEOR, ROUGE-L and chrF++ are between 0 and 1; a lower TER is the better one.
"""

from __future__ import annotations

import atexit
import math
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inlay.data.errors import DataError
from inlay.data.task import GENERATED, Task

References = Sequence[Sequence[str]]
"""The right texts of each row, at least one."""
NEEDS_JAVA = ("meteor", "rouge_l", "cider")
PACKAGES = {
    "bleu": "sacrebleu", "nist": "sacrebleu", "chrf": "sacrebleu", "ter": "pyter", "meteor": "pycocoevalcap",
    "rouge_l": "pycocoevalcap", "cider": "pycocoevalcap",
}  # fmt: skip


def has_java() -> bool:
    """Whether there is a Java to run METEOR and Stanford's tokenizer with."""
    return shutil.which("java") is not None


def measurable(task: Task) -> tuple[Task, list[str]]:
    """The task with the metrics that can be computed here, and what was left out; refused where none is left."""
    missing = {m: PACKAGES[m] for m in task.metrics if m in PACKAGES and find_spec(PACKAGES[m]) is None}
    if missing:
        raise DataError(
            f"{', '.join(missing)}: not to be computed without {', '.join(sorted(set(missing.values())))}. Install it "
            f"with: pip install 'inlay[nlg]'; or choose other metrics."
        )
    left_out = [metric for metric in task.metrics if metric in NEEDS_JAVA and not has_java()]
    if not left_out:
        return task, []
    rest = tuple(metric for metric in task.metrics if metric not in left_out)
    told = f"there is no Java here, which {', '.join(left_out)} need"
    hint = "install one, on Debian default-jre-headless"
    if not rest:
        raise DataError(f"{told}: {hint}; or choose other metrics.")
    return task.model_copy(update={"metrics": rest}), [f"{told}: they are left out ({hint})"]


def score_texts(task: Task, references: References, said: Sequence[str]) -> dict[str, float]:
    """The generated texts' metrics of a task; those that need a Java are left out where there is none."""
    wanted = [m for m in task.metrics if m in GENERATED and (m not in NEEDS_JAVA or has_java())]
    said = [_line(text) for text in said]
    references = [[_line(text) for text in row] for row in references]
    return {metric: float(METRICS[metric](references, said, task.scoring == "e2e")) for metric in wanted}


def _line(text: str) -> str:
    """One line, single spaces."""
    return " ".join(text.split())


def _bleu(references: References, said: Sequence[str], e2e: bool) -> float:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(lowercase=e2e, tokenize="13a").corpus_score(list(said), _streams(references)).score / 100


def _chrf(references: References, said: Sequence[str], e2e: bool) -> float:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(word_order=2).corpus_score(list(said), _streams(references)).score / 100


def _streams(references: References) -> list[Any]:
    """sacrebleu's form: the first reference of every row, the second ones, …; None where a row has no more."""
    most = max(map(len, references))
    return [[row[i] if i < len(row) else None for row in references] for i in range(most)]


@cache
def _cut() -> Callable[[str], str]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()


def _tokens(text: str) -> list[str]:
    return _cut()(text).split()


def _ter(references: References, said: Sequence[str], e2e: bool) -> float:
    from pyter import ter

    each = [min(ter(_tokens(text), _tokens(ref)) for ref in row) for row, text in zip(references, said, strict=True)]
    return sum(each) / len(each)


def _nist(references: References, said: Sequence[str], e2e: bool) -> float:
    """NIST as mteval-v13a has it.

    info(w₁…wₙ) = log₂(count of w₁…wₙ₋₁ / count of w₁…wₙ) over all references; of one word: all words / count
    score = Σₙ Σ of info over matched runs of n words / all runs of n words said, n = 1 … 5
    matches are clipped at the most that any reference of the row has
    times exp(−β ln²(min(1, L / R))), which is ½ for L / R = ⅔; R: all reference words / mean references of a row
    """
    refs = [[_tokens(text.lower()) for text in row] for row in references]
    hyps = [_tokens(text.lower()) for text in said]
    counts = Counter(run for row in refs for ref in row for n in range(1, 6) for run in _runs(ref, n))
    words = sum(len(ref) for row in refs for ref in row)
    score = 0.0
    for n in range(1, 6):
        gain, runs = 0.0, 0
        for row, hyp in zip(refs, hyps, strict=True):
            said_runs = Counter(_runs(hyp, n))
            most: Counter[tuple[str, ...]] = Counter()
            for ref in row:
                most |= Counter(_runs(ref, n))
            runs += sum(said_runs.values())
            for run, count in (said_runs & most).items():
                gain += count * math.log2((counts[run[:-1]] if n > 1 else words) / counts[run])
        score += gain / runs if runs else 0.0
    length = words / (sum(map(len, refs)) / len(refs))
    ratio = min(1.0, sum(map(len, hyps)) / length) if length else 1.0
    beta = math.log(2) / math.log(1.5) ** 2
    return score * math.exp(-beta * math.log(ratio) ** 2) if ratio else 0.0


def _runs(tokens: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return (tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


# with Java


JAVA = ("java", "-Dfile.encoding=UTF-8")
NOTHING = "∅"
"""Stands for a text without any word, which METEOR could not read."""


def _jar(*parts: str) -> str:
    spec = find_spec("pycocoevalcap")
    assert spec is not None
    assert spec.submodule_search_locations, "a package has a folder"
    return str(Path(spec.submodule_search_locations[0]).joinpath(*parts))


def _ptb(texts: Sequence[str]) -> list[str]:
    """Texts as Stanford's tokenizer cuts them, in lower case, without punctuation."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts"
        file.write_text("\n".join(texts) + "\n", encoding="utf-8")
        command = [
            *JAVA, "-cp", _jar("tokenizer", "stanford-corenlp-3.4.1.jar"), "edu.stanford.nlp.process.PTBTokenizer",
            "-preserveLines", "-lowerCase", str(file),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 (fixed arguments)
    lines = done.stdout.decode("utf-8").split("\n")
    if done.returncode or len(lines) < len(texts):
        raise DataError(
            f"Java could not cut texts into tokens: {done.stderr.decode('utf-8', 'replace').strip()[-400:]}"
        )
    return [" ".join(word for word in line.split() if word not in PUNCTUATIONS) for line in lines[: len(texts)]]


def _ptb_rows(references: References, said: Sequence[str]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """References and texts as pycocoevalcap takes them, cut into tokens in one go."""
    counts = [len(row) for row in references]
    cut = iter(_ptb([*(text for row in references for text in row), *said]))
    refs = {i: [next(cut) for _ in range(count)] for i, count in enumerate(counts)}
    return refs, {i: [next(cut)] for i in range(len(said))}


def _rouge_l(references: References, said: Sequence[str], e2e: bool) -> float:
    from pycocoevalcap.rouge.rouge import Rouge

    return Rouge().compute_score(*_ptb_rows(references, said))[0]


def _cider(references: References, said: Sequence[str], e2e: bool) -> float:
    from pycocoevalcap.cider.cider import Cider

    return Cider().compute_score(*_ptb_rows(references, said))[0]


def _meteor(references: References, said: Sequence[str], e2e: bool) -> float:
    refs, hyps = [list(row) for row in references], list(said)
    if e2e:
        cut, cut_said = _ptb_rows(references, said)
        refs, hyps = list(cut.values()), [row[0] for row in cut_said.values()]
    return _meteor_process().score(refs, hyps)


class Meteor:
    """METEOR's own program. It takes a while to read its paraphrases, so it stays for as long as this process does."""

    def __init__(self) -> None:
        command = [*JAVA, "-Xmx2G", "-jar", _jar("meteor", "meteor-1.5.jar"), "-", "-", "-stdio", "-l", "en", "-norm"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, encoding="utf-8", **pipes)  # type: ignore[call-overload] # noqa: S603
        self.lock = threading.Lock()
        atexit.register(self.close)

    def score(self, references: References, said: Sequence[str]) -> float:
        """Of all rows at once: their counts are asked for one by one, and then what they come to."""
        with self.lock:
            rows = zip(references, said, strict=True)
            counts = [self._ask("SCORE", *map(_readable, row), _readable(text)) for row, text in rows]
            self._ask("EVAL", *counts)  # the first row's own score
            for _ in counts[1:]:
                self.process.stdout.readline()
            told = self.process.stdout.readline().strip()
        try:
            return float(told)
        except ValueError:
            raise DataError(f"METEOR said {told!r} instead of a number.") from None

    def _ask(self, *parts: str) -> str:
        try:
            self.process.stdin.write(" ||| ".join(parts) + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended: another one is begun the next time
            _meteor_process.cache_clear()
            raise DataError("METEOR's program has ended by itself; it needs two gigabytes of memory.") from None
        return str(self.process.stdout.readline().strip())

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.communicate()


@cache
def _meteor_process() -> Meteor:
    return Meteor()


def _readable(text: str) -> str:
    return text.replace("|||", " ").strip() or NOTHING


METRICS: dict[str, Callable[[References, Sequence[str], bool], float]] = {
    "bleu": _bleu, "nist": _nist, "meteor": _meteor, "rouge_l": _rouge_l, "cider": _cider, "ter": _ter, "chrf": _chrf,
}  # fmt: skip
