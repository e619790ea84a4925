"""Losses and outputs of a model of transformers on a shard of the sequence.

- The loss that a model computes from a shard's labels is right as a sum over tokens, divided by the number of labels on
  all ranks: `checked_loss` refuses other losses, and `check_outputs` refuses a loss to which a model has added terms.
- Outputs with one value per row, such as a reward or a class: a head that takes one token, or the mean of tokens, takes
  it from its shard, and each rank returns something else. `score_row_ends` makes scores of a row's last token right on
  every rank; `check_outputs` refuses all other such outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from inspect import currentframe, getsource, signature, unwrap
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from armillary.attention import Method
from armillary.attention.internal import current_sequence, gather_integers, method_axes, over_all_ranks, sum_over_axes
from armillary.core import SequenceLayout
from armillary.core.internal import compat
from armillary.integrations.transformers.models import is_model, method_of, parts_of, selects_tokens

# Losses.

# Matches `labels[..., 1:]` in the forward of a model that shifts labels itself.
SHIFTED_LABELS = re.compile(r"labels\[[^\]]*\b1 ?:")

# Attribute of a loss that `checked_loss` has returned: its state then.
CHECKED = "armillary_checked"

ROUTER_LOSS_ERROR = (
    "output_router_logits=True: the routers' auxiliary loss is not linear in the tokens, so losses of shards do not "
    "add up to that of the sequence; set it to False (router_aux_loss_coef=0.0 in TRL's config)"
)


def computes_loss(model: type) -> bool:
    """Returns True if a class computes its loss without transformers' loss function, as Whisper's decoder does."""
    try:
        source = getsource(unwrap(model.forward))
    except (OSError, TypeError):
        return False
    return "labels" in source and "loss_function" not in source and not scores_row_ends(model)


def predicts_next_token(model: nn.Module) -> bool:
    """Returns False if the labels of a model are not those of the next tokens: masked LMs, classification of tokens."""
    # Wrappers such as PEFT's have no loss of their own.
    inner: Any = next(filter(is_model, model.modules()), None)
    forward = None if inner is None else unwrap(type(inner).forward)
    code = getattr(forward, "__code__", None)
    names: tuple[str, ...] = () if code is None else (*code.co_varnames, *code.co_names)
    if forward is None or "labels" not in names or not any("loss" in name for name in names):
        return True  # a model without a loss
    # `loss_type` decides, by which transformers selects a loss function, or the source of a model that has its own.
    if computes_loss(type(inner)):
        return SHIFTED_LABELS.search(getsource(forward)) is not None
    function = import_module("transformers.loss.loss_utils").LOSS_MAPPING.get(getattr(inner, "loss_type", None))
    return function is None or "shift_labels" in signature(function).parameters  # None: the loss of the next token


def checked_loss(function: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a model's own loss. Raises ValueError unless losses of shards add up to the loss of the sequence."""
    if scores_row_ends(type(model)):
        return function(*args, **kwargs)  # from scores and labels of whole rows
    if "shift_labels" not in signature(function).parameters:
        raise ValueError(
            f"{getattr(function, '__name__', function)} takes no shift_labels: a shard has labels only for a loss of "
            "the next token"
        )
    missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
    if missing:
        raise ValueError(
            f"the loss of a shard needs {' and '.join(missing)}: labels are shifted before they are sharded, and the "
            "sum of losses is divided by the count of all ranks. `cp.shard(ids).inputs` has both"
        )
    if any(getattr(part, "output_router_logits", False) for part in parts_of(model.config)):
        raise ValueError(ROUTER_LOSS_ERROR)
    loss = function(*args, **kwargs)
    setattr(loss, CHECKED, _state(loss))
    return loss


def _is_checked(loss: Tensor) -> bool:
    """Returns True for a loss that `checked_loss` has returned, and to which nothing was added since."""
    # `loss + term` is another tensor, `loss += term` the same one in another state.
    return hasattr(loss, CHECKED) and bool(getattr(loss, CHECKED) == _state(loss))


def _state(x: Tensor) -> Any:
    return x.clone() if x.is_inference() else x._version  # inference tensors count no versions


# Scores of a row's last token.

# Variable of transformers' sequence classifiers: the index of the last token of each row that is no padding.
LAST_TOKEN = "last_non_pad_token"

