"""Unmodified transformers models on shards: outputs and gradients equal those of separate documents on one rank."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tiny_models import (
    LENGTH,
    PADDING,
    STATES,
    VOCABULARY,
    build,
    draw,
    full_inputs,
    in_float64,
    outputs,
    restarting,
    ring,
    tokens,
    usp,
)
from torch import Tensor, nn

from armillary.attention import AttentionMask, ContextParallel, sequence
from armillary.core.testing import relative_error
from armillary.integrations import register_transformers

ENDS = (0, 3, 4, 25, 40, LENGTH)
PER_ROW = (ENDS, (0, 12, LENGTH))
THREE, THREE_PER_ROW = (0, 13, 30, LENGTH), ((0, 20, LENGTH), (0, 3, 33, LENGTH))
UNEVEN = 50
"""Length of rows of which ranks have different numbers of tokens."""
THREE_OF_ROWS = ((0, 11, 33, UNEVEN), (0, UNEVEN))
VISIBLE = (UNEVEN, 37)
"""Tokens of each row before its padding."""


@dataclass(frozen=True)
class Case:
    """A model, a layout, and documents.

    Args:
        ranks: ranks of a ring, or 4 for two rings of two.
        given: source of documents: position ids that restart, arguments of `sequence`, both, or `cu_seq_lens`; or
            "batch" for a model and a batch of `ContextParallel`, whose position ids follow the model's own rule.
        padded: rows are padded on the right.
        fine: False gives a layout of two shards to four ranks.
    """

    name: str
    kind: str = "zigzag"
    documents: tuple | None = None
    given: str = "sequence"
    ranks: int = 2
    checkpointed: bool = False
    padded: bool = False
    fine: bool = True

    @property
    def length(self) -> int:
        return UNEVEN if self.name == "vit" or self.given == "batch" else LENGTH

    @property
    def limits(self) -> tuple[float, float]:
        """Largest errors of outputs and gradients. RoPE's angles are float32, equal if both restart."""
        if self.given == "batch":
            return 1e-12, 1e-12
        if self.name in STATES:
            return 1e-9, 1e-8
        return (1e-9, 1e-9) if self.documents is None or self.given in ("restarts", "both") else (1e-5, 1e-5)


CASES = {
    "causal": [
        *(Case(name, ranks=4) for name in ("llama, dynamic", "gpt-bigcode, position ids for masks alone", "gpt-oss")),
        *(Case(f"mistral, {window}") for window in ("narrow", "no window")),
        *(Case(name) for name in ("phi3, longrope", "qwen2-moe, a window of 0 that no layer has", "gemma2")),
    ],
    "packed": [
        Case("llama", "contiguous", PER_ROW, "restarts"),
        Case("gemma3, text", "striped", ENDS, "restarts"),
        Case("llama", "zigzag", PER_ROW),
        Case("mistral, wider than a shard", "contiguous", ENDS, "cu_seq_lens", ranks=4),
        Case("gpt-oss", "zigzag", ENDS, "restarts", 4, True, fine=False),  # recomputed outside of `sequence`
        Case("gpt-oss", "zigzag", ENDS, ranks=4, checkpointed=True, fine=False),
    ],
    "masks": [
        Case("gemma3", ranks=4),
        Case("gemma3", "striped", THREE, "both"),
        Case("gemma4", "contiguous", ranks=4),
        Case("hrm_text", ranks=4),
        Case("llama4", ranks=4),
        Case("llama4", "contiguous", THREE_PER_ROW, "both"),
        Case("embedding_gemma", ranks=4),
        Case("llama, bidirectional", "contiguous", THREE_PER_ROW, "both"),
        Case("modernbert", "striped", THREE, "both"),
        Case("vit", "contiguous", ranks=4),
        Case("qwen2_vl", ranks=4),
        Case("qwen2_5_vl", "contiguous"),
    ],
    "own position ids": [
        Case("roberta", documents=THREE_OF_ROWS, given="batch", ranks=4),
        Case("roberta", given="batch"),
        Case("roberta", given="batch", padded=True),
        Case("roberta, decoder", given="batch", padded=True, ranks=4),
        *(Case(name, "zigzag", THREE_OF_ROWS, "batch") for name in ("esm", "esm, rotary", "bert")),
    ],
    "own attention": [
        Case("falcon, one key head", documents=THREE_OF_ROWS, given="batch", ranks=4, checkpointed=True),
        Case("gptj", documents=THREE_OF_ROWS, given="batch"),
        Case("codegen", given="batch", padded=True),
        Case("gpt-neox-japanese", given="batch", padded=True),
        Case("megatron-bert", documents=THREE_OF_ROWS, given="batch", ranks=4),
        Case("git", documents=THREE_OF_ROWS, given="batch"),
        # Their embeddings of positions take one position for all rows.
        Case("roformer", documents=(0, 11, 33, UNEVEN), given="batch"),
        Case("mvp", documents=(0, 11, 33, UNEVEN), given="batch", ranks=4, checkpointed=True),
        Case("bart", documents=(0, 11, 33, UNEVEN), given="batch", ranks=4),
        Case("bart", given="batch", padded=True),
    ],
    "states": [
        *(Case(name, "zigzag", ((0, 2, 21, 30, LENGTH), (0, 31, LENGTH)), checkpointed=True) for name in STATES),
        Case("Qwen3Next", "contiguous", ranks=4),
    ],
}


