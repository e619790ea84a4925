"""Probes at the start of a run: further forwards of the real model on its real ranks, with one change each.

A probe changes the length of the rows, the input of a layer at some tokens, or the weights, and looks where the outputs
change. Layers are observed one by one: the output of a changed layer is replaced by its output without the change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.check.compare import MODEL_LIMITS
from armillary.check.diagnose import Mistake, list_names
from armillary.check.facts import Fact, Observation, Verdict, VerifyReport, judge, tolerance
from armillary.check.observe import ModelParts, Proof, ShardTokens, find_positions, trainable
from armillary.check.step import FINGERPRINT, CheckBatch, Reduce, StepOutput, first_tensor
from armillary.core.parts import compat

Loss = Callable[[nn.Module, CheckBatch], Tensor | StepOutput]

LEFT_TOKENS = 2
"""Tokens before an edge whose input a probe leaves alone: if they do not change, the layer does not mix tokens."""
ROUNDINGS = 64
"""Changes up to this multiple of the rounding error (in 16 bits `ROUNDINGS_16`) count as none."""
ROUNDINGS_16 = 4
NOISE_FACTOR = 6.0
"""Errors up to this multiple of the effect of rounding the embeddings count as none."""
MOST_NOISE = 0.3
"""If rounding the embeddings changes outputs by more, as when routing flips, prefixes are not compared."""
STEP_SIZE = 0.01
"""Relative change of the loss by which weights are moved along the gradient."""
LOSS_LIMIT = 0.003
"""Largest relative error of the loss's change along the gradient. Where experts are chosen, or curvature changes it by
as much, differences up to `LOSS_LIMIT_COARSE` decide nothing."""
LOSS_LIMIT_COARSE = 0.3
CHOICE = re.compile("expert|moe|router", re.I)
"""Matches names of modules that choose experts: the loss jumps where a choice changes, which no gradient shows."""
FULL_ATTENTION = ("full_attention", "sliding_attention", None)
"""Layer types of a configuration whose mask is known."""


def verify(
    model: nn.Module,
    batch: CheckBatch,
    loss: Loss,
    *,
    reduce: Reduce | None = None,
    peers: Sequence[int] | None = None,
    causal: bool = True,
) -> VerifyReport:
    """Verifies the context parallelism of a model inside its run, by one step and probes; trains nothing.

    The facts of `verifying`, by forward and backward of `loss`, and those of nine further forwards: the same
    prefix gives the same outputs in shorter rows, whose shards end elsewhere; attention crosses shards, stays within
    documents and windows, and does not look ahead; the loss changes along the measured gradient as it should.

    Modules are in evaluation mode meanwhile. Weights, gradients, buffers, random numbers and modes are restored; a copy
    of this rank's weights is kept for that. Every rank of the world must call it.

    Args:
        batch: the whole rows, the same on all ranks that share them; with documents, if the run packs them.
        loss: `loss(model, batch)` shards rows of any length, runs forward, and returns the loss, or a `StepOutput` with
            the positions of this rank's tokens too. It must not run backward. Without positions, those of common layouts
            are tried.
        reduce: reduces gradients after backward, if hooks of the model (FSDP2, DDP) do not.
        peers: global ranks that share the rows; by default all.
        causal: False for a model whose tokens see later ones: it is not probed for that, and its prefixes are not
            compared.

    Raises:
        ValueError: as `loss` does for the whole rows.
    """
    with _undisturbed(model):
        probes = _Probes(model, batch, loss, peers, causal)
        # 1. One step, observed, which is also the forward that probes are compared with.
        base = _Forward(model, batch, probes.peers, probes.layers)
        with Proof(model, batch, peers=peers) as proof, base:
            output = loss(model, batch)
            total, positions = (output.loss, output.positions) if isinstance(output, StepOutput) else (output, None)
            if positions is not None and proof.tokens is None:
                proof.tokens = ShardTokens.of(batch, positions.flatten().cpu())
            total.backward()
        if reduce is not None:
            reduce(model)
        observations = proof.gather(total.detach())
        base.positions = None if proof.tokens is None else proof.tokens.positions
        facts = judge(observations)
        # 2. Further forwards.
        with torch.no_grad():
            facts += probes.attention(base)
            facts += (
                probes.prefix(base, max((x.dtype for x in observations), key=tolerance)),
                probes.loss_along_gradient(total.detach(), observations),
            )
    return VerifyReport(facts)


@contextmanager
def _undisturbed(model: nn.Module) -> Generator[None]:
    """Context manager that restores modes, buffers, gradients and random numbers. Dropout is off inside."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            model.eval()
            for p in model.parameters():
                p.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for x, value in buffers:
                    x.copy_(value)