# Attribute of a classifier's head during a forward, by which `find_row_ends` tells `score_row_ends` where rows end. The
# head keeps its hook when it is copied.
ROW_ENDS = "armillary_row_ends"


def scores_row_ends(model: type) -> bool:
    """Returns True if a class of models scores all tokens and returns the score of each row's last one."""
    return _forward_of_classifier(model) is not None


def _forward_of_classifier(model: type) -> CodeType | None:
    """Returns the code of the forward that picks each row's last token, which a class may inherit; None without one."""
    forwards = (unwrap(vars(base)["forward"]) for base in model.__mro__ if "forward" in vars(base))
    codes = (forward.__code__ for forward in forwards if hasattr(forward, "__code__"))
    return next((code for code in codes if LAST_TOKEN in code.co_varnames), None)


@compat.never_traced  # it communicates
def find_row_ends(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model on shards: tells a classifier's head where each row ends.

    A row ends with its last token that is no padding: that `attention_mask` does not hide and whose id is not the
    config's pad_token_id. transformers reads ids alone, and without pad_token_id scores the last token of all.

    Bytes sent: for a classifier, a `gather_integers` of B integers. Every rank of the method must call it.

    Raises:
        ValueError: `logits_to_keep`; a head that selects other tokens; labels of tokens for a classifier; shards
            without tokens; rows with padding, of which neither an attention_mask nor an id tells. All but the last on
            several ranks only.
    """
    method = method_of(model.config)
    if method is None:
        return
    call = signature(model.forward).bind_partial(*args, **kwargs).arguments
    call = {**call, **call.get("kwargs", {})}
    context, layout = current_sequence(), _current_layout(method)
    keep = call.get("logits_to_keep")
    if method.shards > 1 and (isinstance(keep, Tensor) or keep):
        counts = None if layout is None else (layout.sizes[method.shard], layout.length)
        tokens = " " if counts is None else f" {counts[0]} tokens of this shard, not the {counts[1]} "
        raise ValueError(
            f"logits_to_keep={keep} would select from the{tokens}of the sequence: leave it out, and select from "
            "batch.gather(logits)"
        )
    code = _forward_of_classifier(type(model))
    if code is None:
        # Without a head, selected tokens are outputs of rows, which `check_outputs` sees.
        if method.shards > 1 and model.base_model is not model and selects_tokens(type(model)):
            raise ValueError(
                f"{type(model).__name__} selects tokens of a row for its outputs, among those of each shard only; such "
                "a model cannot be sharded"
            )
        return
    if method.shards > 1 and call.get("shift_labels") is not None:
        raise ValueError(
            f"{type(model).__name__} was given labels {list(call['shift_labels'].shape)} of tokens; it takes one per "
            "row: after cp.prepare(model), model(**batch.inputs, labels=labels). Its loss is then that of whole rows "
            "on every rank: call backward on it, without cp.loss"
        )
    if context is None or layout is None:  # on several ranks, attention will raise
        return
    if not min(layout.sizes):
        raise ValueError(
            f"{layout} has shards without tokens, which {type(model).__name__} cannot score: use less ranks"
        )
    # 1. The last token of each row.
    ids = call.get("input_ids")
    inputs = call["inputs_embeds"] if ids is None else ids
    masks = [x for x in (context.attention_mask, call.get("attention_mask")) if isinstance(x, Tensor)]
    padding: int | None = model.config.get_text_config().pad_token_id
    if context.padded and not masks and (ids is None or padding is None):
        raise ValueError(
            f"{type(model).__name__} cannot tell the padding of rows, whose last token it scores: pass attention_mask, "
            "or input_ids, with pad_token_id in the config"
        )
    visible = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    if masks and masks[0].shape == visible.shape:  # attention refuses masks of other shapes
        visible &= masks[0].to(inputs.device) != 0
    if ids is not None and padding is not None:
        visible &= ids != padding
    positions = layout.positions(method.shard).to(inputs.device)
    local_ends = torch.where(visible, positions, 0).amax(1)
    ends = torch.tensor(gather_integers([local_ends.tolist()], method), device=inputs.device).amax(0)
    matches = positions == ends[:, None]
    # 2. The head: the module of the classifier's forward that scores tokens.
    label_count: int = model.config.num_labels
    modules = [getattr(model, name, None) for name in code.co_names]
    heads: list[Any] = [module for module in modules if getattr(module, "out_features", None) == label_count]
    if len(heads) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(heads)} modules with {label_count} outputs (num_labels), not one"
        )
    # The local index of each row's last token, and whether this rank has it: both [B].
    setattr(heads[0], ROW_ENDS, (method, model, matches.int().argmax(1), matches.any(1)))
    if score_row_ends not in heads[0]._forward_hooks.values():
        heads[0].register_forward_hook(score_row_ends)


def score_row_ends(head: nn.Module, args: tuple[Any, ...], scores: Tensor) -> Tensor:
    """Forward hook of a classifier's head: gives every token [B, T, labels] the score of its row's last token.

    Gradients are multiplied by the number of ranks that share a row, for FSDP2, DDP or
    `ContextParallel.reduce_gradients` to average.

    Bytes sent: an `all_reduce` of [B, labels] on each axis of the method, in forward and in backward.

    Raises:
        ValueError: on every rank, before the sum: FSDP2 or DDP averages gradients over other ranks, as `cp.loss` says.
    """
    row_ends = vars(head).pop(ROW_ENDS, None)
    if row_ends is None:
        return scores
    method, model, indices, is_local = row_ends
    context = current_sequence()
    # The model's loss of these scores needs no `cp.loss`, which would check the average.
    if context is not None and method.shards > 1:
        context.check_averaging(scores, method, model)
    local = scores[torch.arange(len(scores), device=scores.device), indices]
    # The rank that has a row's last token contributes its score, other ranks zeros.
    local = local.masked_fill(~is_local[:, None], 0)
    # Whichever token of its shard the model then picks, it gets the right score.
    return sum_over_axes(local, method_axes(method))[:, None].expand_as(scores)


# Outputs.


@compat.never_traced  # it communicates
def check_outputs(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    """Forward hook of a model on several ranks: refuses outputs that are this rank's alone, also as terms of its loss.

    Bytes sent, if the model was given images or other features and returns such outputs: a `gather_integers` of three
    integers for each.

    Raises:
        ValueError: on every rank, with the output's name; FSDP2 or DDP averages gradients of scores over other ranks.
    """
    method, context = method_of(model.config), current_sequence()
    if method is None or method.shards == 1:
        return
    layout = _current_layout(method)
    if context is None or layout is None or _is_part_of_a_call(model):
        return
    tokens, name = layout.sizes[method.shard], type(model).__name__
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    candidates = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *inputs)
    row_count = next((len(x) for x in candidates if x is not None), 0)
    # TRL's fused head computes a sum over shifted labels, which TRL divides by num_items_in_batch or does not use.
    loss_is_users = hasattr(model, "_loss_function") or bool(kwargs.get("fused_lm_head"))
    # Scores of rows and their loss are those of whole rows on every rank.
    right_shapes = [(), (row_count, model.config.num_labels)] if scores_row_ends(type(model)) else []
    rows: dict[str, Tensor] = {}
    # An output is right if it has one value per token of this shard, if it is a loss that `checked_loss` has checked,
    # or if it does not depend on tokens, such as the features of whole images: then ranks have the same one.
    for path, x in _tensors("", output):
        if tuple(x.shape) in right_shapes:
            context.check_averaging(x, method, model)  # again, because a compiled model did not check its scores
            continue
        if x.ndim == 0 and x.is_floating_point():
            if not (_is_checked(x) or loss_is_users):
                raise ValueError(
                    f"{name} returns {path}, a number that it computes itself from the {tokens} tokens of this shard, "
                    f"or adds terms to{_coefficients(model.config)}: leave out the labels that it is computed from, "
                    "and compute the loss from the model's outputs"
                )
        elif not _has_tokens(x, row_count, tokens) or _is_per_row(model, output, path, x):
            rows[path] = x
    # Without images or other features, floating-point outputs depend on tokens, even if they are equal in this step.
    has_features = any(x.is_floating_point() and tuple(x.shape[1:2]) != (tokens,) for x in inputs)
    wrong = [path for path, x in rows.items() if x.is_floating_point() and not has_features]
    if rows and not wrong:
        wrong = _differing_outputs(rows, method)
    if wrong:
        raise ValueError(
            f"{name} returns {wrong[0]} {list(rows[wrong[0]].shape)} for {tokens} of the {layout.length} tokens of a "
            "row, so ranks that share a row return different ones: use outputs of tokens [B, T, ...] (batch.gather "
            "gathers them), a *ForSequenceClassification that scores the last token, or add_pooling_layer=False; if "
            "the model has no such option, leave the output out in a forward hook (register_forward_hook(..., "
            "prepend=True))"
        )


def add_output_check(model: Any, first: bool = False) -> None:
    if check_outputs not in model._forward_hooks.values():
        model.register_forward_hook(check_outputs, with_kwargs=True, prepend=first)


def _is_part_of_a_call(model: nn.Module) -> bool:
    """Returns True inside the forward of a model around this one, which may use its outputs or not, and is checked.

    Raises:
        ValueError: the outer model was not prepared, and computes a loss from labels that it was given.
    """
    frame: FrameType | None = currentframe()
    while frame is not None:
        outer: Any = frame.f_locals.get("self") if "forward" in frame.f_code.co_name else None
        if is_model(outer) and outer is not model:
            if check_outputs in outer._forward_hooks.values():
                return True
            # Only a part of the model was prepared. A hook added during a call may run from the next call on.
            if frame.f_locals.get("labels") is not None and computes_loss(type(outer)):
                raise ValueError(
                    f"{type(outer).__name__} was given labels, of which it computes the mean over this shard: leave "
                    "them out, and give its logits to cp.loss"
                )
            add_output_check(outer, first=True)  # before FSDP2's hook, which may cast the loss
        frame = frame.f_back
    return False


def _coefficients(config: Any) -> str:
    """Returns the config's coefficients of losses that are not 0, to be named in an error."""
    fields = [field for part in parts_of(config) for field in vars(part).items()]
    terms = [f"{name}={x}" for name, x in fields if "loss" in name and isinstance(x, float) and x]
    return f" ({', '.join(terms)} in its config)" if terms else ""


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model's output with their names, such as "logits" or "hidden_states[0]"."""
    if isinstance(value, Tensor):
        yield path or "output", value
    elif isinstance(value, Mapping | SimpleNamespace) or is_dataclass(value):
        items: Mapping[str, Any] = value if isinstance(value, Mapping) else vars(value)
        for name, item in items.items():
            yield from _tensors(f"{path}.{name}" if path else str(name), item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(f"{path or 'output'}[{i}]", item)


def _has_tokens(x: Tensor, rows: int, tokens: int) -> bool:
    # [B, T, ...], or [B T, n], as routers return.
    return (x.ndim > 1 and x.shape[1] == tokens) or (x.ndim == 2 and tokens > 1 and x.shape[0] == rows * tokens)


def _is_per_row(model: nn.Module, output: Any, path: str, x: Tensor) -> bool:
    """Returns True for an output [B, n] that transformers declares as one of rows, though n is the number of tokens."""
    if x.ndim != 2 or path not in (getattr(output, "keys", tuple)()):
        return False
    is_width = any(x.shape[1] in parameter.shape for parameter in model.parameters())
    shape = re.search(rf"\b{path} \(.*of shape `\(([^)]*)\)", type(output).__doc__ or "")
    return is_width and shape is not None and "seq" not in shape[1]


def _differing_outputs(rows: Mapping[str, Tensor], method: Method) -> list[str]:
    """Returns the names of outputs that differ between ranks by more than rounding does, the same on every rank."""
    # Ranks compare two weighted sums of each tensor and its norm, float64 as integers.
    fingerprints: list[int] = []
    for x in rows.values():
        values = x.detach().flatten().double().nan_to_num().cpu()
        index = torch.arange(1, len(values) + 1, dtype=torch.float64)
        numbers = torch.stack([values @ index.cos(), values @ (index * 2**0.5).sin(), values.norm()])
        fingerprints += numbers.view(torch.int64).tolist()
    lines = torch.tensor(gather_integers([fingerprints], method)).view(torch.float64).view(-1, len(rows), 3)
    sums, norms = lines[..., :2], lines[..., 2]
    differ = (sums - sums[0]).abs().amax((0, 2)) > 0.01 * norms.amax(0)
    return [path for path, is_wrong in zip(rows, differ.tolist(), strict=True) if is_wrong]


def _current_layout(method: Method) -> SequenceLayout | None:
    """Returns the layout of the `sequence` block around the call over all ranks of a method; None without a block."""
    context = current_sequence()
    return None if context is None or context.layout is None else over_all_ranks(context.layout, method)
