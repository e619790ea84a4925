"""Equality to the last bit: of two backward passes, and of a run with one that was resumed."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from armillary.attention import AttentionMask
from armillary.models import LlamaConfig
from gpu.arithmetic import RECOMPUTED, attention_flops, causal_pairs, step_flops
from gpu.check import Check, Row, Setting, not_run
from gpu.kernels import Shape, kernel_results, usable
from gpu.model import POLICIES, SMALL, TINY, Training, full

# -- deterministic backward --------------------------------------------------------------------------------------------

EXACT_POLICIES = ("none", "attention_output", "attention_output, offloaded")


@contextmanager
def deterministic_algorithms() -> Generator[None]:
    """Makes torch raise for algorithms whose results differ from run to run."""
    with patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):  # torch asks for it
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def check_deterministic(setting: Setting) -> Iterator[Row]:
    """Two backward passes of each kernel and of a model, in deterministic mode and without."""
    mask, device = AttentionMask(), setting.device.torch
    tensors = Shape(exact_tokens(setting), 128, mask, 2, *setting.size((32, 8), (4, 2))).tensors(torch.bfloat16, device)
    with deterministic_algorithms():
        for kernel in usable(setting, torch.bfloat16, 128, mask):
            if kernel.name != "dense" or setting.fake:
                yield equal_row(
                    f"{kernel.name}: out, lse and gradients", partial(kernel_results, kernel, mask, tensors)
                )
    config, length = exact_model(setting)
    with setting.alone() as mesh:
        for name in setting.size(EXACT_POLICIES, EXACT_POLICIES[1:2]):
            training = Training.on(mesh, config, length, POLICIES[name])
            with deterministic_algorithms():
                yield equal_row(f"a model, {name}: loss and gradients", partial(loss_and_gradients, training))
        free = equal_row("the same without deterministic algorithms", partial(loss_and_gradients, training))
        yield free._replace(bar="-", source="", passed=None)


def equal_row(label: str, run: Callable[[], dict[str, Tensor]]) -> Row:
    """The tensors that differ in any bit between two runs. An operation without a deterministic algorithm fails."""
    bar, source = "the same bits twice", "torch.use_deterministic_algorithms"
    try:
        first, second = run(), run()
    except RuntimeError as error:
        return Row(label, str(error).splitlines()[0], "", bar, source, False)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    message = (
        f"{len(different)} of {len(first)} tensors differ: {', '.join(different[:3])}" if different else "the same"
    )
    return Row(label, message, "", bar, source, not different)


def loss_and_gradients(training: Training) -> dict[str, Tensor]:
    training.optimizer.zero_grad()
    return {"loss": training.backward().cpu(), **training.gradients()}


def exact_tokens(setting: Setting) -> int:
    """Tokens of the kernels: many blocks of keys add to one gradient of a query."""
    return setting.size(4096, 48)


def exact_model(setting: Setting) -> tuple[Any, int]:
    return setting.size((SMALL, 2048), (TINY, 40))


def deterministic_flops(setting: Setting) -> float:
    config, length = exact_model(setting)
    kernels = 8 * 2 * 2 * attention_flops(causal_pairs(exact_tokens(setting)), heads=setting.size(32, 4))
    return kernels + 2 * (len(EXACT_POLICIES) + 1) * RECOMPUTED * step_flops(config, length)


# -- saving and resuming -----------------------------------------------------------------------------------------------

SAVED_STEP, LAST_STEP, ROWS = 2, 4, 2


def resume_sizes(setting: Setting) -> tuple[dict[str, int], int]:
    """Sizes of the model, and the length of its rows."""
    return setting.size(
        ({"dim": 512, "layers": 2, "heads": 8, "kv_heads": 2, "hidden_dim": 1408}, 2048),
        ({"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden_dim": 48}, 64),
    )


def check_resume(setting: Setting) -> Iterator[Row]:
    """A run of four steps of the trainer that saves in the background, and a run resumed from its second step."""
    if find_spec("pydantic") is None:
        yield not_run("saving and resuming", "the trainer's configuration needs the package pydantic")
        return
    with TemporaryDirectory() as folder, deterministic_algorithms():
        first, again = Path(folder) / "first", Path(folder) / "again"
        losses, state = trained(setting, first)
        saved = f"checkpoint/step-{SAVED_STEP}"
        shutil.copytree(first / saved, again / saved)
        resumed_losses, resumed_state = trained(setting, again)
    source = "a run that was not interrupted"
    so = resumed_losses == losses[SAVED_STEP:]
    label = f"losses of steps {SAVED_STEP + 1} to {LAST_STEP} after resuming"
    yield Row(label, f"{resumed_losses} and {losses[SAVED_STEP:]}", "", "the same", source, so)
    different = [name for name in state if not torch.equal(state[name], resumed_state[name])]
    label = f"weights and moments that differ, of {len(state)}: {', '.join(different[:3]) or 'none'}"
    yield Row(label, len(different), "", "0", source, not different)


def trained(setting: Setting, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a run of the trainer, from the folder's newest checkpoint; its weights and the optimizer's state."""
    from armillary import train  # needs pydantic

    sizes, length = resume_sizes(setting)
    config = train.Config(
        model=train.ModelConfig(**sizes),
        data=train.DataConfig(sequence_length=length, global_batch_size=ROWS),
        validation=train.ValidationConfig(every=1000, batches=1),
        save=train.SaveConfig(every=SAVED_STEP, keep_last=3),
        log=train.LogConfig(plot=False),
        train=train.TrainConfig(steps=LAST_STEP, device=setting.device.type, output=folder),
        checkpointing=POLICIES["attention_output, offloaded"],
    )
    with redirect_stdout(io.StringIO()), train.process_group(config) as device:
        run = train.prepare(config, device)
        losses = train.train_loop(run).losses
        state = {name: full(p).detach().cpu() for name, p in run.model.named_parameters()}
        for name, p in run.model.named_parameters():
            state |= {f"{name} {key}": full(x).cpu() for key, x in run.optimizer.state[p].items()}
    return losses, state


def resume_flops(setting: Setting) -> float:
    """The steps of both runs, and a validation at the end of each that takes as long as a step at most."""
    sizes, length = resume_sizes(setting)
    steps = LAST_STEP + LAST_STEP - SAVED_STEP + 2
    return steps * ROWS * RECOMPUTED * step_flops(LlamaConfig(vocab_size=257, **sizes), length)


CHECKS = (
    Check(
        "deterministic",
        "Backward twice in deterministic mode",
        check_deterministic,
        holds="the same bits",
        seconds=40,
        flops=deterministic_flops,
    ),
    Check(
        "resume", "The trainer saved and resumed", check_resume, "losses and state to the last bit", 55, resume_flops
    ),
)