def own_inputs(case: Case, model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the model for whole rows, and 1 for each token [2, N] that is no padding."""
    is_token = torch.ones(2, case.length, dtype=torch.long)
    if case.given != "batch":
        return full_inputs(case.name, model), is_token
    if case.padded:
        is_token = (torch.arange(UNEVEN) < torch.tensor(VISIBLE)[:, None]).long()
    return {"input_ids": tokens(UNEVEN).where(is_token == 1, PADDING), "attention_mask": is_token}, is_token


def on_a_shard(case: Case):
    """Positions and outputs of this rank's tokens, 0 for padding, and on rank 0 the sums of gradients over ranks."""
    attend = usp() if case.ranks == 4 else ring(2)
    register_transformers(attend)
    cp, model = ContextParallel(attend), build(case.name)
    layout = attend.layout(case.length, case.kind)
    positions = layout.positions(attend.shard)
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.given == "batch":
        cp.prepare(model)
    with in_float64():
        inputs, is_token = own_inputs(case, model)
        if case.given == "batch":
            arguments = {"attention_mask": is_token} if case.padded else {}
            block = cp.shard(inputs["input_ids"], layout=layout, documents=case.documents, **arguments)
            names = {"input_ids": "ids", "position_ids": "position_ids", "attention_mask": "attention_mask"}
            inputs = {name: getattr(block, attribute) for name, attribute in names.items()}
        else:
            block = sequence(layout=layout if case.fine else layout.coarsen(2), documents=documents_of(case))
            if case.name == "vit":
                model.embeddings.register_forward_hook(lambda module, inputs, out: layout.take(out, attend.shard))
            else:
                inputs = {name: take_input(layout, attend, x) for name, x in inputs.items()}
            if case.name != "vit" and "position_ids" not in inputs:
                restarts = restarting(case.documents) if case.given in ("restarts", "both") else None
                inputs["position_ids"] = positions[None] if restarts is None else layout.take(restarts, attend.shard)
            if case.given == "cu_seq_lens":
                inputs |= {f"cu_seq_lens_{side}": torch.tensor(case.documents) for side in "qk"}
        with block:
            out = outputs(model, inputs)
        dout = draw(2, case.length, out.shape[-1], seed=4) * is_token[..., None]
        out.backward(layout.take(dout, attend.shard))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
    out = out.detach() * layout.take(is_token, attend.shard)[..., None]
    return positions, out, gradients if dist.get_rank() == 0 else []


def documents_of(case: Case):
    return case.documents if case.given in ("sequence", "both") else None


def take_input(layout, attend, x: Tensor) -> Tensor:
    """The shard of an input; position ids in images are [3, B, N]."""
    return layout.take(x, attend.shard, dim=2 if x.ndim == 3 and x.shape[0] == 3 else 1)


def on_one_rank(case: Case) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Outputs and gradients of eager attention, one document at a time; the model counts positions itself."""
    model = build(case.name, "eager")
    with in_float64():
        inputs, is_token = own_inputs(case, model)
        if case.documents is None:
            out = outputs(model, inputs)
        else:
            rows = case.documents if isinstance(case.documents[0], tuple) else (case.documents,) * 2
            out = torch.cat([outputs_of_documents(case, model, inputs, row, ends) for row, ends in enumerate(rows)])
        out.backward(draw(*out.shape, seed=4) * is_token[..., None])
    return out.detach() * is_token[..., None], {name: p.grad for name, p in model.named_parameters()}


def outputs_of_documents(case: Case, model: nn.Module, inputs: dict[str, Tensor], row: int, ends) -> Tensor:
    inputs = {name: x[row : row + 1] for name, x in inputs.items()}
    if case.name == "llama4":  # scales queries by their position in the row
        return outputs(model, inputs | {"position_ids": restarting(ends)})
    return torch.cat([outputs(model, {name: x[:, a:b] for name, x in inputs.items()}) for a, b in pairwise(ends)], 1)


def results(cases: list[Case]):
    return [on_a_shard(case) for case in cases]


@pytest.mark.parametrize("group", CASES)
def test_shards_equal_one_rank(worlds, group):
    for ranks in (2, 4):
        cases = [case for case in CASES[group] if case.ranks == ranks]
        for case, *answers in zip(cases, *worlds(ranks).run(results, cases), strict=True):
            expected, gradients = on_one_rank(case)
            out = torch.full_like(expected, torch.nan)
            for positions, shard, _ in answers:
                out[:, positions] = shard
            assert relative_error(out, expected) < case.limits[0], case
            for (name, gradient), total in zip(gradients.items(), answers[0][2], strict=True):
                if gradient is None or gradient.norm() < 1e-11:  # e.g. of key biases, whose local gradients cancel
                    assert total.norm() < 1e-11, (case, name)
                else:
                    assert relative_error(total, gradient) < case.limits[1], (case, name)


# -- explicit masks ---------------------------------------------------------------------------------------------------

TREE = AttentionMask.tree((0, 11, 20, 33, LENGTH), (-1, 0, 0, 2))


def results_of_a_tree():
    """Local logits and gradients of completions of one prompt, in layers with a window."""
    attend = usp()
    register_transformers(attend)
    layout, model = attend.layout(LENGTH), build("mistral, narrow")
    inputs = {"input_ids": tokens(), "position_ids": TREE.positions(LENGTH)[None]}
    with sequence(layout=layout, mask=TREE), in_float64():
        out = outputs(model, {name: layout.take(x, attend.shard) for name, x in inputs.items()})
        out.backward(layout.take(draw(2, LENGTH, VOCABULARY), attend.shard))
    return layout.positions(attend.shard), out.detach(), [p.grad for p in model.parameters()]


def test_an_explicit_mask_is_used_with_the_window_of_each_layer(worlds):
    model, positions = build("mistral, narrow", "eager"), torch.arange(LENGTH)
    hidden = ~TREE.narrow(4).visible(positions, positions)  # windows count along the path
    added = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    with in_float64():
        inputs = {"input_ids": tokens(), "position_ids": TREE.positions(LENGTH)[None], "attention_mask": added}
        expected = outputs(model, inputs)
        expected.backward(draw(2, LENGTH, VOCABULARY))
    ranks = worlds(4).run(results_of_a_tree)
    for shard, out, _ in ranks:
        assert relative_error(out, expected[:, shard].detach()) < 1e-9
    for parameter, *summands in zip(model.parameters(), *(gradients for _, _, gradients in ranks), strict=True):
        assert relative_error(sum(summands), parameter.grad) < 1e-9


def logits_of_positions():
    """Local logits for position ids that start late, skip, or differ by row, and of text with [1, T] and [3, 1, T]."""
    attend = usp()
    register_transformers(attend)
    positions, documents, results = torch.arange(LENGTH), (0, LENGTH), []
    for rows in (
        (positions + 2)[None],
        (positions + 7 * (positions >= 20) + 30 * (positions > 40))[None],
        torch.stack([positions, positions + LENGTH]),
    ):
        # From `rows` alone, transformers would find a document after each position that is skipped.
        batch = ContextParallel(attend).shard(tokens(), position_ids=rows, documents=documents)
        seq_idx = torch.zeros_like(batch.ids, dtype=torch.int32)
        with sequence(layout=batch.layout, documents=documents), in_float64():
            logits = build("mistral, narrow")(**batch.inputs, seq_idx=seq_idx).logits
        results.append(("mistral, narrow", rows, logits.detach()))
    layout, model = attend.layout(LENGTH), build("qwen2_vl")
    local = layout.positions(attend.shard)[None]
    for position_ids in (local, local.expand(3, 2, -1)):
        with sequence(layout=layout), in_float64():
            inputs = {"input_ids": layout.take(tokens(), attend.shard), "position_ids": position_ids}
            results.append(("qwen2_vl", None, outputs(model, inputs).detach()))
    return layout.positions(attend.shard), results


def test_position_ids_may_start_anywhere_and_skip_and_text_needs_one_per_token(worlds):
    shards, ranks = zip(*worlds(4).run(logits_of_positions), strict=True)
    for results_of_ranks in zip(*ranks, strict=True):
        name, rows, _ = results_of_ranks[0]
        # Without a mask of ones, transformers would take skipped positions for packed rows.
        options = {} if rows is None else {"position_ids": rows, "attention_mask": torch.ones(2, LENGTH)}
        with in_float64():
            expected = outputs(build(name, "eager"), {"input_ids": tokens()} | options)
        for shard, (_, _, logits) in zip(shards, results_of_ranks, strict=True):
            assert relative_error(logits, expected[:, shard]) < 1e-9, (name, rows)
