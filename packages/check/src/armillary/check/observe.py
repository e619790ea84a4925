"""Observation of a real training step by hooks: no extra forward, and one gather of small numbers over all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from armillary.attention.parts import IGNORED, in_backward
from armillary.check.facts import MODULUS, LabelTally, Observation, VerifyReport, judge, tolerance
from armillary.check.step import WRAPPERS, CheckBatch, first_tensor
from armillary.core import SequenceLayout
from armillary.core.parts import compat

CHUNK = 1024
"""Tokens whose probabilities are computed at once."""
CERTAIN = 1e-3
"""A label whose probability is above 1 - CERTAIN has a gradient that vanishes."""
MISFIT = 0.2
"""Largest part of a token's gradient that is not that of its label's cross entropy, relative to the gradient."""
PROJECTIONS = 4
"""Number of projections of the head's gradient."""
POSITION_NAME = re.compile("position|pos_ids|input_pos", re.I)
POSITION_TABLE = re.compile(r"wpe|pos", re.I)


@dataclass(frozen=True)
class ShardTokens:
    """The tokens of a rank, as they should reach the model.

    Args:
        ids, labels: [B, T]; labels are shifted, -100 for none.
        position_ids: [B or 1, T].
        positions: [T], global positions of the tokens in the rows.
        length: N, tokens of the rows.
        labelled: number of labels that the loss is averaged over; by default those of the ranks that share the rows.
    """

    ids: Tensor
    labels: Tensor
    position_ids: Tensor
    positions: Tensor
    length: int
    labelled: int | None = None

    @classmethod
    def of(cls, batch: CheckBatch, positions: Tensor) -> Self:
        rows = (batch.ids, batch.shifted_labels, batch.position_ids)
        ids, labels, position_ids = (x[:, positions.to(x.device)] for x in rows)
        return cls(ids, labels, position_ids, positions, batch.ids.shape[1])


