"""Observation of a real training step by hooks: no extra forward, and one gather of small numbers over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from armillary.attention import Method
from armillary.attention.internal import IGNORED, AttentionOptions, digests_of, in_backward
from armillary.check.facts import MODULUS, LabelTally, Observation, VerifyReport, judge, tolerance
from armillary.check.layers import POSITION, ModelParts, kinds_of_layers, methods_in
from armillary.check.step import WRAPPERS, CheckBatch, first_tensor
from armillary.core import SequenceLayout
from armillary.core.internal import compat

CHUNK = 1024
"""Tokens whose logits are computed at once where the loss makes none."""
CERTAIN = 1e-3
"""A label whose probability is above 1 - CERTAIN has a gradient that vanishes."""
MISFIT = 0.2
"""Largest part of a token's gradient that is not that of its label's cross entropy, relative to the gradient."""
PROJECTIONS = 4
"""Number of projections of the head's gradient."""
HEAD = "gradient of the head"


@dataclass(frozen=True)
class ShardTokens:
    """The tokens of a rank, as they should reach the model.

    Args:
        ids, labels: [B, T]; labels are shifted, -100 for none.
        position_ids: [B or 1, T].
        positions: [T], global positions of the tokens in the rows.
        length: N, tokens of the rows.
        labelled: number of labels that the loss is averaged over; by default those of the ranks that share the rows.
        rows: digests of the whole rows; None if they are not known.
    """

    ids: Tensor
    labels: Tensor
    position_ids: Tensor
    positions: Tensor
    length: int
    labelled: int | None = None
    rows: tuple[int, ...] | None = None

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

    Every rank of the world must enter the block and call `report`: after the reduction of gradients, before the
    optimizer's step. It adds no forward.

    Args:
        batch: the whole rows, the same on all ranks that share them.
        positions: [T], global positions of this rank's tokens; by default common layouts are tried.
        peers: global ranks that share the rows; by default all.
        method: the method that attends, which the model may get as an argument; by default those that it has.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: CheckBatch | ShardTokens,
        positions: Tensor | None = None,
        peers: Sequence[int] | None = None,
        method: Method | None = None,
    ) -> None:
        self.model: nn.Module = model
        self.batch: CheckBatch | ShardTokens = batch
        self.parts: ModelParts = ModelParts.of(model)
        self._kinds, self._methods = kinds_of_layers(model), methods_in(model) if method is None else [method]
        self.layer: nn.Module | None = None  # the decoder layer that runs
        self.peers: tuple[int, ...] = tuple(range(dist.get_world_size())) if peers is None else tuple(peers)
        self.tokens = batch if isinstance(batch, ShardTokens) else None
        if isinstance(batch, CheckBatch) and positions is not None:
            self.tokens = ShardTokens.of(batch, positions.flatten().cpu())
        if isinstance(batch, ShardTokens):
            length, rows = batch.length, batch.rows
        else:
            length, values = batch.ids.shape[1], (batch.ids, batch.labels, batch.position_ids, batch.documents)
            rows = tuple(digests_of(values, batch.ids.device).tolist())
        self.observation: Observation = Observation(self.peers, length, rows=rows)
        # The first ids and position ids that reach modules, and this rank's part of the head's gradient.
        self.ids: Tensor | None = None
        self.position_ids: Tensor | None = None
        self.head_sum: Tensor | None = None
        self.loss_in_head = False
        self.in_first_forward = True  # of the step; micro-batches after it may have other layouts
        self._handles = list[RemovableHandle]()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        parts, embedding = self.parts, self.parts.embedding
        if any(p.grad is not None for p in self.model.parameters()):
            self.observation.reasons[HEAD] = "gradients were accumulated before the step"
        scales = embedding is not None and type(embedding).forward is not nn.Embedding.forward
        if parts.tied and scales and not hasattr(embedding, "embed_scale"):
            self.observation.reasons[HEAD] = "its weight is also that of an embedding of an unknown kind"
        self._hook(self.model, self._see_model)
        for name, module in parts.embeddings.items():
            if module is embedding:
                self._hook(module, self._see_ids)
            elif POSITION.search(name):
                self._hook(module, lambda inputs, _: self._see_positions({"pos": next(iter(inputs.values()), None)}))
        for i, layer in enumerate(parts.layers):
            self._hook(layer, partial(self._see_layer, i))
            self._handles.append(layer.register_forward_pre_hook(self._enter_layer))
        for method in self._methods:
            method.observer = self._see_call
        if parts.head is not None:
            self._hook(parts.head, self._see_head)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for method in self._methods:
            method.observer = None

    def _hook(self, module: nn.Module, see: Callable[[dict[str, Any], Any], None]) -> None:
        names = list(signature(module.forward).parameters)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Activation checkpointing calls modules again in backward; those calls show nothing new.
            if not in_backward():
                see(dict(zip(names, args, strict=False)) | kwargs, output)

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _see_ids(self, inputs: dict[str, Any], output: Any) -> None:
        ids = compat.local_part(next(iter(inputs.values())))
        if self.ids is None and ids.ndim == 2:  # further calls are those of other micro-batches
            self.ids = ids
            if self.tokens is None and isinstance(self.batch, CheckBatch):
                positions = find_positions(self.batch, ids, self.peers)
                self.tokens = None if positions is None else ShardTokens.of(self.batch, positions)
        if self.parts.tied and output.shape[:-1] != ids.shape:
            self.observation.reasons[HEAD] = "its weight is also that of an embedding that returns other tokens"
        elif self.parts.tied and output.requires_grad:
            output.register_hook(partial(self._add_embedding, ids.flatten()))

    def _enter_layer(self, layer: nn.Module, _: Any) -> None:
        self.layer = layer

    def _see_call(self, options: AttentionOptions) -> None:
        for i, kind in enumerate(self._kinds):
            if kind.layer is self.layer and self.in_first_forward and not in_backward():
                difference = kind.differs(options.mask, options.softcap, self.observation.length)
                name = f"layer {i}"
                self.observation.calls[name] = self.observation.calls.get(name) or difference

    def _see_layer(self, index: int, inputs: dict[str, Any], output: Any) -> None:
        x, self.layer = first_tensor(output), None
        if x is not None and x.ndim == 3 and self.in_first_forward:
            counts = self.observation.layer_tokens
            counts[index] = max(counts.get(index, 0), compat.local_part(x).shape[1])
        self._see_positions(inputs)

    def _see_model(self, inputs: dict[str, Any], output: Any) -> None:
        self._see_positions(inputs)
        self._watch_logits(getattr(output, "logits", output))
        self.in_first_forward = False

    def _see_positions(self, inputs: dict[str, Any]) -> None:
        for name, x in inputs.items():
            is_integer = isinstance(x, Tensor) and x.ndim and not (x.is_floating_point() or x.is_complex())
            if self.position_ids is None and is_integer and POSITION.search(name):
                ids = compat.local_part(x).cpu()
                # Models with several axes of positions have equal ones for text.
                ids = ids[0] if ids.ndim == 3 and bool((ids == ids[:1]).all()) else ids
                self.position_ids = ids.expand(1, -1) if ids.ndim == 1 else ids if ids.ndim == 2 else None

    # -- labels and the head ------------------------------------------------------------------------------------------

    def _watch_logits(self, logits: Any) -> None:
        if isinstance(logits, Tensor) and logits.ndim == 3 and logits.requires_grad and not compat.is_dtensor(logits):
            logits.register_hook(partial(self._tally_logits, logits.detach()))

    def _tally_logits(self, logits: Tensor, gradient: Tensor) -> None:
        labels = self._labels(logits)
        if labels is not None and self.observation.labels is None:
            direction, losses = cross_entropy(logits.flatten(0, 1), labels)
            self._tally(direction, gradient, labels, losses, of_logits=True)

    def _tally(
        self, direction: Tensor, gradient: Tensor, labels: Tensor, losses: Tensor, of_logits: bool = False
    ) -> Tensor:
        tally, weights = tally_labels(direction, gradient.detach().flatten(0, 1), labels, losses, of_logits)
        self.observation.labels = self.observation.labels or tally
        self.observation.dtype = max(self.observation.dtype, gradient.dtype, key=tolerance)
        return weights

    def _labels(self, x: Tensor, labels: Tensor | None = None) -> Tensor | None:
        """Returns the labels [B T] of logits or hidden states, by default the expected ones; None for other tokens."""
        labels = self.tokens.labels if labels is None and self.tokens is not None else labels
        return None if labels is None or labels.shape != x.shape[:2] else labels.flatten().to(x.device)

    def _see_head(self, inputs: dict[str, Any], output: Any) -> None:
        hidden = next(iter(inputs.values()))
        if self.loss_in_head:
            return
        if not isinstance(output, Tensor) or compat.is_dtensor(output) or output.ndim != 3:
            self.observation.reasons[HEAD] = "the head does not return logits [B, T, V]"
        elif output.requires_grad:
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
            expected = self._labels(hidden, labels if self.loss_in_head else None)
            self.loss_in_head = True
            if compat.is_dtensor(weight) or "axis" in options or expected is None:
                self.observation.reasons[HEAD] = "its weight or the tokens are sharded over another axis"
            elif hidden.requires_grad:
                self._watch_hidden(hidden, weight.detach(), expected)
            return function(hidden, weight, labels=labels, **options)

        return observed

    @torch.no_grad()
    def _watch_hidden(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        x = hidden.detach().flatten(0, 1)
        rows, columns = projections(*weight.shape, device=x.device)
        chunks = list[tuple[Tensor, Tensor, Tensor]]()
        for tokens, token_labels in zip(x.split(CHUNK), labels.split(CHUNK), strict=True):
            direction, losses = cross_entropy(tokens @ weight.T.to(x.dtype), token_labels)
            products = (direction.float() @ rows.T) * (tokens.float() @ columns.T)
            chunks.append((direction.to(x.dtype) @ weight.to(x.dtype), losses, products))
        direction, losses, products = map(torch.cat, zip(*chunks, strict=True))

        def see_gradient(gradient: Tensor) -> None:
            weights = self._tally(direction, gradient, labels, losses)
            self._add_products(weights[:, None] * products)

        hidden.register_hook(see_gradient)

    def _add_head(self, hidden: Tensor, gradient: Tensor) -> None:
        g = gradient.detach().flatten(0, 1).float()
        rows, columns = projections(g.shape[1], hidden.shape[1], device=g.device)
        self._add_products((g @ rows.T) * (hidden.float() @ columns.T))

    def _add_embedding(self, ids: Tensor, gradient: Tensor) -> None:
        # A tied weight has a second gradient, that of the embedding.
        embedding, g = cast(nn.Embedding, self.parts.embedding), gradient.detach().flatten(0, 1).float()
        rows, columns = projections(embedding.num_embeddings, g.shape[1], device=g.device)
        trained = ids != (-1 if embedding.padding_idx is None else embedding.padding_idx)
        products = rows.T[ids] * (g @ columns.T) * float(getattr(embedding, "embed_scale", 1.0))
        self._add_products(products[trained])

    def _add_products(self, products: Tensor) -> None:
        total = products.double().sum(0)
        self.head_sum = total if self.head_sum is None else self.head_sum + total

    # -- report -------------------------------------------------------------------------------------------------------

    def report(self, loss: Tensor | float | None = None) -> VerifyReport:
        """Gathers the observations of all ranks; returns the facts, the same on every rank.

        Args:
            loss: the loss that the step reports on this rank, to compare with the mean over all labels.

        Bytes sent: one `all_gather_object` over the world, of about 70 bytes for each parameter.
        """
        return VerifyReport(judge(self.gather(loss)))

    def gather(self, loss: Tensor | float | None = None) -> list[Observation]:
        observation = self.observation
        # Beside ranks with other rows, the loss may be the mean over their labels too.
        if loss is not None and len(self.peers) == dist.get_world_size():
            observation.reported_loss = float(_full(loss.detach() if isinstance(loss, Tensor) else loss))
        if self.tokens is None:
            reason = "the embedding was not observed, or its ids are those of no common layout: give positions"
            observation.reasons |= dict.fromkeys(("share of tokens", "positions", "labels", "loss"), reason)
        else:
            self._compare_tokens(self.tokens)
        self._see_gradients()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, observation)
        return gathered

    def _compare_tokens(self, tokens: ShardTokens) -> None:
        """Compares the ids and position ids that reached modules with those of this rank's tokens."""
        observation, local = self.observation, tokens.positions.long()
        observation.tokens, observation.labelled = len(local), tokens.labelled
        observation.position_sums = (int(local.sum()) % MODULUS, int(local.square().sum()) % MODULUS)
        if self.ids is not None:
            # If their number differs, all tokens count as wrong.
            same_shape, expected = self.ids.shape == tokens.ids.shape, tokens.ids.to(self.ids.device)
            observation.wrong_ids = int((self.ids != expected).sum()) if same_shape else self.ids.numel()
        ids, rows = self.position_ids, tokens.position_ids.cpu()
        if ids is not None and ids.shape[1] == len(local) and (len(ids) == 1 or len(rows) in (1, len(ids))):
            offsets = [ids - expected for expected in (rows, local)]
            observation.position_offsets = [(int(x.min()), int(x.max())) for x in offsets]
            own = torch.arange(len(local))
            observation.positions_restart = torch.equal(ids[0], own) and not torch.equal(local, own)

    @torch.no_grad()
    def _see_gradients(self) -> None:
        observation, head = self.observation, self.parts.weight
        for name, parameter in trainable(self.model):
            gradient = None if parameter.grad is None else compat.local_part(parameter.grad)
            norm = 0.0 if gradient is None else float(gradient.norm(dtype=torch.float64))
            if not norm:
                observation.unused.append(name)
            if gradient is not None:
                observation.gradients[name + _place(parameter)] = (norm, float(gradient.sum(dtype=torch.float64)))
                observation.dtype = max(observation.dtype, gradient.dtype, key=tolerance)
        if head is None or head.grad is None or self.head_sum is None:
            observation.reasons.setdefault(HEAD, "the model's head was not found or not called, or has no gradient")
        elif HEAD not in observation.reasons:
            observation.head_gradient, observation.head_norm = (
                _project(head.grad).tolist(),
                float(_full(head.grad.norm())),
            )
            observation.head_sum = self.head_sum.tolist()


