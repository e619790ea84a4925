"""One training step on one rank of a world: its batch, and the record of the tensors that it computes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from armillary.attention.internal import IGNORED, in_backward
from armillary.core.internal import compat

VOCABULARY = 64
"""Default vocabulary size of `check_model`; token ids are smaller."""
FINGERPRINT = 4
"""Number of random projections of each token's activation that are recorded, so that records are small at any width."""
ROUNDING = 1e-15
"""Relative change of weights (standard deviation). Its effect shows how much a model amplifies rounding errors."""
WRAPPERS = re.compile(r"(^|(?<=\.))(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.|^module\.")
"""Matches the parts of module and parameter names that wrappers add."""


@dataclass(frozen=True)
class CheckBatch:
    """A whole batch, the same on every rank. The step shards it, as the training script would.

    Args:
        ids: [B, N].
        labels: [B, N], before shifting: the token itself, or -100. The first third of a row has half as many labels, so
            that shards have different numbers of them and a mean of means is wrong.
        documents: boundaries (0, ..., N), or None for one document per row.
    """

    ids: Tensor
    labels: Tensor
    documents: tuple[int, ...] | None = None

    @property
    def position_ids(self) -> Tensor:
        """Positions [B, N], counted from the start of each document."""
        ends = self.documents or (0, self.ids.shape[1])
        return torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).expand(self.ids.shape)

    @property
    def shifted_labels(self) -> Tensor:
        """Labels [B, N] of the next token; -100 at the last token of each document."""
        shifted, ends = self.labels.roll(-1, 1), self.documents or (0, self.ids.shape[1])
        shifted[:, [end - 1 for end in ends[1:]]] = IGNORED
        return shifted


@dataclass(frozen=True)
class StepOutput:
    """The results of a step.

    Args:
        loss: []. If the step did not run backward, the checker runs it from this loss.
        positions: [T], the global positions of this rank's tokens in local order. Without them, only the loss and
            parameters' gradients are compared.
        logits: [B, T, V]; by default the output of the model's last forward pass.
    """

    loss: Tensor
    positions: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class CheckRun:
    """One run of the step.

    Args:
        ranks: size of the world.
        tokens, rows: a batch is [rows, tokens].
        variant: "plain", "recompute", "compile" or "two micro-batches".
        dtype: dtype of weights and activations; weights are first rounded to `weight_dtype`.
        perturbed: True changes weights by `ROUNDING`.
        changed_token: True replaces the first token.
    """

    ranks: int
    tokens: int
    rows: int = 1
    vocabulary: int = VOCABULARY
    variant: str = "plain"
    documents: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype = torch.float64
    perturbed: bool = False
    changed_token: bool = False
    seed: int = 0

    def batches(self) -> list[CheckBatch]:
        first = self._batch(self.seed, self.documents)
        if self.variant != "two micro-batches":
            return [first]
        # Mirrored boundaries: documents kept from the first micro-batch would be wrong for the second.
        mirrored = self.documents and tuple(self.tokens - end for end in reversed(self.documents))
        return [first, self._batch(self.seed + 1, mirrored)]

    def _batch(self, seed: int, documents: tuple[int, ...] | None) -> CheckBatch:
        generator = torch.Generator().manual_seed(seed)
        # Token ids start at 3, because 0 to 2 are often special tokens, such as padding.
        ids = torch.randint(3, self.vocabulary, (self.rows, self.tokens), generator=generator)
        if self.changed_token:
            ids[:, 0] = 3 + (ids[:, 0] - 2) % (self.vocabulary - 3)
        labels = ids.clone()
        labels[:, 1 : self.tokens // 3 : 2] = IGNORED
        return CheckBatch(ids, labels, documents)


@dataclass
class RankRecord:
    """One rank's tensors of one run, detached.

    Args:
        positions: [T], global positions of this rank's tokens; None if the step reports none.
        activations: for each module, in the order of the forward pass, fingerprints [B, T, FINGERPRINT] of its output.
        gradients: for each parameter, the gradient on this rank; of a DTensor, the gathered one.
        input_gradient: gradient of the embeddings' output [B, T, E].
    """

    loss: float
    positions: Tensor | None
    logits: Tensor | None
    logits_gradient: Tensor | None
    input_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    activations: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


Step = Callable[[nn.Module, CheckBatch], StepOutput | Tensor]
Reduce = Callable[[nn.Module], object]
Training = tuple[nn.Module, Step] | tuple[nn.Module, Step, Reduce]
"""(model, step) or (model, step, reduce), as in `check_model`."""
Build = Callable[[], nn.Module | Training]


def run_step(build: Build, step: Step | None, reduce: Reduce | None, run: CheckRun) -> RankRecord:
    """Builds the model, runs forward and backward, and returns this rank's record. Called on every rank of a world."""
    torch.manual_seed(run.seed)
    training = build()
    if isinstance(training, tuple):
        model, step = training[:2]
        reduce = training[2] if len(training) == 3 else reduce
    else:
        model = training
    assert step is not None
    # Rounds weights to `weight_dtype` first, so that the float64 reference has the same weights as the checked run.
    model = model.to(run.weight_dtype).to(run.dtype).train()
    if run.perturbed:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + ROUNDING * noise.to(parameter.dtype))
    if run.variant == "recompute" and not _checkpoint_layers(model):
        raise ValueError("the model has no nn.ModuleList or nn.Sequential of layers")
    if run.variant == "compile":
        model.compile(backend="aot_eager")
    # A hook would break the graph of a compiled model.
    recorder = _Recorder(model, hooks=run.variant != "compile", activations=run.variant == "plain")
    result, step_runs_backward = StepOutput(torch.zeros(())), None
    for batch in run.batches():
        recorder.clear()
        output = step(model, batch)
        result = output if isinstance(output, StepOutput) else StepOutput(output)
        # Only after the first micro-batch: later on, the gradients may be those of the first.
        if step_runs_backward is None:
            step_runs_backward = any(parameter.grad is not None for parameter in model.parameters())
        if result.loss.requires_grad and not step_runs_backward:
            result.loss.backward()
    if reduce is not None:
        reduce(model)
    return recorder.record(result, run)