class Proof:
    """Context manager around a real step, which observes forward, backward and the reduction of gradients.

        with verifying(model, batch) as proof:
            loss = train_step(model)
            proof.report(loss).assert_right()

    `report` gathers the facts. Every rank of the world must enter the block and call `report`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: CheckBatch | ShardTokens,
        positions: Tensor | None = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        self.model, self.batch = model, batch
        self.peers = tuple(range(dist.get_world_size())) if peers is None else tuple(peers)
        self.tokens = batch if isinstance(batch, ShardTokens) else None
        if isinstance(batch, CheckBatch) and positions is not None:
            self.tokens = ShardTokens.of(batch, positions.flatten().cpu())
        self.seen = Observation(self.peers, batch.length if isinstance(batch, ShardTokens) else batch.ids.shape[1])
        self.ids: Tensor | None = None
        self.position_ids: Tensor | None = None
        self._handles = list[RemovableHandle]()
        self._head_sum: Tensor | float = 0.0
        self._accumulated = self._loss_in_head = False

    # -- hooks --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._accumulated = any(p.grad is not None for p in self.model.parameters())
        parts = ModelParts.of(self.model)
        self.parts = parts
        self._hook(self.model, self._see_model)
        for name, module in parts.embeddings.items():
            is_ids = module is parts.embedding
            self._hook(module, self._see_ids if is_ids else partial(self._see_position_table, name))
        for layer in parts.layers:
            self._hook(layer, self._see_layer)
        if parts.head is not None:
            self._hook(parts.head, self._see_head)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, module: nn.Module, see: Callable[[dict[str, Any], Any], None]) -> None:
        names = list(signature(module.forward).parameters)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Activation checkpointing calls modules again in backward; those calls show nothing new.
            if not in_backward():
                see(dict(zip(names, args, strict=False)) | kwargs, output)

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _see_ids(self, inputs: dict[str, Any], output: Any) -> None:
        ids: Any = next(iter(inputs.values()), None)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            return
        ids = compat.local_part(ids)
        if self.ids is None:  # further calls are those of other micro-batches
            self.ids = ids
            if self.tokens is None and isinstance(self.batch, CheckBatch):
                positions = find_positions(self.batch, ids, self.peers)
                self.tokens = None if positions is None else ShardTokens.of(self.batch, positions)
        if isinstance(output, Tensor) and output.requires_grad and self.parts.tied:
            output.register_hook(partial(self._add_embedding, ids))

    def _see_layer(self, inputs: dict[str, Any], output: Any) -> None:
        x = first_tensor(output)
        if x is not None and x.ndim == 3:
            self.seen.layer_tokens = max(self.seen.layer_tokens or 0, compat.local_part(x).shape[1])
        self._see_positions(inputs)

    def _see_model(self, inputs: dict[str, Any], output: Any) -> None:
        self._see_positions(inputs)
        logits = getattr(output, "logits", None)
        self._watch_logits(output if logits is None else logits)

    def _see_position_table(self, name: str, inputs: dict[str, Any], _: Any) -> None:
        if POSITION_TABLE.search(name):
            self._see_positions({"position": next(iter(inputs.values()), None)})

    def _see_positions(self, inputs: dict[str, Any]) -> None:
        for name, x in inputs.items():
            is_integer = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
            if not (self.position_ids is None and is_integer and POSITION_NAME.search(name) and x.ndim):
                continue
            ids = compat.local_part(x)
            if ids.ndim == 3 and bool((ids == ids[:1]).all()):  # text alone, in a model with several axes of positions
                ids = ids[0]
            self.position_ids = ids.expand(1, -1) if ids.ndim == 1 else ids if ids.ndim == 2 else None

    # -- labels and the head ------------------------------------------------------------------------------------------

    def _watch_logits(self, logits: Any) -> None:
        if isinstance(logits, Tensor) and logits.ndim == 3 and logits.requires_grad and not compat.is_dtensor(logits):
            logits.register_hook(partial(self._tally_logits, logits.detach()))

    def _tally_logits(self, logits: Tensor, gradient: Tensor) -> None:
        labels = self._labels(logits)
        if labels is None or self.seen.labels is not None:
            return
        tally, self.seen.dtype = LabelTally(), max(self.seen.dtype, logits.dtype, key=tolerance)
        z, g = logits.flatten(0, 1), gradient.detach().flatten(0, 1)
        for part in torch.arange(len(z)).split(CHUNK):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            direction, probability, loss = _cross_entropy(z[rows], labels[rows])
            _count(tally, direction, g[rows], labels[rows], probability, loss)
        self.seen.labels = tally

    def _labels(self, x: Tensor) -> Tensor | None:
        """Returns the labels [B T] of logits or hidden states; None if they have other tokens."""
        if self.tokens is None or self.tokens.labels.shape != x.shape[:2]:
            return None
        return self.tokens.labels.flatten().to(x.device)

    def _see_head(self, inputs: dict[str, Any], output: Any) -> None:
        hidden: Any = next(iter(inputs.values()), None)
        if self._loss_in_head:
            return
        plain = isinstance(hidden, Tensor) and isinstance(output, Tensor) and not compat.is_dtensor(output)
        if not plain or output.ndim != 3 or not output.requires_grad:
            self.seen.reasons["gradient of the head"] = "the head does not return logits [B, T, V]"
            return
        output.register_hook(partial(self._add_head, hidden.detach().flatten(0, 1)))
        # Also without logits in the model's output, or with a copy of them that the loss does not use. The hook of
        # logits after a softcap runs earlier in backward, and is the one that counts.
        self._watch_logits(output)

    def head(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a head function (hidden [B, T, E], weight [V, E], labels=...) that observes a loss without logits.

        It computes the logits of a chunk of tokens at a time, once more than the loss itself.
        """

        def observed(hidden: Tensor, weight: Tensor, *, labels: Tensor, **options: Any) -> Any:
            # The first micro-batch is judged by its expected labels; later ones only add to the head's gradient.
            expected = labels.flatten() if self._loss_in_head else self._labels(hidden)
            self._loss_in_head = True
            if compat.is_dtensor(weight) or not hidden.requires_grad or expected is None:
                self.seen.reasons["gradient of the head"] = "its weight or the tokens are sharded over another axis"
            else:
                with torch.no_grad():
                    self._watch_hidden(hidden, weight.detach(), expected)
            return function(hidden, weight, labels=labels, **options)

        return observed

    def _watch_hidden(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        x = hidden.detach().flatten(0, 1)
        directions, probabilities, losses, products = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        rows, columns = _projections(*weight.shape, device=x.device)
        for part in torch.arange(len(x)).split(CHUNK):
            chunk = slice(int(part[0]), int(part[-1]) + 1)
            direction, probability, loss = _cross_entropy(x[chunk] @ weight.T.to(x.dtype), labels[chunk])
            directions.append(direction.to(x.dtype) @ weight.to(x.dtype))
            products.append((direction.float() @ rows.T) * (x[chunk].float() @ columns.T))
            probabilities.append(probability)
            losses.append(loss)
        direction, product = torch.cat(directions), torch.cat(products)
        probability, loss = torch.cat(probabilities), torch.cat(losses)

        def see_gradient(gradient: Tensor) -> None:
            tally, self.seen.dtype = LabelTally(), max(self.seen.dtype, x.dtype, key=tolerance)
            weights = _count(tally, direction, gradient.detach().flatten(0, 1), labels, probability, loss)
            self._head_sum = self._head_sum + (weights[:, None] * product).double().sum(0)
            if self.seen.labels is None:
                self.seen.labels = tally

        hidden.register_hook(see_gradient)

    def _add_head(self, hidden: Tensor, gradient: Tensor) -> None:
        g = gradient.detach().flatten(0, 1)
        rows, columns = _projections(g.shape[-1], hidden.shape[-1], device=g.device)
        self._head_sum = self._head_sum + ((g.float() @ rows.T) * (hidden.float() @ columns.T)).double().sum(0)

    def _add_embedding(self, ids: Tensor, gradient: Tensor) -> None:
        # A tied weight has a second gradient, that of the embedding.
        embedding = cast(nn.Embedding, self.parts.embedding)
        g, flat = gradient.detach().flatten(0, 1).float(), ids.flatten()
        rows, columns = _projections(embedding.num_embeddings, g.shape[-1], device=g.device)
        products = rows.T[flat] * (g @ columns.T)
        if embedding.padding_idx is not None:
            products = products[flat != embedding.padding_idx]
        self._head_sum = self._head_sum + products.double().sum(0)

    # -- report -------------------------------------------------------------------------------------------------------

    def report(self, loss: Tensor | float | None = None) -> VerifyReport:
        """Gathers the observations of all ranks; returns the facts, the same on every rank.

        Call it after backward and the reduction of gradients, before the optimizer's step.

        Args:
            loss: the loss that the step reports on this rank. Compared with the mean over all labels.

        Bytes sent: one `all_gather_object` over the world, of about 40 bytes for each parameter.
        """
        return VerifyReport(judge(self.gather(loss)))

    def gather(self, loss: Tensor | float | None = None) -> list[Observation]:
        seen, tokens = self.seen, self.tokens
        if loss is not None:
            seen.reported_loss = float(loss.full_tensor() if compat.is_dtensor(loss) else loss)  # pyright: ignore[reportAttributeAccessIssue]
        if tokens is None:
            reason = "the embedding was not observed, or its ids are those of no common layout: give positions"
            seen.reasons |= dict.fromkeys(("share of tokens", "positions", "labels", "loss"), reason)
        else:
            self._compare_tokens(tokens)
        self._see_gradients()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, seen)
        return gathered

    def _compare_tokens(self, tokens: ShardTokens) -> None:
        """Compares the ids and position ids that reached modules with those of this rank's tokens."""
        seen, local = self.seen, tokens.positions.long()
        seen.tokens, seen.labelled = len(local), tokens.labelled
        seen.position_sums = (int(local.sum()) % MODULUS, int(local.square().sum()) % MODULUS)
        if self.ids is not None:
            seen.embedded, expected = True, tokens.ids.to(self.ids.device)
            # If their number differs, all tokens count as wrong.
            same_shape = self.ids.shape == expected.shape
            seen.wrong_ids = int((self.ids != expected).sum()) if same_shape else self.ids.numel()
        ids, rows = None if self.position_ids is None else self.position_ids.cpu(), tokens.position_ids.cpu()
        if ids is not None and ids.shape[1] == len(local) and (len(ids) == 1 or len(rows) in (1, len(ids))):
            in_documents, in_rows = (ids - expected for expected in (rows, local))
            seen.position_offsets = (_range(in_documents), _range(in_rows))
            own = torch.arange(len(local))
            seen.positions_restart = torch.equal(ids[0], own) and not torch.equal(local, own)

    @torch.no_grad()
    def _see_gradients(self) -> None:
        seen, head = self.seen, self.parts.weight
        for clean, parameter in trainable(self.model):
            gradient = None if parameter.grad is None else compat.local_part(parameter.grad)
            norm = 0.0 if gradient is None else float(gradient.norm(dtype=torch.float64))
            if not norm:
                seen.unused.append(clean)
            if gradient is not None:
                place = _place(parameter)
                total = float(gradient.sum(dtype=torch.float64))
                seen.gradients[f"{clean} at {place}" if place else clean] = (norm, total)
                seen.dtype = max(seen.dtype, gradient.dtype, key=tolerance)
        name = "gradient of the head"
        if head is None or head.grad is None:
            seen.reasons.setdefault(name, "the model's head was not found, or has no gradient")
        elif self._accumulated:
            seen.reasons[name] = "gradients were accumulated before the step"
        elif isinstance(self._head_sum, float):
            seen.reasons.setdefault(name, "the head was not called, or its output has no gradient")
        if name not in seen.reasons and head is not None and head.grad is not None:
            rows, columns = _projections(*head.shape, device=compat.local_part(head.grad).device)
            projected = _project(head.grad, rows, columns)
            seen.head_gradient, seen.head_norm = projected.tolist(), float(_full(head.grad.norm()))
            seen.head_sum = cast(Tensor, self._head_sum).tolist()


