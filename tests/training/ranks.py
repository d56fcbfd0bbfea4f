"""`inlay …` in several processes, each of which leaves what it has learned: python -m tests.training.ranks FOLDER WORDS…"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import accelerate
import safetensors.torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def launch(folder: Path, *words: str, processes: int = 2) -> tuple[str, list[dict[str, Tensor]]]:
    """Run `inlay …` in so many processes; what they say, and what each of them has learned."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes), "--num_machines", "1",
        "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1",
        "-m", "tests.training.ranks", str(folder), *words,
    ]  # fmt: skip
    folder.mkdir()
    paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, [safetensors.torch.load_file(folder / f"rank{rank}.safetensors") for rank in range(processes)]


def _leave_learned(folder: Path) -> None:
    """When a run ends, each process writes what requires gradients in its model."""
    end = accelerate.Accelerator.end_training

    def leave(self: accelerate.Accelerator) -> None:
        host = self.unwrap_model(self._models[0])
        learned = {name: p.detach().clone() for name, p in host.named_parameters() if p.requires_grad}
        safetensors.torch.save_file(learned, folder / f"rank{self.process_index}.safetensors")
        end(self)

    accelerate.Accelerator.end_training = leave


if __name__ == "__main__":
    from inlay.cli import main

    _leave_learned(Path(sys.argv[1]))
    main(sys.argv[2:])
