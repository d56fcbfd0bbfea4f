"""Learning: tokens, batches, the loop, evaluation and runs.

    job     a whole run from its settings: `train(Settings(...))`
    loop    `fit(host, language, train, validation, recipe)` for a host that is set up already
"""

from inlay.learning.evaluate import ask
from inlay.learning.hosts import open_host, own_head
from inlay.learning.interrupt import Interrupted
from inlay.learning.job import get_ready, train
from inlay.learning.loop import Outcome, fit
from inlay.learning.material import Answer, Language, Split
from inlay.learning.recipe import Recipe, filled
from inlay.learning.run import Run
from inlay.learning.settings import Settings

__all__ = [
    "Answer", "Interrupted", "Language", "Outcome", "Recipe", "Run", "Settings", "Split", "ask", "filled", "fit", "get_ready",
    "open_host", "own_head", "train",
]  # fmt: skip