verifying = Proof


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters with gradients, by name without the parts that wrappers add."""
    return [(WRAPPERS.sub("", name), p) for name, p in model.named_parameters() if p.requires_grad]


def observe_shard(model: nn.Module, *, peers: Sequence[int], **tokens: Any) -> Proof:
    """Returns the observation of a step of one shard. `tokens` are the fields of `ShardTokens`."""
    return Proof(model, ShardTokens(**tokens), peers=peers)


@dataclass(frozen=True)
class ModelParts:
    """The modules of a model that can be observed.

    Args:
        layers: the decoder layers.
        embeddings: embedding tables by name; `embedding` is that of token ids.
        head: the linear module that computes logits; `weight` its weight, `tied` if it is the embedding's too.
    """

    layers: tuple[nn.Module, ...]
    embeddings: dict[str, nn.Embedding]
    embedding: nn.Embedding | None
    head: nn.Module | None
    weight: nn.Parameter | None
    tied: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        visible = dict(_visible_modules(model))
        stacks = [x for x in visible.values() if isinstance(x, (nn.ModuleList, nn.Sequential))]
        stack = max(stacks, key=_size, default=None)
        layers = () if stack is None else tuple(x for x in stack if x in set(visible.values()))
        inside = {id(x) for layer in layers for x in layer.modules()}
        outside = {name: x for name, x in visible.items() if id(x) not in inside}
        embeddings = {name: x for name, x in outside.items() if isinstance(x, nn.Embedding)}
        embedding = _call(model, "get_input_embeddings", embeddings.values()) or next(iter(embeddings.values()), None)
        linears = [x for x in outside.values() if isinstance(x, nn.Linear)]
        head = _call(model, "get_output_embeddings", linears) or (linears[-1] if linears else None)
        weight = getattr(head, "weight", None)
        if weight is None and embedding is not None and hasattr(model, "head_weight"):
            weight = cast(Any, model).head_weight
        tied = weight is not None and weight is getattr(embedding, "weight", None)
        return cls(layers, embeddings, embedding, head, weight, tied)


def _call(model: nn.Module, getter: str, modules: Any) -> Any:
    """Returns the module that a method of transformers' models names, if it is one of `modules`."""
    while hasattr(model, "module") and not hasattr(model, getter):  # DDP
        model = cast(nn.Module, model.module)
    try:
        module = getattr(model, getter)() if hasattr(model, getter) else None
    except NotImplementedError:
        return None
    return module if any(module is x for x in modules) else None


