"""Complete configurations. Each is a function that returns a `Config`, to be changed with `replace`.

Memory is as `armillary-plan run --recipe NAME` predicts it; no recipe for GPUs has run on its machine yet. A recipe
that names no data trains on the sources of this Python installation: give `--data.path`.
"""

from armillary.train.recipes.debug import debug
from armillary.train.recipes.finetune import finetune
from armillary.train.recipes.gpt import gpt_wallfacer_3b, gpt_wallfacer_7b
from armillary.train.recipes.hybrid import hybrid
from armillary.train.recipes.llama3 import llama3_8b_1m, llama3_8b_5m, llama3_8b_128k, llama3_70b_128k

__all__ = [
    "debug",
    "finetune",
    "gpt_wallfacer_3b",
    "gpt_wallfacer_7b",
    "hybrid",
    "llama3_8b_1m",
    "llama3_8b_5m",
    "llama3_8b_128k",
    "llama3_70b_128k",
]
