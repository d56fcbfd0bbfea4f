"""Compare the cost of named cases in one run, with a peer library in another environment beside them.

A benchmark is a table of cases, a few lines that say what is compared with what, and `finish`:

    import inlay
    from harness import Bench, bare_cases, phases

    def pfeiffer(host):                                  # changes a fresh host in place
        inlay.add(host, "task", inlay.Pfeiffer(reduction=16))
        inlay.train(host, "task")

    bench = Bench(__doc__, {**bare_cases(), **phases("pfeiffer", pfeiffer)})
    bench.time("pfeiffer:forward", base="bare:forward", peer="seq_bn:forward", target=1.06)
    bench.time("pfeiffer:step", base="bare:step", peer="seq_bn:step", target="peer")
    bench.memory("pfeiffer:step", base="bare:step", peer="seq_bn:step", target="peer")
    sys.exit(bench.finish())                             # measures, prints the table, gives the exit code

The pieces:

- A *builder* takes `Sizes` and returns a callable without arguments: one run of the case. `phases(name, set_up)` makes
  them from a function that sets something into a host: `name:forward`, `name:step` and, for what acts at the FFN of a
  BERT, `name:branch`, which is a step of that one module: there the host hides less. A case that is something else (a
  module, two passes of a loss) is a builder written by hand; nothing more is needed.
- `bench.time` and `bench.memory` only note a row. `target` is the highest ratio to `base` that is good, or "peer": no
  more than the peer. Without a target the row is for information. `peer` and `peer_base` name cases of the peer's table
  in peer_worker.py; `peer_base` is `base` if it is not given.
- `bench.finish()` is `rows = bench.measure()` and `bench.report(rows)`. Call the two to write a `note` into a row or to
  plot. Options of one benchmark: `parser = arguments(__doc__)`, `parser.add_argument(...)`, and
  `Bench(__doc__, cases, parser.parse_args())`.

How time is measured. All cases alternate (A, B, C, A, B, C, …), ours and the peer's, with one torch thread. A number is
the minimum of the CPU time over the repeats: other work on the machine can only add to it. A case shorter than 0.3 s is
run for that long in each of its turns, and gives its minimum. The two libraries need different transformers, whose bare
hosts differ in speed, so each is given relative to the bare host of its own process. Cases of one process share the
host's weights in memory, so that no case is lucky in where its weights lie. The column noise says how far the
third-lowest run of a row's cases lies above the lowest, at worst: below 1 % the minimum has been found. A target that
is missed by less than the noise is printed as FAIL?, and --strict does not count it. On a busy machine ask for more
repeats, or for fewer layers: short runs find a quiet moment more often.

How memory is measured. torch.profiler reports every allocation and release of torch's CPU allocator, also those inside
autograd and inside kernels. The peak is the highest sum of live bytes during one run after a warm-up, everything that
the case holds counted (its own weights, gradients, activations, temporaries) except the host's weights. It is a sum
of requested bytes, so it is the same number in every run; a process's RSS moves by megabytes with malloc's and the
kernel's mood, and contains the libraries. Targets of memory compare bytes, not ratios.

A training step is forward with loss, backward, and `zero_grad(set_to_none=True)`, in train mode with the host's
dropout. The optimizer's step is left out on both sides: it costs the same for the same parameters. The host's
classifier trains in every case. This file imports neither inlay nor the peer: both sides use it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

Run = Callable[[], object]
SetUp = Callable[[Any], None]


@dataclass(frozen=True)
class Sizes:
    """What a host and its batch are like; BERT-base but for the number of layers."""

    layers: int = 4
    batch: int = 8
    tokens: int = 64
    hidden: int = 768


Builder = Callable[[Sizes], Run]
Cases = Mapping[str, Builder]


# hosts and what is done with them


def bert(sizes: Sizes) -> Any:
    """A random BertForSequenceClassification with dropout 0.1, as published."""
    config = transformers.BertConfig(
        hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden, num_attention_heads=sizes.hidden // 64,
        num_hidden_layers=sizes.layers, num_labels=2,
    )  # fmt: skip
    return _with_shared_weights(transformers.BertForSequenceClassification(config), sizes)


_weights: dict[tuple[type, Sizes], dict[str, Tensor]] = {}


def _with_shared_weights(host: Any, sizes: Sizes) -> Any:
    """Let all hosts of one kind in this process have the same weights, in the same memory."""
    known = _weights.setdefault((type(host), sizes), {name: p.data for name, p in host.named_parameters()})
    for name, parameter in host.named_parameters():
        parameter.data = known[name]
    return host


def batch(host: Any, sizes: Sizes) -> dict[str, Tensor]:
    """Random tokens without padding, and random labels."""
    draw = torch.Generator().manual_seed(0)
    shape = (sizes.batch, sizes.tokens)
    ids = torch.randint(5, host.config.vocab_size, shape, generator=draw)
    labels = ids if host.config.is_encoder_decoder else torch.randint(0, 2, (sizes.batch,), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def forward(host: Any, inputs: dict[str, Tensor]) -> Run:
    """Evaluation: eval mode, no_grad."""
    host.eval()

    def run() -> None:
        with torch.no_grad():
            host(**inputs)

    return run


def step(host: Any, inputs: dict[str, Tensor]) -> Run:
    """One training step without the optimizer."""
    host.train()
    classifier = getattr(host, "classifier", None)
    if classifier is not None:
        classifier.requires_grad_(True)

    def run() -> None:
        host(**inputs).loss.backward()
        host.zero_grad(set_to_none=True)

    return run


def branch(host: Any, inputs: dict[str, Tensor]) -> Run:
    """Forward and backward of the last FFN's output module of a BERT: dense, dropout, what is set in, norm."""
    host.train()
    output = host.bert.encoder.layer[-1].output
    shape = inputs["input_ids"].shape
    hidden = torch.randn(*shape, host.config.intermediate_size, requires_grad=True)  # (B, T, 4D)
    residual = torch.randn(*shape, host.config.hidden_size, requires_grad=True)  # (B, T, D)
    gradient = torch.randn(*shape, host.config.hidden_size)

    def run() -> None:
        output(hidden, residual).backward(gradient)
        output.zero_grad(set_to_none=True)
        hidden.grad = residual.grad = None

    return run