def _visible_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields modules by name, without those inside compiled ones, whose hooks a graph may not run."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return
    yield prefix, module
    if hasattr(module, "_orig_mod"):
        return
    for name, child in module.named_children():
        yield from _visible_modules(child, f"{prefix}.{name}" if prefix else name)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def find_positions(batch: CheckBatch, ids: Tensor, peers: tuple[int, ...]) -> Tensor | None:
    """Returns the positions [T] of the first common layout whose shard has these ids [B, T]; None without any."""
    length, ranks, rank = batch.ids.shape[1], len(peers), peers.index(dist.get_rank())
    layouts = [SequenceLayout.contiguous(length, ranks), SequenceLayout.striped(length, ranks)]
    # Zigzag on a ring, whose shards a head axis of u ranks cuts.
    widths = [u for u in range(1, ranks + 1) if ranks % u == 0 and length >= 2 * ranks]
    layouts += [SequenceLayout.zigzag(length, ranks // u).refine(u) for u in widths]
    # All tokens on every rank: nothing is sharded.
    for positions in (torch.arange(length), *(layout.positions(rank) for layout in layouts)):
        rows = batch.ids[:, positions].to(ids.device)
        if rows.shape == ids.shape and torch.equal(rows, ids):
            return positions
    return None


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of the cross entropy [n, V] with weight 1, the labels' probabilities [n] and losses [n].

    Tokens without a label have a gradient of 0.
    """
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    has_label = labels != IGNORED
    index = labels.masked_fill(~has_label, 0)[:, None]
    losses = -logs.gather(1, index)[:, 0] * has_label
    gradient = logs.exp().scatter_add(1, index, torch.full_like(index, -1.0, dtype=logs.dtype))
    return gradient * has_label[:, None], (-losses).exp(), losses


def _count(
    tally: LabelTally, direction: Tensor, gradient: Tensor, labels: Tensor, probability: Tensor, loss: Tensor
) -> Tensor:
    """Adds tokens to a tally; returns the weights [n] of their labels.

    Args:
        direction: [n, V] or [n, E], the gradient of a cross entropy with weight 1.
        gradient: as `direction`, the gradient in the step.
    """
    g, d = gradient.to(direction.dtype), direction
    weights = (g * d).sum(1) / d.square().sum(1).clamp_min(1e-300 if d.dtype is torch.float64 else 1e-37)
    misfit = (g - weights[:, None] * d).norm(dim=1) > MISFIT * g.norm(dim=1)
    has_label, has_gradient = labels != IGNORED, g.abs().amax(1) > 0
    sure = has_label & (probability < 1 - CERTAIN)
    tally.labelled += int(has_label.sum())
    tally.lost += int((sure & ~has_gradient).sum())
    tally.extra += int((~has_label & has_gradient).sum())
    tally.other += int((sure & has_gradient & misfit).sum())
    tally.loss += float(loss.double().sum())
    if (seen := weights[sure & has_gradient & ~misfit]).numel():
        tally.weight_sum += float(seen.double().sum())
        tally.weight_count += seen.numel()
        tally.weight_min = min(tally.weight_min, float(seen.min()))
        tally.weight_max = max(tally.weight_max, float(seen.max()))
    return weights


def _range(x: Tensor) -> tuple[int, int]:
    return int(x.min()), int(x.max())


def _projections(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns random vectors [PROJECTIONS, rows] and [PROJECTIONS, columns], the same on every rank."""
    generator = torch.Generator().manual_seed(rows + columns)
    sizes = ((PROJECTIONS, rows), (PROJECTIONS, columns))
    left, right = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return left, right


def _project(x: Any, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns u^T x v for each pair (u, v) of projections, [PROJECTIONS]; of a DTensor, of the whole tensor."""
    if compat.is_dtensor(x):
        from torch.distributed.tensor import DTensor, Replicate

        mesh: Any = x.device_mesh
        copies = [DTensor.from_local(y, mesh, [Replicate()] * mesh.ndim, run_check=False) for y in (rows, columns)]
        rows, columns = (y.to(x.dtype) for y in copies)
        return _full(((rows @ x) * columns).sum(1)).double()
    return ((rows.to(x.dtype) @ x).float() * columns).double().sum(1)


def _full(x: Any) -> Tensor:
    return x.full_tensor() if compat.is_dtensor(x) else x


def _place(parameter: Any) -> str:
    """Returns the coordinates of a DTensor's shard on the axes that shard it; "" for a plain parameter."""
    if not compat.is_dtensor(parameter):
        return ""
    coordinates: Any = parameter.device_mesh.get_coordinate()
    sharded = [str(c) for c, place in zip(coordinates, parameter.placements, strict=True) if not place.is_replicate()]
    return ",".join(sharded)