@dataclass
class _Forward:
    """Context manager around one forward: changes inputs of layers and keeps their outputs.

    Args:
        layers: layers by the name of their kind.
        changed: global positions of tokens whose input is negated, in all layers.
        originals: outputs that replace those of the layers, so that each layer's input is the original one.
        rounded: True changes the output of the embedding by its rounding error.
    """

    model: nn.Module
    batch: CheckBatch
    peers: tuple[int, ...]
    layers: dict[str, nn.Module]
    positions: Tensor | None = None
    changed: Tensor | None = None
    originals: dict[str, Tensor] | None = None
    rounded: bool = False
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    last: Tensor | None = None

    def __enter__(self) -> Self:
        parts = ModelParts.of(self.model)
        self.handles = [layer.register_forward_hook(partial(self._keep, name)) for name, layer in self.layers.items()]
        if self.changed is not None:
            hook = self._change
            self.handles += [x.register_forward_pre_hook(hook, with_kwargs=True) for x in self.layers.values()]
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
        if self.originals is None or name not in self.originals:
            return None
        return self.originals[name] if isinstance(output, Tensor) else (self.originals[name], *output[1:])

    def _keep_last(self, _: nn.Module, __: Any, output: Any) -> None:
        x = first_tensor(getattr(output, "logits", None)) if hasattr(output, "logits") else first_tensor(output)
        if x is not None and x.ndim == 3 and self.last is None:
            x = compat.local_part(x).detach()[0].double()
            generator = torch.Generator().manual_seed(x.shape[1])
            projection = torch.randn(x.shape[1], FINGERPRINT, generator=generator, dtype=torch.float64)
            self.last = (x @ projection.to(x.device)).cpu()

    def _change(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
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


@dataclass
class _Reach:
    """Where the outputs of one layer changed on one rank, when the inputs of some tokens did.

    Args:
        near: True if tokens just before the edge, on the changed tokens' shard, changed; None if they are elsewhere.
        pieces: for each run of this rank's tokens after the edge, in the document: (first position, True if changed).
        documents, future, window: number of tokens that changed although another document, a later token or the window
            hides the changed tokens from them; None if there are no such tokens.
    """

    near: bool | None = None
    pieces: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    documents: int | None = None
    future: int | None = None
    window: int | None = None


class _Probes:
    def __init__(
        self, model: nn.Module, batch: CheckBatch, loss: Loss, peers: Sequence[int] | None, causal: bool
    ) -> None:
        self.model, self.batch, self.loss, self.causal = model, batch, loss, causal
        self.peers = tuple(range(dist.get_world_size())) if peers is None else tuple(peers)
        self.length = batch.ids.shape[1]
        self.layers, self.windows, self.known = _layer_kinds(model)

    def run(self, batch: CheckBatch, **changes: Any) -> _Forward:
        forward = _Forward(self.model, batch, self.peers, self.layers, **changes)
        with forward:
            output = self.evaluate(batch)
        if isinstance(output, StepOutput) and output.positions is not None:
            forward.positions = output.positions.flatten().cpu()
        return forward

    def evaluate(self, batch: CheckBatch) -> Tensor | StepOutput:
        output = self.loss(self.model, batch)
        # After a forward without backward, FSDP2 leaves the parameters of its outermost module gathered.
        for module in self.model.modules():
            if isinstance(reshard := getattr(module, "reshard", None), Callable):
                reshard()
        return output

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(self, base: _Forward) -> tuple[Fact, ...]:
        """Changes the inputs of layers on one side of an edge between shards; returns where their outputs change."""
        positions = base.positions
        owners = _gathered((self.peers, None if positions is None else positions.tolist()))
        shards = [x for peers, x in owners if peers == self.peers]
        edge = None if any(x is None for x in shards) else _edge(shards, self.length, self.batch.documents)
        if len(shards) == 1 or edge is None or positions is None or not base.outputs:
            reason = (
                "one rank has the whole sequence"
                if len(shards) == 1
                else "no layer was observed"
                if not base.outputs
                else "the positions of tokens are unknown"
                if positions is None
                else "no document has tokens on both sides of a shard's edge"
            )
            names = ("attention across shards", "documents", "no look-ahead", "windows")
            return tuple(Fact(name, Verdict.NOT_OBSERVED, reason) for name in names)
        start, cut, last_cut, end = edge
        noise = self.run(self.batch)
        inside = (positions >= start) & (positions < end)
        # 1. Tokens of the document before its first edge, but for a few, whose own outputs show that the layer mixes.
        left = min(LEFT_TOKENS, (cut - start) // 2)
        before = inside & (positions < cut - left)
        # 2. All other documents, and this one after its last edge.
        after = ~inside | (positions >= last_cut)
        reaches = dict[str, _Reach]()
        forward, backward = (
            self.run(self.batch, changed=x, originals=base.outputs, positions=positions) for x in (before, after)
        )
        for name, original in base.outputs.items():
            reach = reaches[name] = _Reach()
            limit = _limits(original, noise.outputs[name])
            moved = _change_of(forward.outputs[name], original) > limit
            # The document's tokens that see the changed ones.
            near = inside & (positions >= cut - left) & (positions < cut)
            window = self.windows[name]
            visible = inside & (positions >= cut)
            if window is not None:
                hidden = inside & (positions > cut - left - 1 + window)
                reach.window = int((moved & hidden).sum()) if hidden.any() else None
                visible &= positions < cut - left - 1 + window
            reach.near = bool(moved[near].any()) if near.any() else None
            for run in _runs(visible.nonzero().flatten(), positions):
                reach.pieces.append((int(positions[run[0]]), bool(moved[run].any())))
            # Tokens that see none of the changed ones.
            later = ~inside & (positions >= end) if self.causal else ~inside
            leaks = int((moved & later).sum()) if later.any() else None
            moved_back = _change_of(backward.outputs[name], original) > limit
            kept = inside & (positions < last_cut)
            earlier, ahead = bool((~inside).any()) or start > 0, bool(kept.any())
            # Other documents and later tokens change together: only without other documents is it a look-ahead.
            wrong = int((moved_back & kept).sum())
            if earlier or end < self.length:
                reach.documents = (leaks or 0) + wrong if ahead or leaks is not None else None
            elif self.causal and ahead:
                reach.future = wrong
        return self._judge_attention(_gathered((self.peers, reaches)))

    def _judge_attention(self, gathered: Sequence[tuple[tuple[int, ...], dict[str, _Reach]]]) -> tuple[Fact, ...]:
        crossed, broken, unmixed, unknown = list[str](), list[str](), list[str](), list[str]()
        leaks: dict[str, dict[str, int]] = {"documents": {}, "future": {}, "window": {}}
        for peers in sorted({peers for peers, _ in gathered}):
            ranks = [reaches for other, reaches in gathered if other == peers]
            for name in self.layers:
                reach = [x[name] for x in ranks if name in x]
                pieces = [moved for _, moved in sorted(piece for x in reach for piece in x.pieces)]
                near = [x.near for x in reach if x.near is not None]
                # Without a known mask, a window may end the reach: but no run may change behind one that does not.
                lost = not all(pieces) if self.known[name] else pieces != sorted(pieces, reverse=True)
                if not pieces or (near and not any(near)):
                    unmixed.append(name)
                elif lost or (self.known[name] and not any(pieces)):
                    broken.append(name)
                elif any(pieces):
                    crossed.append(name)
                else:
                    unknown.append(name)
                for kind, counts in leaks.items():
                    seen = [count for x in reach if (count := getattr(x, kind)) is not None]
                    if seen:
                        counts[name] = counts.get(name, 0) + sum(seen)
        crossing = (
            Fact("attention across shards", Verdict.WRONG, f"{Mistake.OWN_SHARD}: {list_names(broken)}")
            if broken
            else Fact("attention across shards", Verdict.RIGHT, list_names(crossed))
            if crossed
            else Fact(
                "attention across shards",
                Verdict.NOT_OBSERVED,
                f"no change reaches another token: {list_names([*unmixed, *unknown])}",
            )
        )
        return (
            crossing,
            _leak("documents", Mistake.DOCUMENTS, leaks["documents"], "rows have one document"),
            _leak(
                "no look-ahead",
                "tokens see later ones",
                leaks["future"],
                "rows have several documents, or the model is not causal",
            ),
            _leak("windows", Mistake.WINDOW, leaks["window"], "no layer has a window that ends inside the document"),
        )

    # -- prefixes and the gradient ------------------------------------------------------------------------------------

    def prefix(self, base: _Forward, dtype: torch.dtype) -> Fact:
        """Compares the outputs of a prefix of the rows, in shards with other edges."""
        name, ranks = "same prefix in shorter rows", len(self.peers)
        length = self.length * 3 // 4 // (2 * ranks) * 2 * ranks
        if not self.causal or not length or ranks == 1:
            reason = "the model is not causal" if not self.causal else "rows are too short, or on one rank"
            return Fact(name, Verdict.NOT_OBSERVED, reason)
        documents = None
        if self.batch.documents is not None:
            documents = (*(end for end in self.batch.documents if end < length), length)
        short = replace(
            self.batch, ids=self.batch.ids[:, :length], labels=self.batch.labels[:, :length], documents=documents
        )
        forwards = (base, self.run(self.batch, rounded=True), self.run(short))
        rows = [None if x.positions is None or x.last is None else (x.positions, x.last) for x in forwards]
        # Every rank judges the rows of all ranks.
        gathered = _gathered((self.peers, rows))
        if any(pair is None for _, pairs in gathered for pair in pairs):
            return Fact(name, Verdict.NOT_OBSERVED, "the outputs or the positions of their tokens are unknown")
        worst, limit, spread = 0.0, MODEL_LIMITS[dtype], Tensor()
        for peers in sorted({peers for peers, _ in gathered}):
            whole, rounded, prefix = (
                _joined([pairs[i] for other, pairs in gathered if other == peers], n)
                for i, n in enumerate((self.length, self.length, length))
            )
            size = whole.square().mean().sqrt()
            limit = max(limit, NOISE_FACTOR * float((rounded - whole).norm(dim=1).max() / size))
            errors = (prefix - whole[:length]).norm(dim=1) / size
            if not float(errors.max()) <= worst:
                worst, spread = float(errors.max()), errors
        if limit > MOST_NOISE:
            return Fact(name, Verdict.NOT_OBSERVED, f"rounding alone changes outputs by {limit / NOISE_FACTOR:.0e}")
        if not worst <= limit:
            tokens = int((~(spread <= limit)).sum())
            return Fact(
                name, Verdict.WRONG, f"{tokens} of {length} tokens differ by up to {worst:.0e} (limit {limit:.0e})"
            )
        return Fact(name, Verdict.RIGHT, f"{length} of {self.length} tokens differ by {worst:.0e} (limit {limit:.0e})")

    def loss_along_gradient(self, total: Tensor, observations: Sequence[Observation]) -> Fact:
        """Moves all weights along their gradients: the loss must change by the sum of the gradients' norms.

        Each parameter moves by the same distance, so that the large gradients of few do not hide errors of others.
        """
        name = "loss along the gradient"
        tallies = [x.labels for x in observations if x.labels is not None]
        labelled = sum(x.labelled for x in tallies)
        if any(tolerance(x.dtype) > tolerance(torch.float32) for x in observations):
            return Fact(name, Verdict.NOT_OBSERVED, "needs float32")
        if not labelled or len(tallies) < len(observations):
            return Fact(name, Verdict.NOT_OBSERVED, "the loss of each label is unknown")
        # Ranks report the loss of all, or shares of it.
        losses, mean = _gathered(float(total)), sum(x.loss for x in tallies) / labelled
        is_share = abs(sum(losses) - mean) < abs(losses[0] - mean)
        # Norms of whole gradients, of which ranks have parts: each part counts once.
        parts = {key: numbers[0] for x in observations for key, numbers in x.gradients.items()}
        norms = dict[str, float]()
        for key, norm in parts.items():
            parameter = key.partition(" at ")[0]
            norms[parameter] = (norms.get(parameter, 0.0) ** 2 + norm**2) ** 0.5
        moved = [(p, p.detach().clone(), norms[key]) for key, p in trainable(self.model) if norms.get(key)]

        def slope(step: float) -> float:
            values = list[float]()
            for signed_step in (step, -step):
                for p, weight, norm in moved:
                    if p.grad is not None:
                        p.copy_(weight).add_(p.grad, alpha=signed_step / norm)
                output = self.evaluate(self.batch)
                shares = _gathered(float(output.loss if isinstance(output, StepOutput) else output))
                values.append(sum(shares) if is_share else sum(shares) / len(shares))
            for p, weight, _ in moved:
                p.copy_(weight)
            return (values[0] - values[1]) / (2 * step)

        expected = sum(norm for _, _, norm in moved)
        if not expected:
            return Fact(name, Verdict.NOT_OBSERVED, "all gradients are zero")
        step = STEP_SIZE * abs(mean) / expected
        # Half the step has a quarter of the error by the loss's curvature, which the difference of both leaves out.
        coarse, fine = slope(step) / expected, slope(step / 2) / expected
        ratio = (4 * fine - coarse) / 3
        limit = LOSS_LIMIT + abs(fine - coarse) / 4
        if abs(ratio - 1) <= limit:
            return Fact(name, Verdict.RIGHT, f"{ratio:.4g} times the expected change")
        jumps = any(CHOICE.search(f"{key} {type(x).__name__}") for key, x in self.model.named_modules())
        if abs(ratio - 1) <= LOSS_LIMIT_COARSE and (jumps or abs(fine - coarse) > LOSS_LIMIT_COARSE / 10):
            return Fact(name, Verdict.NOT_OBSERVED, f"the loss is not smooth: {coarse:.4g} and {fine:.4g} times")
        factors = {Mistake.AVERAGED: len(losses), Mistake.SUMMED_TWICE: 1 / len(losses)}
        mistake = next(
            (x for x, y in factors.items() if abs(ratio / y - 1) <= LOSS_LIMIT_COARSE), "parts of gradients are wrong"
        )
        return Fact(name, Verdict.WRONG, f"{mistake}: the loss changes by {ratio:.4g} times the expected change")


def _leak(name: str, mistake: str, counts: dict[str, int], reason: str) -> Fact:
    if not counts:
        return Fact(name, Verdict.NOT_OBSERVED, reason)
    wrong = [f"{kind} at {count} tokens" for kind, count in counts.items() if count]
    return Fact(
        name,
        Verdict.WRONG if wrong else Verdict.RIGHT,
        f"{mistake}: {list_names(wrong)}" if wrong else list_names([*counts]),
    )


def _layer_kinds(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, int | None], dict[str, bool]]:
    """Returns one layer of each kind by name, its window, and True if the kind's mask is known."""
    layers, windows, known = dict[str, nn.Module](), dict[str, int | None](), dict[str, bool]()
    config: Any = next((x.config for x in model.modules() if hasattr(x, "config")), None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    types: Any = getattr(config, "layer_types", None) or ()
    seen = set[tuple[object, ...]]()
    for i, layer in enumerate(ModelParts.of(model).layers):
        kind = types[i] if i < len(types) else None
        window = _window(layer, kind, config)
        key = (kind, window, *sorted({type(x).__name__ for x in layer.modules()}))
        if key not in seen:
            seen.add(key)
            name = f"layer {i}"
            layers[name], windows[name], known[name] = layer, window, kind in FULL_ATTENTION
    return layers, windows, known


def _window(layer: nn.Module, kind: str | None, config: Any) -> int | None:
    if kind == "full_attention":
        return None
    for module in layer.modules():
        for attribute in ("sliding_window", "window"):
            if isinstance(value := getattr(module, attribute, None), int):
                return value
    has_attribute = any(hasattr(x, "sliding_window") or hasattr(x, "window") for x in layer.modules())
    if has_attribute or (kind is None and not getattr(config, "use_sliding_window", True)):
        return None
    return getattr(config, "sliding_window", None) if kind in (None, "sliding_attention") else None


def _edge(shards: Sequence[Any], length: int, documents: tuple[int, ...] | None) -> tuple[int, int, int, int] | None:
    """Returns (start, first edge, last edge, end) of the document with most edges between shards; None without any."""
    owner = torch.full((length,), -1)
    for rank, positions in enumerate(shards):
        owner[torch.tensor(positions)] = rank
    edges = ((owner[1:] != owner[:-1]).nonzero().flatten() + 1).tolist()
    ends = documents or (0, length)
    best = None
    for start, end in zip(ends, ends[1:], strict=False):
        cuts = [edge for edge in edges if start + 1 < edge < end]  # two tokens or more before the first edge
        if cuts and (best is None or len(cuts) > best[0]):
            best = (len(cuts), start, cuts[0], cuts[-1], end)
    return None if best is None else best[1:]


def _runs(indices: Tensor, positions: Tensor) -> list[Tensor]:
    """Splits local indices into runs of neighbouring positions."""
    if not len(indices):
        return []
    cuts = ((positions[indices].diff() != 1).nonzero().flatten() + 1).tolist()
    return list(indices.tensor_split(cuts))


def _change_of(x: Tensor, original: Tensor) -> Tensor:
    """Returns the largest change of each token's output, [T] on the host."""
    return (x - original).abs().amax((0, 2)).double().cpu()


def _limits(original: Tensor, repeated: Tensor) -> Tensor:
    """Returns for each token, [T], the change that rounding or another order of sums explains."""
    roundings = ROUNDINGS if original.dtype in (torch.float32, torch.float64) else ROUNDINGS_16
    rounding = roundings * torch.finfo(original.dtype).eps * original.abs().amax((0, 2)).double().cpu()
    return rounding + 4 * _change_of(repeated, original).max()


def _joined(shards: Sequence[Any], length: int) -> Tensor:
    rows = torch.zeros(length, FINGERPRINT, dtype=torch.float64)
    for positions, x in shards:
        rows[positions] = x
    return rows


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