verifying = Proof


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters with gradients, by name without the parts that wrappers add."""
    return [(WRAPPERS.sub("", name), p) for name, p in model.named_parameters() if p.requires_grad]


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


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the cross entropy [n, V] with weight 1 for each label, and the losses [n].

    Both are 0 for tokens without a label.
    """
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    has_label = labels != IGNORED
    index = labels.masked_fill(~has_label, 0)[:, None]
    gradient = logs.exp().scatter_add(1, index, torch.full_like(index, -1.0, dtype=logs.dtype))
    return gradient * has_label[:, None], -logs.gather(1, index)[:, 0] * has_label


def tally_labels(
    direction: Tensor, gradient: Tensor, labels: Tensor, losses: Tensor, of_logits: bool
) -> tuple[LabelTally, Tensor]:
    """Returns the tally of labels, and the weight [n] of each in the loss.

    Args:
        direction: [n, V] or [n, E], the gradient of the cross entropy with weight 1.
        gradient: as `direction`, the gradient in the step.
        of_logits: True if both have a column for each token of the vocabulary.
    """
    g = gradient.to(direction.dtype)
    has_label, has_gradient = labels != IGNORED, g.abs().amax(1) > 0
    sure = has_label & ((-losses).exp() < 1 - CERTAIN)
    weights, misfit = _fit(g, direction)
    unknown = misfit
    if of_logits:
        # The label of a cross entropy is where the gradient is least: is it one of another label?
        one_hot = torch.zeros_like(direction).scatter_(1, labels.masked_fill(~has_label, 0)[:, None], 1.0)
        other = direction + one_hot - torch.zeros_like(direction).scatter_(1, g.argmin(1, keepdim=True), 1.0)
        unknown = misfit & _fit(g, other)[1]
    tally = LabelTally(
        labelled=int(has_label.sum()),
        lost=int((sure & ~has_gradient).sum()),
        extra=int((~has_label & has_gradient).sum()),
        other=int((sure & has_gradient & misfit & ~unknown).sum()),
        unknown=int((sure & has_gradient & unknown).sum()),
        weights=_summary(weights[sure & has_gradient & ~misfit].double()),
        loss=float(losses.double().sum()),
    )
    return tally, weights


