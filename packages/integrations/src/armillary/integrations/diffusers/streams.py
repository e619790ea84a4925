"""Plans of diffusers' transformers, and the streams of tokens that they shard: image and text.

A `Plan` names the tensors to shard and the modules that attend to all tokens. `Streams` are the tokens of one forward:
the piece of each stream that is on this rank, and the layout of the streams as one sequence. `ForwardState` gives them
to the modules of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from armillary.attention import AttentionMask, Method
from armillary.attention.internal import Routing, SequenceContext, method_axes
from armillary.core import SequenceLayout, all_gather
from armillary.core.internal import cut


class Split(NamedTuple):
    """The dim of a tensor that has the tokens of a stream, "image" or "text". A tensor without this dim stays whole."""

    stream: str
    dim: int = -2


IMAGE, TEXT = Split("image"), Split("text")


@dataclass(frozen=True)
class Plan:
    """The sharding of one class of models. Modules are named by patterns, in which `*` matches one part of a name.

    Args:
        attention: modules that attend to all tokens -> their streams, in the order in which a rank concatenates them.
        processors: class names of diffusers' attention processors that call attention once, on these tokens only.
        arguments: module -> its arguments that get whole tensors, which are sharded before its forward; "" is the
            model.
        results: module -> the splits of its results, whole tensors that are sharded after its forward.
        whole_keys: cross-attention modules: every rank has all of their keys and attends without communication.
        text_mask: name of the model's argument that marks padding of the text.
        options: name of the model's argument with options for processors.
        output: the module whose output is gathered from all ranks.
    """

    attention: dict[str, tuple[str, ...]]
    processors: tuple[str, ...]
    arguments: dict[str, dict[str, Split]]
    results: dict[str, tuple[Split, ...]] = field(default_factory=dict[str, tuple[Split, ...]])
    whole_keys: tuple[str, ...] = ()
    text_mask: str | None = None
    options: str = "attention_kwargs"
    output: str = "proj_out"

    @staticmethod
    def of(model: nn.Module) -> Plan:
        """Returns the plan of a model's class, or of the diffusers class whose forward it inherits.

        Raises:
            ValueError: the class has no plan.
        """
        for base in type(model).__mro__:
            # A subclass that overrides forward may use tokens in ways that the plan does not know.
            plan = PLANS.get(base.__name__) if base.__module__.startswith("diffusers.") else None
            if plan is not None and type(model).forward is base.forward:
                return plan
        raise ValueError(
            f"{type(model).__name__} cannot be sharded; of diffusers' transformers, {', '.join(PLANS)} can"
        )


# Plans by the name of diffusers' class.
PLANS = {
    "FluxTransformer2DModel": Plan(
        attention={
            "transformer_blocks.*.attn": ("text", "image"),
            "single_transformer_blocks.*.attn": ("text", "image"),
        },
        processors=("FluxAttnProcessor",),
        arguments={
            "": {
                "hidden_states": IMAGE,
                "img_ids": IMAGE,
                "encoder_hidden_states": TEXT,
                "txt_ids": TEXT,
                "controlnet_block_samples": IMAGE,
                "controlnet_single_block_samples": IMAGE,
            }
        },
        options="joint_attention_kwargs",
    ),
    "QwenImageTransformer2DModel": Plan(
        attention={"transformer_blocks.*.attn": ("text", "image")},
        processors=("QwenDoubleStreamAttnProcessor2_0",),
        arguments={
            "": {"controlnet_block_samples": IMAGE},
            "transformer_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
            "transformer_blocks.*": {"modulate_index": Split("image", -1)},
        },
        results={"pos_embed": (IMAGE, TEXT)},  # rotary embeddings
        text_mask="encoder_hidden_states_mask",
    ),
    "SD3Transformer2DModel": Plan(
        attention={"transformer_blocks.*.attn": ("image", "text"), "transformer_blocks.*.attn2": ("image",)},
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
        arguments={"": {"block_controlnet_hidden_states": IMAGE}},
        results={"pos_embed": (IMAGE,), "context_embedder": (TEXT,)},
        options="joint_attention_kwargs",
    ),
    "WanTransformer3DModel": Plan(
        attention={"blocks.*.attn1": ("image",)},
        processors=("WanAttnProcessor",),
        arguments={"": {"timestep": Split("image", 1)}, "blocks.0": {"hidden_states": IMAGE}},
        results={"rope": (Split("image", 1), Split("image", 1))},  # cosines and sines
        whole_keys=("blocks.*.attn2",),
    ),
}


def find_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules that a pattern names, with their names. The empty pattern names the model."""
    parts = pattern.split(".") if pattern else []
    modules = [(name.split(".") if name else [], name, module) for name, module in model.named_modules()]
    return [
        (name, module)
        for path, name, module in modules
        if len(path) == len(parts) and all(p in ("*", part) for p, part in zip(parts, path, strict=True))
    ]


