"""Unmodified transformers models on shards: logits and gradients equal one rank's."""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from armillary.attention import ContextParallel, Local, Ring, Ulysses, sdpa_parallel, sequence
from armillary.core import SequenceLayout
from armillary.core.testing import mesh, relative_error
from armillary.integrations import register_transformers

transformers = pytest.importorskip("transformers")

AXES = {"ring": 2, "ulysses": 2}
LENGTH, VOCABULARY = 48, 64
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "num_hidden_layers": 3, "pad_token_id": 0}
SMALL |= {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
IN_FLOAT64 = {"experts_implementation": "eager"}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 1e4}
LONGROPE |= {"original_max_position_embeddings": 44}
MODELS = {
    "llama": ("Llama", {}),
    "mistral, narrow": ("Mistral", {"sliding_window": 5}),
    "mistral, one token": ("Mistral", {"sliding_window": 1}),
    "mistral, wider than a shard": ("Mistral", {"sliding_window": 17}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen3": ("Qwen3", {}),
    # Scaling starts at position 44, which one of the four shards has.
    "llama, dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 44}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 44}),
    "gpt-bigcode, position ids for masks alone": ("GPTBigCode", {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}),
    "qwen2-moe, a window of 0 that no layer has": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16} | IN_FLOAT64,
    ),
    "gemma2": ("Gemma2", {"sliding_window": 6, "layer_types": ALTERNATING, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"sliding_window": 7, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8}),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": 9, "layer_types": ALTERNATING, "num_local_experts": 4} | IN_FLOAT64,
    ),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def usp():
    return Ulysses(mesh(**AXES)["ulysses"], inner=Ring(mesh(**AXES)["ring"]))


def model(name: str, implementation: str, **changes):
    """A tiny model with reproducible random weights, sinks included."""
    family, options = MODELS[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
        **SMALL | options | changes, attn_implementation=implementation
    )
    torch.manual_seed(0)
    built = getattr(transformers, f"{family}ForCausalLM")(config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return built


def tokens(batch: int = 2):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (batch, LENGTH), generator=generator)
    return ids, torch.randn(batch, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)


def restarting(documents):
    """Position ids [1 or rows, LENGTH] that start at 0 in each document."""
    rows = documents if isinstance(documents[0], tuple) else (documents,)
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(r)]) for r in rows])