def phases(name: str, set_up: SetUp, host: Callable[[Sizes], Any] = bert) -> dict[str, Builder]:
    """The cases `name:forward`, `name:step` and `name:branch` on a fresh host that `set_up` has changed in place."""

    def build(sizes: Sizes, phase: Callable[[Any, dict[str, Tensor]], Run]) -> Run:
        torch.manual_seed(0)
        model = host(sizes)
        set_up(model)
        return phase(model, batch(model, sizes))

    return {
        f"{name}:forward": lambda sizes: build(sizes, forward),
        f"{name}:step": lambda sizes: build(sizes, step),
        f"{name}:branch": lambda sizes: build(sizes, branch),
    }


def bare_cases(host: Callable[[Sizes], Any] = bert) -> dict[str, Builder]:
    """`bare`: the host alone, all of it training. `frozen`: no weight of it trains, but the gradient runs down to the
    embeddings: what no method that acts in every layer can do without."""

    def bare(model: Any) -> None:
        pass

    def frozen(model: Any) -> None:
        model.requires_grad_(False)
        model.enable_input_require_grads()

    return {**phases("bare", bare, host), **phases("frozen", frozen, host)}


# measuring


TURN = 0.3
"""CPU seconds that a short case has in each of its turns."""


def cpu_seconds(run: Run) -> float:
    """CPU time of one run, of all threads of this process; the least of as many runs as a turn has room for."""
    gc.collect()
    gc.disable()
    taken: list[float] = []
    try:
        while sum(taken) < TURN:
            begin = time.process_time()
            run()
            taken.append(time.process_time() - begin)
    finally:
        gc.enable()
    return min(taken)