def _checkpoint_layers(model: nn.Module) -> int:
    """Wraps the layers of each outermost module list in activation checkpointing. Returns the number of layers."""
    count = 0
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            for i, layer in enumerate(child):
                child[i] = checkpoint_wrapper(layer)
            count += len(child)
        else:
            count += _checkpoint_layers(child)
    return count


class _Recorder:
    """Forward hooks that keep a model's logits, the embeddings' output, and fingerprints of all activations."""

    def __init__(self, model: nn.Module, hooks: bool, activations: bool) -> None:
        self.model = model
        self.clear()
        if not hooks:
            return
        model.register_forward_hook(self._keep_logits)
        embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
        if embedding is not None:
            embedding.register_forward_hook(self._keep_embeddings)
        if activations:
            for name, module in model.named_modules():
                if module is not model:
                    module.register_forward_hook(partial(self._keep_activation, WRAPPERS.sub("", name)))

    def clear(self) -> None:
        self.logits, self.embeddings = list[Tensor](), list[Tensor]()
        self.fingerprints: dict[str, list[Tensor]] = defaultdict(list)

    # Hooks also run when activation checkpointing recomputes modules in backward; these calls are ignored.

    def _keep_logits(self, _: nn.Module, __: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        self._keep(self.logits, first_tensor(output) if logits is None else logits)

    def _keep_embeddings(self, _: nn.Module, __: Any, output: Any) -> None:
        self._keep(self.embeddings, output)

    def _keep(self, tensors: list[Tensor], x: Tensor | None) -> None:
        if x is not None and x.requires_grad and not in_backward():
            x.retain_grad()  # `record` reads its gradient
            tensors.append(x)

    def _keep_activation(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        x = first_tensor(output)
        if x is not None and x.ndim >= 3 and not in_backward():
            self.fingerprints[name].append(fingerprint(compat.local_part(x).detach()))

    def record(self, result: StepOutput, run: CheckRun) -> RankRecord:
        """Returns the record of the last micro-batch's tensors and of the accumulated gradients."""
        positions = result.positions
        tokens = run.tokens if positions is None else positions.numel()
        if positions is None and run.ranks == 1:
            positions = torch.arange(run.tokens)
        activations = dict[str, Tensor]()
        # A module that the forward calls several times has an activation for each call.
        for name, calls in self.fingerprints.items():
            for i, x in enumerate(_full_outputs(calls, tokens)):
                activations[f"{name} (call {i + 1})" if i else name] = x
        logits = [result.logits] if result.logits is not None else self.logits
        # Gradients on the host, gathered if FSDP2 or tensor parallelism shards them.
        gradients: dict[str, Tensor | None] = {
            WRAPPERS.sub("", name): None if p.grad is None else _full(p.grad).detach().cpu()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        return RankRecord(
            float(_full(result.loss.detach())),
            positions if positions is None else positions.detach().cpu().flatten(),
            _last_full_output([compat.local_part(x) for x in logits], tokens),
            _last_full_output([compat.local_part(x.grad) for x in self.logits if x.grad is not None], tokens),
            _last_full_output([compat.local_part(x.grad) for x in self.embeddings if x.grad is not None], tokens),
            gradients,
            activations,
        )


def first_tensor(output: Any) -> Tensor | None:
    """Returns the first floating-point tensor of a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, dict):
        output = tuple(cast(dict[str, Any], output).values())
    if isinstance(output, (tuple, list)):
        return next((x for x in cast(tuple[Any, ...], output) if isinstance(x, Tensor) and x.is_floating_point()), None)
    return None


def _full_outputs(calls: list[Tensor], tokens: int) -> list[Tensor]:
    """Returns a module's outputs [B, T, ...] with all of the rank's tokens; none if its calls have other tokens."""
    if all(x.shape[1] == tokens for x in calls):
        return calls
    if sum(x.shape[1] for x in calls) == tokens:  # called chunk by chunk
        return [torch.cat(calls, 1)]
    return []


def _last_full_output(calls: list[Tensor], tokens: int) -> Tensor | None:
    """Returns the last of `_full_outputs` on the host; None without any."""
    outputs = _full_outputs([x for x in calls if x.ndim >= 3], tokens)
    return outputs[-1].detach().cpu() if outputs else None


def fingerprint(x: Tensor) -> Tensor:
    """Returns random projections [B, T, FINGERPRINT] of activations [B, T, ...], in float64."""
    x = x.double().flatten(2)
    return x @ _projection(x.shape[2]).to(x.device)


@cache
def _projection(width: int) -> Tensor:
    # The same directions on every rank.
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, FINGERPRINT, generator=generator, dtype=torch.float64) / width**0.5


def _full(x: Any) -> Tensor:
    return x.full_tensor() if compat.is_dtensor(x) else x