class InFloat64(TorchFunctionMode):
    """Keeps float64 where models convert to float32: eager softmax and Gemma's norms, whose float32 gradients would be
    summed in another order on shards."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if func is not F.softmax or k != "dtype"})


def on_a_shard(name: str, kind: str, documents, source: str, checkpointed: bool = False, fine: bool = True):
    """Local logits and gradients. `source` is the argument that has the documents."""
    attend = usp()
    register_transformers(attend)
    layout = attend.layout(LENGTH, kind)
    ids, dout = (layout.take(x, attend.shard) for x in tokens())
    position_ids = layout.positions(attend.shard)[None]
    extra = {}
    if source == "restarts":
        position_ids = layout.take(restarting(documents), attend.shard)
    if source == "cu_seq_lens":
        extra = {f"cu_seq_lens_{side}": torch.tensor(documents) for side in "qk"}
    built = model(name, "armillary")
    if checkpointed:
        built.gradient_checkpointing_enable({"use_reentrant": False})
    options = {
        "layout": layout if fine else layout.coarsen(2),
        "documents": documents if source == "sequence" else None,
    }
    with sequence(**options), InFloat64():
        logits = built(ids, position_ids=position_ids, use_cache=False, **extra).logits
    logits.backward(dout)
    return logits.detach(), [p.grad for p in built.parameters()]


def on_one_rank(name: str, documents):
    """Logits and gradients of eager attention, one document at a time."""
    built, (ids, dout) = model(name, "eager"), tokens()
    logits = []
    for row in range(len(ids)):
        ends = documents[row] if documents and isinstance(documents[0], tuple) else documents or (0, LENGTH)
        with InFloat64():
            document_logits = [built(ids[row : row + 1, a:b], use_cache=False).logits for a, b in pairwise(ends)]
        logits.append(torch.cat(document_logits, dim=1))
    logits = torch.cat(logits)
    logits.backward(dout)
    return logits.detach(), [p.grad for p in built.parameters()]


def test_a_layer_may_have_several_sinks_a_head():
    """Two sinks equal one if their exponentials add up to its exponential."""
    register_transformers(Local())
    ids, dout = tokens()
    results = []
    for several in (False, True):
        built = model("gpt-oss", "armillary")
        for layer in built.model.layers if several else ():
            sinks = layer.self_attn.sinks.detach()
            layer.self_attn.sinks = nn.Parameter(torch.stack([sinks + math.log(0.3), sinks + math.log(0.7)]))
        with sequence(layout=Local().layout(LENGTH)), InFloat64():
            logits = built(ids, use_cache=False).logits
        logits.backward(dout)
        sink_gradients = [layer.self_attn.sinks.grad for layer in built.model.layers]
        results.append((logits.detach(), torch.stack(sink_gradients)))
    (logits, gradient), (same, sink_gradients) = results
    assert relative_error(same, logits) < 1e-12
    assert (
        relative_error(sink_gradients, gradient[:, None] * torch.tensor([0.3, 0.7], dtype=torch.float64)[:, None])
        < 1e-10
    )


def results_on_a_shard(todo: list[tuple]):
    return [on_a_shard(*arguments) for arguments in todo]


def errors(worlds, *todo: tuple) -> list[float]:
    """The largest error of logits and gradients for each set of arguments of `on_a_shard`."""
    answers = worlds(4).run(results_on_a_shard, todo)
    return [errors_of(arguments, ranks) for arguments, *ranks in zip(todo, *answers, strict=True)]


def errors_of(arguments: tuple, ranks: list) -> float:
    name, kind, documents, *options = arguments
    expected, gradients = on_one_rank(name, documents)
    outs, local_gradients = zip(*ranks, strict=True)
    logits = getattr(SequenceLayout, kind)(LENGTH, 2).refine(2).join(outs)
    worst = 0.0
    for gradient, *summands in zip(gradients, *local_gradients, strict=True):
        if gradient is None or gradient.norm() < 1e-12:  # e.g. of queries that see one key
            assert not any(summand is not None and summand.norm() > 1e-12 for summand in summands)
        else:
            actual = sum(summand if summand is not None else torch.zeros_like(gradient) for summand in summands)
            worst = max(worst, relative_error(actual, gradient))
    print(f"{name}, {kind}, {options}: logits {relative_error(logits, expected):.1e}, gradients {worst:.1e}")
    return max(relative_error(logits, expected), worst)


# transformers always computes rotary angles in float32, equally on both sides.
TOLERANCE = 1e-9


@pytest.mark.parametrize("some", [list(MODELS)[:5], list(MODELS)[5:]], ids=", ".join)
def test_shards_equal_one_rank(worlds, some):
    actual = errors(worlds, *((name, "zigzag", None, "") for name in some))
    assert max(actual) < TOLERANCE, dict(zip(some, actual, strict=True))


ENDS = (0, 3, 4, 25, 40, LENGTH)
PER_ROW = (ENDS, (0, 12, LENGTH))
PACKED = [
    ("llama", "contiguous", PER_ROW, "restarts"),
    ("gemma3", "striped", ENDS, "restarts"),
    ("gpt-oss", "zigzag", PER_ROW, "restarts"),
    ("llama", "zigzag", PER_ROW, "sequence"),
    ("mistral, wider than a shard", "contiguous", ENDS, "cu_seq_lens"),
    ("gpt-oss", "zigzag", ENDS, "restarts", True, False),  # checkpointed: recomputed outside of `sequence`
    ("gpt-oss", "zigzag", ENDS, "sequence", True, False),
]


def test_packed_rows(worlds):
    """RoPE is relative, so global and restarting positions give equal results."""
    for arguments, error in zip(PACKED, errors(worlds, *PACKED), strict=True):
        assert error < (TOLERANCE if arguments[3] == "restarts" else 1e-5), arguments


# -- losses ---------------------------------------------------------------------------------------------------------


def labels_with_gaps():
    """Labels with gaps; the first shard of a contiguous layout has no labels."""
    ids, _ = tokens(1)
    return ids, ids.masked_fill(torch.arange(LENGTH) % 5 == 3, -100).index_fill(1, torch.arange(14), -100)


def loss_on_a_shard(kind: str, documents, evaluated: bool):
    """Returns (local loss, global loss, gradients averaged over ranks)."""
    attend = usp()
    register_transformers(attend)
    cp = ContextParallel(attend)
    ids, labels = labels_with_gaps()
    batch = cp.shard(ids, labels, documents=documents, layout=attend.layout(LENGTH, kind))
    built = model("llama", "armillary").train(not evaluated)
    with batch, torch.set_grad_enabled(not evaluated), InFloat64():
        local_loss = built(**batch.inputs, use_cache=False).loss
    loss = cp.loss(local_loss, batch)
    if not evaluated:
        loss.backward()
        cp.reduce_gradients(built)
    return local_loss.detach(), loss.detach(), [p.grad for p in built.parameters()]


def loss_on_one_rank(documents):
    """transformers' loss with its collator's labels, which exclude the first token of a document."""
    ids, labels = labels_with_gaps()
    built = model("llama", "eager")
    ends = documents or (0, LENGTH)
    labels[:, list(ends[:-1])] = -100
    with InFloat64():
        logits = torch.cat([built(ids[:, a:b], use_cache=False).logits for a, b in pairwise(ends)], 1)
        loss = built.loss_function(logits, labels, VOCABULARY)
    loss.backward()
    return loss.detach(), [p.grad for p in built.parameters()]


BATCHES = [("zigzag", None), ("contiguous", (0, 3, 20, LENGTH))]


def losses_on_a_shard():
    """Losses of each batch, in training and in evaluation."""
    return [[loss_on_a_shard(*batch, evaluated) for evaluated in (False, True)] for batch in BATCHES]


def test_the_loss_of_a_sharded_batch_equals_one_rank(worlds):
    for (kind, documents), *ranks in zip(BATCHES, *worlds(4).run(losses_on_a_shard), strict=True):
        expected, gradients = loss_on_one_rank(documents)
        local_losses, losses, gradients_of_ranks = zip(*(trained for trained, _ in ranks), strict=True)
        assert kind == "zigzag" or local_losses[0] == 0  # not NaN
        assert relative_error(sum(local_losses), expected) < 1e-12 and relative_error(losses[0], expected) < 1e-12
        for gradient, *of_ranks in zip(gradients, *gradients_of_ranks, strict=True):
            assert all(relative_error(each, gradient) < TOLERANCE for each in of_ranks)
        assert all(torch.equal(loss, losses[0]) for loss in (*losses, *(evaluated[1] for _, evaluated in ranks)))


def test_on_one_rank_the_loss_equals_the_models_loss():
    register_transformers(Local())
    ids, _ = tokens()
    losses = [model("llama", name)(ids, labels=ids).loss for name in ("armillary", "eager")]
    assert relative_error(*losses) < 1e-6
    with ContextParallel(Local()).shard(ids) as batch:
        assert relative_error(model("llama", "armillary")(**batch.inputs).loss, losses[1]) < 1e-6


def test_a_batch_is_shifted_before_it_is_sharded():
    ids = torch.arange(1, 13).reshape(2, 6)
    cp = ContextParallel(Local())
    batch = cp.shard(ids, documents=[[0, 2, 6], [0, 6]])
    assert batch.labels.tolist() == [[2, -100, 4, 5, 6, -100], [8, 9, 10, 11, 12, -100]] and batch.labelled == 9
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3], list(range(6))]
    sharded = cp.shard(ids, position_ids=batch.position_ids)
    assert sharded.documents == batch.documents == ((0, 2, 6), (0, 6)) and torch.equal(sharded.labels, batch.labels)
    late = cp.shard(ids, ids.fill_(-100), position_ids=torch.arange(7, 13)[None], labelled=40)
    assert (late.documents, late.labelled) == ((0, 6), 40) and bool((late.labels == -100).all())
    assert cp.shard(ids, ids).labelled == 1  # a loss of 0 / 1


def test_a_loss_that_is_not_finite_is_returned_unchanged():
    cp = ContextParallel(Local())
    batch = cp.shard(torch.zeros(2, 6, dtype=torch.long))
    assert batch.inputs
    for value in (float("inf"), -float("inf"), float("nan"), 2.0):
        local_loss = torch.tensor(value, requires_grad=True)
        loss = cp.loss(local_loss, batch)
        torch.testing.assert_close(loss.detach(), torch.tensor(value), equal_nan=True, rtol=0, atol=0)
        assert float(torch.autograd.grad(loss, local_loss)[0]) == 1


def loss_over_a_group_of_several_backends() -> float:
    group = dist.new_group(backend="cpu:gloo")  # like init_device_mesh, which starts groups with several backends
    cp = ContextParallel(Ring(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ring",))))
    batch = cp.shard(torch.zeros(2, 6, dtype=torch.long))
    assert batch.inputs
    return float(cp.loss(torch.tensor(1.0), batch))


def test_a_loss_is_summed_over_a_group_with_several_backends(worlds):
    assert worlds(2).run(loss_over_a_group_of_several_backends) == [2, 2]


# -- refusals -------------------------------------------------------------------------------------------------------


def logits_of_positions(case: str):
    """Local logits for position ids that skip or do not start at 0, and for inputs that transformers users pass."""
    attend = usp()
    register_transformers(attend)
    (ids, _), positions = tokens(), torch.arange(LENGTH)
    offsets = {"late": positions + 2, "skipping": positions + 7 * (positions >= 20) + 30 * (positions > 40)}
    rows = torch.stack([positions, positions + LENGTH]) if case == "later rows" else offsets[case][None]
    documents = (0, LENGTH)  # in `rows` alone, transformers would find a document after each position that is skipped
    batch = ContextParallel(attend).shard(ids, position_ids=rows, documents=documents)
    seq_idx = torch.zeros_like(batch.ids, dtype=torch.int32)
    with sequence(layout=batch.layout, documents=documents), InFloat64():
        logits = model("mistral, narrow", "armillary")(**batch.inputs, seq_idx=seq_idx).logits
    return logits.detach(), rows


def logits_at_other_positions():
    return [logits_of_positions(how) for how in ("late", "skipping", "later rows")]


def test_position_ids_may_start_anywhere_and_skip(worlds):
    layout, ones = SequenceLayout.zigzag(LENGTH, 2).refine(2), torch.ones(2, LENGTH)
    built = model("mistral, narrow", "eager")
    for actual in zip(*worlds(4).run(logits_at_other_positions), strict=True):
        with InFloat64():  # without a mask of ones, transformers would take skipped positions for packed rows
            expected = built(tokens()[0], position_ids=actual[0][1], attention_mask=ones).logits
        assert relative_error(layout.join([logits for logits, _ in actual]), expected) < TOLERANCE


def test_only_a_filled_cache_is_refused():
    register_transformers(Local())
    built, (ids, _) = model("llama", "armillary").eval(), tokens()
    with torch.no_grad():
        first = built(ids, use_cache=True)
        assert relative_error(first.logits, model("llama", "sdpa").eval()(ids).logits) < TOLERANCE
        with pytest.raises(ValueError, match="KV cache"):
            built(ids[:, :1], past_key_values=first.past_key_values)


def test_a_mask_of_ones_means_no_padding():
    register_transformers(Local())
    ids, _ = tokens()
    ones = torch.ones_like(ids)
    got = model("gpt-oss", "armillary")(ids, attention_mask=ones).logits
    assert relative_error(got, model("gpt-oss", "eager")(ids, attention_mask=ones).logits) < TOLERANCE


class OwnAttention(nn.Module):
    def forward(self, hidden_states, **_):
        return self.weights(hidden_states) @ hidden_states, None

    def weights(self, x):
        return torch.softmax(x @ x.transpose(1, 2), -1)


def attend_by_interface(module, q, k, v, mask):
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    return attend(module, q, k, v, mask)


class HelpedAttention(OwnAttention):
    """Calls the interface in a function of its file."""

    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, True

    def forward(self, hidden_states, attention_mask=None, **_):
        x = hidden_states[:, None]
        return attend_by_interface(self, x, x, x, attention_mask)[0][:, :, 0], None


def test_a_layer_may_call_the_interface_in_a_helper():
    cp = ContextParallel(Local())
    built = model("llama", "eager")
    for layer in built.model.layers:
        layer.self_attn = HelpedAttention(built.config)
    cp.prepare(built)
    with cp.shard(tokens()[0]) as batch:
        assert built(batch.ids, position_ids=batch.position_ids).logits.isfinite().all()


def test_an_image_tower_may_compute_attention_itself():
    with torch.device("meta"):
        built = transformers.AutoModelForImageTextToText.from_config(transformers.GotOcr2Config())
    assert ContextParallel(Local()).prepare(built) is built


def test_a_convolution_of_one_token_is_accepted():
    register_transformers(Local())
    built = model("llama", "armillary")
    built.model.layers[1].mixer = torch.nn.Conv1d(32, 32, 1)
    assert built(tokens()[0]).logits.isfinite().all()


def test_a_mask_used_by_the_models_code_is_refused():
    register_transformers(Local())
    calls = []

    def change(_module, args, kwargs):
        mask = kwargs["attention_mask"]
        assert not hasattr(mask, "shape") and getattr(mask, "dtype", None) is None
        for use in (lambda: mask[:, :, :1], lambda: torch.zeros(1) + mask, lambda: mask.dtype, lambda: mask.to("cpu")):
            with pytest.raises(ValueError, match="no tensor"):
                use()
            calls.append(use)

    built = model("llama", "armillary")
    built.model.layers[0].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    built(tokens()[0])
    assert len(calls) == 4


def test_sdpa_parallel_refuses_a_layer_without_a_mask_and_restores_the_interface():
    built, (ids, _) = model("mistral, wider than a shard", "sdpa"), tokens()
    alone, q = built(ids).logits, torch.zeros(1, 4, 8, 8)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    attention = functions["sdpa"]
    with pytest.raises(ValueError, match="MistralAttention"), sdpa_parallel(Local()):
        functions["sdpa"](built.model.layers[0].self_attn, q, q, q, None)
    assert functions["sdpa"] is attention
    assert torch.equal(built(ids).logits, alone)


def test_both_integrations_in_one_block():
    register_transformers(Local())
    built, (ids, _) = model("mistral, narrow", "armillary"), tokens()
    q = torch.zeros(1, 4, 8, 8)
    with sdpa_parallel(Local()):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        logits = built(ids).logits
    assert relative_error(logits, model("mistral, narrow", "eager")(ids).logits) < 1e-5


def test_importing_the_package_imports_neither_hosts_nor_the_compiler():
    import subprocess
    import sys

    check = "import sys, armillary.attention.context_parallel, armillary.integrations; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in imported
    heavy = {"diffusers", "transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
    assert not heavy & set(imported)
