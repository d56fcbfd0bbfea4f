"""Models come and go under load: nobody else notices."""

from __future__ import annotations

import shutil
import threading

import pytest

from inlay.errors import InlayError
from inlay.serve import Engine, Limits
from inlay.serve.errors import NotFound
from tests.serve.shop import inputs_for, kind_of
from tests.serve.test_engine import near


@pytest.mark.long
def test_models_come_and_go_500_times_under_load(shop, tmp_path):
    """Loading, replacing and deleting, damaged folders among them: no request for another model fails or changes."""
    damaged = tmp_path / "damaged"
    shutil.copytree(shop / "inlays" / "b", damaged)
    (damaged / "weights.safetensors").write_bytes(b"\0" * 100)
    steady = ["classification-0", "tags-1", "spans-2", "choice-1"]
    with Engine.open([shop / "inlays" / name for name in steady], limits=Limits(wait=0)) as engine:
        asked = {name: inputs_for(kind_of(name), 2) for name in steady}
        wanted = {name: engine.classify(name, asked[name]) for name in steady}
        failed: list[object] = []
        answered = [0]
        stop = threading.Event()

        def ask(name: str) -> None:
            while not stop.is_set():
                try:
                    if not near(engine.classify(name, asked[name]), wanted[name]):
                        failed.append((name, "changed"))
                    answered[0] += 1
                except Exception as error:
                    failed.append((name, error))

        def ask_the_one_that_moves() -> None:
            while not stop.is_set():
                try:
                    engine.classify("moving", ["good w1"])
                except NotFound:
                    pass
                except Exception as error:
                    failed.append(("moving", error))

        threads = [threading.Thread(target=ask, args=(name,)) for name in steady] + [
            threading.Thread(target=ask_the_one_that_moves)
        ]
        for thread in threads:
            thread.start()
        sources = ["a", "b", "classification-1", "classification-2"]
        try:
            for turn in range(500):
                if turn % 10 == 9:
                    engine.unload("moving")
                elif turn % 10 == 5:
                    with pytest.raises(InlayError):
                        engine.load(damaged, "moving")
                else:
                    engine.load(shop / "inlays" / sources[turn % 4], "moving")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert answered[0] > 100
        engine.between_batches(lambda: None)  # the last batch is done with, and what it held has left
        assert len(list(engine.shelf.host.inlays)) == len(steady)