def _fit(gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors [n] of gradients that are multiples of directions, and True for those that are not."""
    norms = direction.square().sum(1).clamp_min(torch.finfo(direction.dtype).tiny)
    factors = (gradient * direction).sum(1) / norms
    return factors, (gradient - factors[:, None] * direction).norm(dim=1) > MISFIT * gradient.norm(dim=1)


def _summary(x: Tensor) -> tuple[float, float, float] | None:
    return (float(x.mean()), float(x.min()), float(x.max())) if x.numel() else None


def projections(rows: int, columns: int, device: torch.device) -> list[Tensor]:
    """Returns random vectors [PROJECTIONS, rows] and [PROJECTIONS, columns], the same on every rank."""
    generator = torch.Generator().manual_seed(rows + columns)
    return [torch.randn(PROJECTIONS, size, generator=generator).to(device) for size in (rows, columns)]


def _project(x: Any) -> Tensor:
    """Returns u^T x v for each pair (u, v) of `projections`, [PROJECTIONS]; of a DTensor, of the whole tensor."""
    rows, columns = (y.to(x.dtype) for y in projections(*x.shape, device=compat.local_part(x).device))
    if compat.is_dtensor(x):
        from torch.distributed.tensor import DTensor, Replicate

        copies = [Replicate()] * x.device_mesh.ndim
        rows, columns = (DTensor.from_local(y, x.device_mesh, copies, run_check=False) for y in (rows, columns))
    return _full(((rows @ x) * columns).sum(1)).double()


def _full(x: Any) -> Any:
    return x.full_tensor() if compat.is_dtensor(x) else x


def _place(parameter: Any) -> str:
    """Returns " at " and the coordinates of a DTensor's shard on the axes that shard it; "" for a plain parameter."""
    if not compat.is_dtensor(parameter):
        return ""
    coordinates: Any = parameter.device_mesh.get_coordinate()
    pairs = zip(coordinates, parameter.placements, strict=True)
    return f" at {[coordinate for coordinate, placement in pairs if not placement.is_replicate()]}"