def peak_bytes(builder: Builder, sizes: Sizes) -> int:
    """Highest sum of live bytes during one run of a fresh case, the host's weights not counted."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter
    builder(sizes)  # the host's weights are made now, before the profiler looks
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run = builder(sizes)
        run()
        gc.collect()
        with record_function("measured"):
            run()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live = peak = 0
    begun = False
    for event in events:
        begun = begun or event.name() == "measured"
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if begun else live
    return peak


class Side:
    """The cases of one library in this process."""

    def __init__(self, cases: Cases, sizes: Sizes) -> None:
        torch.set_num_threads(1)
        self.cases, self.sizes = cases, sizes
        self.built: dict[str, Run] = {}

    def seconds(self, case: str) -> float:
        if case not in self.built:
            self.built[case] = self._builder(case)(self.sizes)
        return cpu_seconds(self.built[case])

    def peak(self, case: str) -> int:
        return peak_bytes(self._builder(case), self.sizes)

    def versions(self) -> dict[str, str]:
        loaded = {name: sys.modules.get(name) for name in ("torch", "transformers", "adapters")}
        return {name: module.__version__ for name, module in loaded.items() if module is not None}

    def close(self) -> None:
        self.built.clear()

    def _builder(self, case: str) -> Builder:
        if case not in self.cases:
            raise KeyError(f"no case {case!r}; there are {', '.join(self.cases)}")
        return self.cases[case]


class Peer:
    """The same over a pipe: a process in another environment that lives as long as the run. A line of JSON each way."""

    def __init__(self, python: str, worker: Path, sizes: Sizes) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": ""}
        self.process = subprocess.Popen(
            [python, str(worker), json.dumps(asdict(sizes))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet},
        )  # fmt: skip

    def seconds(self, case: str) -> float:
        return float(self._ask("seconds", case))

    def peak(self, case: str) -> int:
        return int(self._ask("peak", case))

    def versions(self) -> dict[str, str]:
        return dict(self._ask("versions"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, question: str, *args: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([question, *args]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with code {self.process.wait()} at {question} {args}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peer failed at {question} {args}:\n{answer['error']}")
        return answer["value"]


def serve(cases: Cases) -> None:
    """The peer's end of the pipe: answer until stdin closes. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    side = Side(cases, Sizes(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        question, *args = json.loads(line)
        try:
            answer = {"value": getattr(side, question)(*args)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


# rows and the run


@dataclass
class Row:
    """One comparison. After the run `ours` and `peers` are (seconds or bytes, ratio to the base).

    noise: how far apart two equal cases may have come out, as a share of 1.
    """

    what: Literal["time", "memory"]
    case: str
    base: str
    peer: str | None = None
    peer_base: str | None = None
    target: float | Literal["peer"] | None = None
    ours: tuple[float, float] | None = None
    peers: tuple[float, float] | None = None
    noise: float = 0.0
    note: str = ""

    @property
    def result(self) -> Literal["", "PASS", "FAIL?", "FAIL"]:
        """Empty without a target, or without the peer that the target speaks of."""
        if self.target is None or self.ours is None or (self.target == "peer" and self.peers is None):
            return ""
        seen, limit = self.ours[1], self.target
        if limit == "peer":
            assert self.peers is not None
            seen, limit = (self.ours[0], self.peers[0]) if self.what == "memory" else (self.ours[1], self.peers[1])
        if seen <= limit:
            return "PASS"
        return "FAIL?" if seen <= limit * (1 + self.noise) else "FAIL"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the host (4; BERT-base has 12)")
    parser.add_argument("--repeats", type=int, default=20, help="how often each case is timed (20)")
    parser.add_argument("--warmup", type=int, default=2, help="runs of each case before that (2)")
    parser.add_argument("--peer-python", metavar="PATH", help="python of an environment with adapters 1.3.0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to this file")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a target is missed")
    return parser


WORKER = Path(__file__).with_name("peer_worker.py")
"""What answers for the peer."""


class Bench:
    """One benchmark: rows, then a run of all their cases together."""

    def __init__(self, doc: str | None, cases: Cases, options: argparse.Namespace | None = None) -> None:
        self.options = options or arguments(doc).parse_args()
        self.cases = cases
        self.sizes = Sizes(layers=self.options.layers)
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {"sizes": asdict(self.sizes), "repeats": self.options.repeats}

    def time(
        self, case: str, *, base: str, peer: str | None = None, peer_base: str | None = None,
        target: float | Literal["peer"] | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """Compare CPU time."""
        self.rows.append(Row("time", case, base, peer, peer_base, target, note=note))

    def memory(
        self, case: str, *, base: str, peer: str | None = None, peer_base: str | None = None,
        target: float | Literal["peer"] | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """Compare peak memory."""
        self.rows.append(Row("memory", case, base, peer, peer_base, target, note=note))

    def finish(self) -> int:
        return self.report(self.measure())

    def measure(self) -> list[Row]:
        """Run everything that the rows name, alternating, and fill the rows in."""
        sides: dict[str, Side | Peer] = {"ours": Side(self.cases, self.sizes)}
        if self.options.peer_python:
            sides["peer"] = Peer(self.options.peer_python, WORKER, self.sizes)
        try:
            self.facts["versions"] = {name: side.versions() for name, side in sides.items()}
            seconds = self._times(sides)
            peaks = {key: sides[key[0]].peak(key[1]) for key in self._wanted("memory", sides)}
        finally:
            for side in sides.values():
                side.close()
        self.facts["seconds"] = {f"{side} {case}": all_of for (side, case), all_of in seconds.items()}
        self.facts["peak_bytes"] = {f"{side} {case}": peak for (side, case), peak in peaks.items()}
        best = {key: min(all_of) for key, all_of in seconds.items()}
        for row in self.rows:
            found: Mapping[tuple[str, str], float] = best if row.what == "time" else peaks
            keys = _keys(row, sides)
            row.ours = found[keys[1]], found[keys[1]] / found[keys[0]]
            if len(keys) > 2:
                row.peers = found[keys[3]], found[keys[3]] / found[keys[2]]
            if row.what == "time":
                row.noise = max(sorted(seconds[key])[:3][-1] / best[key] - 1 for key in keys)
        return self.rows

    def report(self, rows: list[Row]) -> int:
        """Print the table, write the JSON; the exit code is 1 only with --strict and a missed target."""
        sizes, repeats = self.sizes, self.options.repeats
        print(f"host: {sizes.layers} layers, hidden {sizes.hidden}, batch {sizes.batch} x {sizes.tokens} tokens")
        print(f"time: CPU, one thread, minimum of {repeats} alternating runs; memory: peak beside the host's weights")
        for side, found in self.facts["versions"].items():
            print(f"{side}: " + ", ".join(f"{name} {version}" for name, version in found.items()))
        print()
        print(table(rows))
        if self.options.json:
            listed = [{**asdict(row), "result": row.result} for row in rows]
            self.options.json.write_text(json.dumps({**self.facts, "rows": listed}, indent=1) + "\n")
        return 1 if self.options.strict and any(row.result == "FAIL" for row in rows) else 0

    def _times(self, sides: Mapping[str, Side | Peer]) -> dict[tuple[str, str], list[float]]:
        wanted = self._wanted("time", sides)
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in wanted}
        for repeat in range(-self.options.warmup, self.options.repeats):
            for side, case in wanted:
                taken = sides[side].seconds(case)
                if repeat >= 0:
                    seconds[side, case].append(taken)
            if sys.stderr.isatty():
                print(f"\rrepeat {repeat + 1} of {self.options.repeats} ", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return seconds

    def _wanted(self, what: str, sides: Mapping[str, Side | Peer]) -> list[tuple[str, str]]:
        """(side, case), each once, ours and the peer's beside each other."""
        keys = [_keys(row, sides) for row in self.rows if row.what == what]
        return list(dict.fromkeys(key for each in keys for key in (*each[::2], *each[1::2])))


def _keys(row: Row, sides: Mapping[str, Side | Peer]) -> list[tuple[str, str]]:
    """What a row needs as (side, case): our base and case, then the peer's."""
    keys = [("ours", row.base), ("ours", row.case)]
    if row.peer is not None and "peer" in sides:
        keys += [("peer", row.peer_base or row.base), ("peer", row.peer)]
    return keys


# the table


def table(rows: list[Row]) -> str:
    """Plain text, aligned: ratios first, what they were made of in brackets."""
    lines = [("case", "relative to", "what", "ours", "peer", "noise", "target", "result", "")]
    for row in rows:
        target = "" if row.target is None else f"<= {row.target}"
        cells = _cell(row, row.ours), _cell(row, row.peers), f"{row.noise:.1%}" if row.what == "time" else ""
        lines.append((row.case, row.base, row.what, *cells, target, row.result, row.note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cell(row: Row, measured: tuple[float, float] | None) -> str:
    if measured is None:
        return "-"
    amount = f"{measured[0] * 1e3:.1f} ms" if row.what == "time" else f"{measured[0] / 2**20:.1f} MiB"
    return f"{measured[1]:.3f} ({amount})"
