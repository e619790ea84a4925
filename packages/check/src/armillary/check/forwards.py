"""Further forwards of a model in its run, each with one change, which leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.check.layers import ModelParts
from armillary.check.observe import find_positions
from armillary.check.step import CheckBatch, StepOutput, fingerprint, first_tensor
from armillary.core.internal import compat

Loss = Callable[[nn.Module, CheckBatch], Tensor | StepOutput]
DROPOUT = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of names of modules and of numbers in a configuration that make a forward random."""


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Context manager that restores modes, buffers, gradients and random numbers.

    Inside, a model with dropout is in evaluation mode. Others keep their mode, and with it checkpointing.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            if any(_has_dropout(module) for module in model.modules()):
                model.eval()
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for p, gradient in gradients:
                p.grad = gradient
            for x, value in buffers:
                x.data.copy_(value)


def _has_dropout(module: nn.Module) -> bool:
    settings: dict[str, Any] = {"dropout": getattr(module, "p", 0)} | getattr(
        getattr(module, "config", None), "__dict__", {}
    )
    return any(isinstance(x, float) and x > 0 for name, x in settings.items() if any(part in name for part in DROPOUT))


@dataclass
class Forward:
    """Context manager around a forward, which changes inputs of layers and keeps outputs.

    Args:
        layers: the observed layers, by name.
        positions: [T], of this rank's tokens; None to find them by their ids.
        changed: bool [T], tokens whose input is negated, in all of `layers`.
        originals: replace the layers' outputs, so that each layer sees its original input but for `changed`.
        rounded: True changes the embedding's output by its rounding error.

    Attributes:
        outputs: [B, T, E], by layer.
        last: fingerprints of the logits, or of the last layer's output, for the first row: [T, FINGERPRINT].
    """

    model: nn.Module
    batch: CheckBatch
    peers: tuple[int, ...]
    layers: dict[str, nn.Module]
    positions: Tensor | None = None
    changed: Tensor | None = None
    originals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    rounded: bool = False
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    last: Tensor | None = None

    def __enter__(self) -> Self:
        parts = ModelParts.of(self.model)
        self.handles = [layer.register_forward_hook(partial(self._keep, name)) for name, layer in self.layers.items()]
        if self.changed is not None:
            self.handles += [x.register_forward_pre_hook(self._change, with_kwargs=True) for x in self.layers.values()]
        if parts.embedding is not None:
            self.handles.append(parts.embedding.register_forward_hook(self._see_embedding))
        last = parts.layers[-1] if parts.layers else self.model
        self.handles.append(last.register_forward_hook(self._keep_last))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        x = first_tensor(output)
        if x is None or x.ndim != 3 or name in self.outputs:
            return None
        self.outputs[name] = compat.local_part(x).detach()
        original = self.originals.get(name)
        return original if original is None or isinstance(output, Tensor) else (original, *output[1:])

    def _keep_last(self, _: nn.Module, __: Any, output: Any) -> None:
        x = first_tensor(getattr(output, "logits", output))
        if x is not None and x.ndim == 3 and self.last is None:
            self.last = fingerprint(compat.local_part(x.detach()))[0].cpu()

    def _change(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Any = args[0] if args else kwargs.get("hidden_states")
        if self.changed is None or not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != len(self.changed):
            return None
        x = torch.where(self.changed.to(x.device)[:, None], -x, x)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def _see_embedding(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        if self.positions is None and args and args[0].ndim == 2:
            self.positions = find_positions(self.batch, compat.local_part(args[0]), self.peers)
        if not self.rounded or compat.is_dtensor(output):
            return None
        return output * (1 + torch.finfo(output.dtype).eps * torch.randn_like(output).clamp(-2, 2))


@dataclass(frozen=True)
class Runner:
    """The model and its loss, with the layers that forwards observe.

    Args:
        runs_backward: True if `loss` runs backward too. Then every forward is a step, whose gradients are dropped.
    """

    model: nn.Module
    loss: Loss
    peers: tuple[int, ...]
    layers: dict[str, nn.Module]
    runs_backward: bool = False

    def run(self, batch: CheckBatch, **changes: Any) -> Forward:
        with Forward(self.model, batch, self.peers, self.layers, **changes) as forward:
            output = self.evaluate(batch)
        if isinstance(output, StepOutput) and output.positions is not None:
            forward.positions = output.positions.flatten().cpu()
        return forward

    def evaluate(self, batch: CheckBatch) -> Tensor | StepOutput:
        gradients = [(p, p.grad) for p in self.model.parameters()] if self.runs_backward else []
        for p, _ in gradients:
            p.grad = None
        with torch.set_grad_enabled(self.runs_backward):
            output = self.loss(self.model, batch)
        for p, gradient in gradients:
            p.grad = gradient
        # After a forward without backward, FSDP2 leaves the parameters of its outermost module gathered.
        for module in self.model.modules():
            if callable(reshard := getattr(module, "reshard", None)):
                reshard()
        return output

    def of_peers(self, value: Any) -> dict[tuple[int, ...], list[Any]]:
        """Gathers a value from all ranks; returns those of the ranks that share rows, by these ranks."""
        groups: dict[tuple[int, ...], list[Any]] = {}
        for peers, x in gathered((self.peers, value)):
            groups.setdefault(peers, []).append(x)
        return groups


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
