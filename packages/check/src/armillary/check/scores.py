"""Sinks and biases of scores in a run: do they reach attention on every rank?"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from armillary.check.diagnose import list_names
from armillary.check.facts import Fact, Verdict
from armillary.check.forwards import Forward, Runner, gathered
from armillary.check.layers import CHOICE, FADING, ModelParts
from armillary.check.reach import changed_tokens, runs_of
from armillary.check.step import CheckBatch
from armillary.core.internal import compat

BIASES = "sinks and biases"
ATTENTION = re.compile("att", re.I)
PERTURBATION = 4.0
"""Standard deviation of the change of a parameter, relative to its root mean square, or to 1 if that is less."""


def bias_fact(runner: Runner, batch: CheckBatch, base: Forward, noise: Forward, coarse: bool) -> Fact:
    """Returns whether a change of sinks or biases reaches tokens of all ranks; one forward for each kind of them.

    A kind of parameter that reaches no token at all is not used by these layers: `parameters in use` judges that.

    Args:
        base: the forward without a change; noise: the same again.
        coarse: True if anything is computed in 16 bits, in which a few tokens may not change visibly.
    """
    kinds, local = score_parameters(runner), base.positions
    ready = all(gathered(local is not None and bool(base.outputs)))
    if not kinds or not ready or local is None:
        reason = "no layer was observed, or the positions of its tokens are unknown"
        return Fact(BIASES, Verdict.NOT_OBSERVED, "attention has no such parameter" if not kinds else reason)
    # A token that sees only itself shows no bias.
    sees_others = batch.position_ids[0, local] > 0
    runs = [torch.arange(len(local))] if coarse else runs_of(torch.ones_like(local, dtype=torch.bool), local)
    wrong, right = list[str](), list[str]()
    for name, parameters in kinds.items():
        with perturbed(parameters):
            forward = runner.run(batch, originals=base.outputs, positions=local)
        moved = dict[str, list[bool]]()
        for layer, original in base.outputs.items():
            changed = changed_tokens(forward.outputs[layer], original, noise.outputs[layer])
            moved[layer] = [bool(changed[run].any()) for run in runs if sees_others[run].any()]
        reached = gathered(moved)
        for layer in moved:
            on_ranks = [rank for rank, x in enumerate(reached) if not all(x.get(layer, [True]))]
            if any(any(x.get(layer, [])) for x in reached):
                (wrong if on_ranks else right).append(
                    f"{name} of {layer}" + (f" on ranks {on_ranks}" if on_ranks else "")
                )
    if wrong:
        return Fact(BIASES, Verdict.WRONG, f"tokens do not react to a change of {list_names(wrong)}")
    verdict = Verdict.RIGHT if right else Verdict.NOT_OBSERVED
    return Fact(
        BIASES, verdict, list_names(right) if right else f"no token reacts to a change of {list_names([*kinds])}"
    )


def score_parameters(runner: Runner) -> dict[str, list[nn.Parameter]]:
    """Returns the parameters of attention that are neither weights of maps and norms nor their biases, by name.

    So are sinks, and tables of biases by distance. Those of layers that are not observed are left out: their change
    would reach observed layers too.
    """
    observed = {id(x) for layer in runner.layers.values() for x in layer.modules()}
    unobserved = {id(x) for layer in ModelParts.of(runner.model).layers for x in layer.modules()} - observed
    kinds = dict[str, list[nn.Parameter]]()
    for path, module in runner.model.named_modules():
        words = f"{path} {type(module).__name__}"
        if id(module) in unobserved or not ATTENTION.search(words) or CHOICE.search(words) or FADING.search(words):
            continue
        is_table = isinstance(module, nn.Embedding)
        for key, parameter in module.named_parameters(recurse=False):
            if is_table or key not in ("weight", "bias"):
                kinds.setdefault(path.rpartition(".")[2] if is_table else key, []).append(parameter)
    return kinds


@contextmanager
def perturbed(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Context manager that changes parameters at random, copies on several ranks alike."""
    before = [(x, x.clone()) for x in (compat.local_part(p).detach() for p in parameters)]
    try:
        for x, values in before:
            generator = torch.Generator().manual_seed(0)
            scale = max(1.0, float(values.float().square().mean().sqrt())) if values.numel() else 1.0
            # One number for all biases would change no softmax.
            noise = torch.randn(values.shape, generator=generator) * PERTURBATION * scale
            x.add_(noise.to(x))
        yield
    finally:
        for x, values in before:
            x.copy_(values)
