"""torch.compile of transformers models on shards: the numbers of eager mode, and no new graph for a new batch."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from armillary.attention import ContextParallel, sequence
from armillary.core.testing import mesh, relative_error

transformers = pytest.importorskip("transformers")

VOCABULARY = 64
SMALL = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
SMALL |= {"num_attention_heads": 4, "pad_token_id": 0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MIXED = GROUPED | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
LINEAR = {f"linear_{side}_head_dim": 8 for side in ("key", "value")}
LINEAR |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "one layer": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 7}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", MIXED),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", MIXED | EXPERTS | {"num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}),
    "dynamic rope": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 30},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        GROUPED | EXPERTS | LINEAR | {"num_experts": 4, "moe_intermediate_size": 16},
    ),
}
AXES = {"ring": ("ring",), "ulysses": ("ulysses",), "usp": ("ring", "ulysses")}
SOURCES = ("one document", "documents", "documents of each row", "padding", "position ids")


def built(name: str) -> nn.Module:
    family, config, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, family)(getattr(transformers, config)(**SMALL | options)).double().train()


def prepared(name: str, method: str, ranks: int) -> tuple[ContextParallel, nn.Module]:
    sizes = [ranks] if len(AXES[method]) == 1 else [ranks // 2, 2]
    cp, model = ContextParallel(method, mesh(**dict(zip(AXES[method], sizes, strict=True)))), built(name)
    cp.prepare(model)
    return cp, model


def layers(model: Any) -> nn.ModuleList:
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers


def batch_of(cp: ContextParallel, step: int, source: str) -> tuple[Any, Tensor, AbstractContextManager[Any]]:
    """Returns a batch of another length and other documents at each step, its position ids and its block."""
    length, first = 40 + 7 * step % 24, 5 + step
    ids = torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(step))
    options: dict[str, Any] = {}
    if source == "documents":
        options = {"documents": [0, first, first + 9, length]}
    if source == "documents of each row":
        options = {"documents": [[0, first, length], [0, length]]}
    if source == "padding":
        options = {"attention_mask": torch.ones_like(ids)}
        options["attention_mask"][0, length - first :] = 0
    batch = cp.shard(ids, **options)
    if source != "position ids":
        return batch, batch.position_ids, batch
    restarts = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
    return batch, batch.take(restarts), sequence(layout=batch.layout)


def results(cp: ContextParallel, model: nn.Module, call: Callable[..., Any], step: int, source: str) -> list[Tensor]:
    """Loss and gradients of one step."""
    batch, position_ids, block = batch_of(cp, step, source)
    inputs = {"input_ids": batch.ids, "position_ids": position_ids, "attention_mask": batch.attention_mask}
    if not hasattr(model, "bert"):
        inputs = batch.inputs | inputs
    with block:
        output = call(**inputs)
    loss = output.logits.sin().sum() if output.loss is None else output.loss
    loss.backward()
    # BERT's softmax does not depend on the bias of its keys, whose gradient is rounding errors alone.
    parameters = [p for name, p in model.named_parameters() if not name.endswith("key.bias")]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    model.zero_grad()
    return [loss.detach(), *gradients]


def compiled_case(
    name: str, method: str, part: str, ranks: int, backend: str, sources: tuple[str, ...] = SOURCES
) -> tuple[float, list[int]]:
    """Returns the greatest error of steps against eager mode, and the number of new graphs in each step."""
    torch._dynamo.reset()
    cp, model = prepared(name, method, ranks)
    eager, graphs = copy.deepcopy(model), list[Any]()

    def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    call = torch.compile(model, backend=counting) if part == "torch.compile" else model
    if part == "model":
        model.compile(backend=counting)
    for layer in layers(model) if part.startswith("layers") else ():
        layer.compile(backend=counting, fullgraph=part == "layers, fullgraph")
    # Bidirectional models and layers with a state take no documents from position ids.
    sources = SOURCES[:-1] if name in ("bert", "qwen3-next") else sources
    error, new_graphs = 0.0, list[int]()
    for step in range(3 * len(sources)):
        earlier, source = len(graphs), sources[step % len(sources)]
        pairs = zip(results(cp, model, call, step, source), results(cp, eager, eager, step, source), strict=True)
        error = max(error, *(relative_error(actual, expected) for actual, expected in pairs))
        new_graphs.append(len(graphs) - earlier)
    return error, new_graphs


CASES = [
    ("one layer", "ring", "model", 2, "eager", ("position ids",)),
    ("mistral", "ulysses", "layers, fullgraph", 2, "eager", SOURCES[:-1]),
]
LONG_CASES = [
    ("bert", "ulysses", "torch.compile", 2, "aot_eager"),
    ("mistral", "usp", "layers, fullgraph", 4, "eager"),
]
LONG_CASES += [
    (name, method, part, ranks, "eager")
    for ranks in (2, 4)
    for name in ("llama", "mistral", "gemma3", "gpt-oss", "bert")
    for method in AXES
    for part in ("layers", "model")
]
LONG_CASES += [(name, "usp", "layers", 4, "inductor") for name in ("llama", "gemma3", "gpt-oss", "bert")]
LONG_CASES += [("mistral", "ulysses", "torch.compile", 2, "inductor")]
LONG_CASES += [("gemma3", "ulysses", "layers, fullgraph", 2, "aot_eager")]
LONG_CASES += [
    (name, "ring", part, 2, "eager") for name in ("dynamic rope", "qwen3-next") for part in ("layers", "model")
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)])
def test_compiled_models_equal_eager_ones_without_a_graph_for_each_batch(worlds, case):
    # Norms and RoPE of these models compute in float32, which inductor fuses.
    limit = 1e-5 if case[4] == "inductor" else 1e-10
    for error, new_graphs in worlds(case[3]).run(compiled_case, *case, timeout=600):
        assert error < limit
        # The last third has other lengths and documents than before. transformers replaces the frequencies of dynamic
        # RoPE when a batch crosses the original length, and layers with a state are compiled for a layout.
        assert case[0] in ("dynamic rope", "qwen3-next") or sum(new_graphs[-len(new_graphs) // 3 :]) == 0, new_graphs


def layer_errors() -> list[float]:
    """Errors of layers that get the mask function's position ids, then others, then the first ones again.

    The documents of the expected outputs are given to `sequence`.
    """
    torch._dynamo.reset()
    cp, model = prepared("llama", "ring", 2)
    eager, layer = copy.deepcopy(model.model.layers[0]), model.model.layers[0]
    layer.compile(backend="eager")
    batch, restarts, _ = batch_of(cp, 0, "position ids")
    layout = batch.layout
    ids, boundaries = layout.positions(cp.method.shard)[None], torch.tensor([0, 8, layout.length])
    hidden = torch.randn(2, ids.shape[1], 32, dtype=torch.float64)
    embeddings = model.model.rotary_emb(hidden, position_ids=ids)

    def mask(documents: list[int] | None = None) -> Any:
        with sequence(layout=layout, documents=documents):
            make_mask = import_module("transformers.masking_utils").create_causal_mask
            return make_mask(model.config, hidden, None, None, position_ids=ids)

    def run(layer: Any, mask: Any, position_ids: Tensor, cu_seq_lens: Tensor | None = None) -> Tensor:
        options = {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens, "position_embeddings": embeddings}
        return layer(hidden, attention_mask=mask, position_ids=position_ids, **options)

    errors, layer_mask = list[float](), mask()
    for position_ids, cu_seq_lens, documents in (
        (ids, None, [0, layout.length]),
        (restarts, None, [0, 5, layout.length]),
        (ids, boundaries, [0, 8, layout.length]),
        (ids, None, [0, layout.length]),
    ):
        expected = run(eager, mask(documents), position_ids)
        errors += [relative_error(run(x, layer_mask, position_ids, cu_seq_lens), expected) for x in (eager, layer)]
    return errors


def test_layers_read_position_ids_and_boundaries_of_their_own(worlds):
    for errors in worlds(2).run(layer_errors):
        assert max(errors) < 1e-12, errors


def refusals_when_compiled(part: str) -> list[tuple[str, str]]:
    """Errors of eager and compiled models for the same wrong arguments."""
    pairs = list[tuple[str, str]]()
    torch._dynamo.reset()
    cp, model = prepared("one layer", "ring", 2)
    eager = copy.deepcopy(model)
    for module in layers(model) if part == "layers" else [model]:
        module.compile(backend="eager")
    batch, _, _ = batch_of(cp, 1, "one document")
    one_more = torch.arange(batch.ids.shape[1] + 1)[None]
    longer = torch.cat([batch.ids, batch.ids[:, :1]], 1) if cp.method.shard == 1 else batch.ids
    for inputs in ({"input_ids": batch.ids}, {"input_ids": longer, "position_ids": one_more[:, : longer.shape[1]]}):
        messages = list[str]()
        for call in (eager, model):
            with sequence(layout=batch.layout), pytest.raises(ValueError) as error:
                call(**inputs)
            messages.append(str(error.value))
        pairs.append((messages[0], messages[1]))
    return pairs


@pytest.mark.parametrize("part", ["layers", pytest.param("model", marks=pytest.mark.long)])
def test_compiled_models_raise_the_errors_of_eager_ones_on_every_rank(worlds, part):
    ranks = worlds(2).run(refusals_when_compiled, part)
    assert ranks[0] == ranks[1]
    for eager, compiled in ranks[0]:
        assert eager == compiled