def changed_modules(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """Returns the modules that a plan changes, the model itself last."""
    patterns = [pattern for pattern in (*plan.arguments, *plan.results, *plan.attention, plan.output) if pattern]
    return [*(module for pattern in patterns for module in find_modules(model, pattern)), ("", model)]


class Streams:
    """The streams of one forward of a model.

    Args:
        image, text: number of tokens of the whole stream.
        orders: the orders in which modules concatenate streams; see `Plan.attention`.
        text_mask: [B, text], True for visible text, False for padding.
    """

    # Everything is computed here, because compiled graphs only read attributes.
    def __init__(
        self, method: Method, image: int, text: int, orders: Iterable[tuple[str, ...]], text_mask: Tensor | None = None
    ) -> None:
        if image < method.shards:
            raise ValueError(f"{image} tokens of the image on {method.shards} ranks: each needs at least one")
        if text_mask is not None and text_mask.shape[-1] != text:
            raise ValueError(f"a mask {tuple(text_mask.shape)} for {text} tokens of the text: lengths must be equal")
        # 1. The tokens of each stream on this rank, and the number of the image's tokens on each rank. Layers of some
        # models fail on no tokens (a reshape whose -1 is ambiguous), so a text with fewer tokens than ranks is padded.
        self.method, self.lengths = method, {"image": image, "text": text}
        self.padded_lengths = {"image": image, "text": max(text, method.shards)}
        pieces = cut_streams(*self.padded_lengths.values(), method.shards)
        self.image_sizes = [len(piece) for piece in pieces["image"]]
        self.local_pieces = {stream: ranks[method.shard] for stream, ranks in pieces.items()}
        # 2. For each order of the streams, layout and documents of one sequence.
        visible = [text] if text_mask is None else visible_text(text_mask)
        self.contexts = {order: self._context(order, visible) for order in orders}

    def _context(self, order: tuple[str, ...], visible: list[int]) -> SequenceContext:
        """Returns layout and documents of the streams in `order` as one sequence.

        Args:
            visible: number of visible tokens of the text in each row, or in all rows.
        """
        image, text = self.padded_lengths["image"], self.padded_lengths["text"] if "text" in order else 0
        layout = joint_layout(image, text, order, self.method.shards)
        if not text or min(visible) == text:
            return SequenceContext(layout)
        # Text has the last positions, so that its padding is one more document at the end, which no other token sees.
        rows = [(0, image + count, image + text) if count < text else (0, image + text) for count in visible]
        return SequenceContext(layout, AttentionMask(documents=rows if len(rows) > 1 else rows[0]).documents)

    def take(self, split: Split, value: Any) -> Any:
        """Returns this rank's piece of a whole tensor, or of each tensor in a nested value."""
        return pytree.tree_map_only(Tensor, lambda x: self._piece(split, x), value)

    def _piece(self, split: Split, x: Tensor) -> Tensor:
        if not -x.ndim <= split.dim < x.ndim:
            return x
        if x.shape[split.dim] != self.lengths[split.stream]:
            raise ValueError(
                f"a tensor {tuple(x.shape)} with {x.shape[split.dim]} tokens of the {split.stream}, which has "
                f"{self.lengths[split.stream]}: tensors must be whole on every rank"
            )
        if padding := self.padded_lengths[split.stream] - x.shape[split.dim]:
            x = pad(x.movedim(split.dim, -1), (0, padding)).movedim(-1, split.dim)
        piece = self.local_pieces[split.stream]
        return x.narrow(split.dim, piece.start, len(piece)).clone()  # a view would keep the whole tensor alive

    def gather(self, x: Tensor, dim: int = -2) -> Tensor:
        """Gathers the image: [..., T, C] of this rank -> [..., N, C] on every rank. Gradients are summed over ranks.

        Bytes sent: those of `all_gather`, and in backward of `reduce_scatter`, on each axis of the method.
        """
        # Every rank computes the loss of the whole output, so the sum is P times the gradient of one loss. Averaged
        # over P ranks, gradients of parameters are those of one rank with whole images.
        sizes, shard = self.image_sizes, self.method.shard
        if x.shape[dim] != sizes[shard]:
            raise ValueError(f"the model returned {x.shape[dim]} tokens of the image; this rank has {sizes[shard]}")
        # Axis by axis, innermost first: ranks of the innermost axis have adjacent pieces, which become one piece of the
        # next axis.
        for axis in method_axes(self.method):
            # `sizes` has consecutive groups of `axis.size` pieces; takes the sizes of this rank's group.
            group_sizes = sizes[shard // axis.size * axis.size :][: axis.size]
            x = all_gather(x, axis, sizes=group_sizes, dim=dim % x.ndim)
            sizes = [sum(sizes[i : i + axis.size]) for i in range(0, len(sizes), axis.size)]
            shard //= axis.size
        return x


@lru_cache(maxsize=256)
def cut_streams(image: int, text: int, shards: int) -> dict[str, list[range]]:
    """Returns each rank's tokens of image and text, at least one of a stream that has `shards` or more tokens."""
    # The image is cut evenly, and each rank gets as much text as makes its total that of an even cut of all tokens.
    # Totals differ by at most one, and a head axis divides a sequence into the same sizes.
    image_pieces = cut(range(image), shards)
    text_sizes = [
        len(both) - len(piece) for both, piece in zip(cut(range(image + text), shards), image_pieces, strict=True)
    ]
    ends = list(accumulate(text_sizes, initial=0))
    return {"image": image_pieces, "text": [range(*ends[shard : shard + 2]) for shard in range(shards)]}


@lru_cache(maxsize=256)
def joint_layout(image: int, text: int, order: tuple[str, ...], shards: int) -> SequenceLayout:
    """Returns the layout of a sequence of image, then text. Each rank has its pieces of them in `order`."""
    pieces, offsets = cut_streams(image, text, shards), {"image": 0, "text": image}
    runs = ([(offsets[stream], pieces[stream][shard]) for stream in order] for shard in range(shards))
    return SequenceLayout([[range(offset + run.start, offset + run.stop) for offset, run in shard] for shard in runs])


def visible_text(mask: Tensor) -> list[int]:
    """Returns the number of visible tokens in each row of a mask [B, N]."""
    visible = mask.bool()
    counts = visible.long().sum(-1)
    leading = torch.arange(mask.shape[-1], device=mask.device) < counts[:, None]
    if not bool((leading == visible).all()):
        raise ValueError(
            f"a mask {tuple(mask.shape)} that hides text before text that is visible: pad on the right, so that each "
            "row is ones and then zeros"
        )
    return counts.tolist()


class ForwardState:
    """State that the modules of one model share: the streams of the forward that runs or is recomputed."""

    def __init__(self, method: Method) -> None:
        # True once ranks have compared their trained parameters.
        self.method, self.compared_weights = method, False
        self._streams: Streams | None = None

    @contextmanager
    def running(self, streams: Streams | None) -> Generator[None]:
        # Backward recomputes blocks of one forward while another may run, so the outer streams are restored.
        outer, self._streams = self._streams, streams
        try:
            yield
        finally:
            self._streams = outer

    def streams(self) -> Streams:
        """Returns the streams of the running forward; raises ValueError if none is running."""
        if self._streams is None:
            raise ValueError(
                "a part of the model runs outside of the model's forward, so its tokens cannot be sharded; call the "
                "whole model, and recompute activations by model.enable_gradient_checkpointing()"
            )
        return self._streams


class JointRouting(Routing):
    """Routes the attention of one module over all tokens of its streams."""

    def __init__(self, state: ForwardState, order: tuple[str, ...]) -> None:
        super().__init__(state.method)
        self.state, self.order = state, order

    def sequence_context(self) -> SequenceContext:
        return self.state.streams().contexts[self.order]


def keep_streams(checkpoint: Callable[..., Any], state: ForwardState) -> Callable[..., Any]:
    """Wraps a checkpointing function of diffusers, so that backward recomputes a block with the streams of forward."""

    def checkpoint_block(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(_BlockWithStreams(block, state, state.streams()), *args, **kwargs)

    setattr(checkpoint_block, KEEPS_STREAMS, True)
    return checkpoint_block


# Attribute of a checkpointing function that is wrapped already.
KEEPS_STREAMS = "armillary_keeps_streams"


class _BlockWithStreams:
    # A class, because diffusers calls `block.__call__`.

    def __init__(self, block: Callable[..., Any], state: ForwardState, streams: Streams) -> None:
        self.block, self.state, self.streams = block, state, streams

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.state.running(self.streams):
            return self.block(*args, **kwargs)
