"""torch.compile of transformers models on shards: the numbers of eager mode, and no new graph for a new batch."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import pytest
import torch
from tiny_models import build
from torch import Tensor, nn

from armillary.attention import ContextParallel, sequence
from armillary.core.testing import mesh, relative_error

SOURCES = ("one document", "documents", "documents of each row", "padding")


def prepared(name: str, method: str, layers: int) -> tuple[ContextParallel, nn.Module]:
    torch._dynamo.reset()
    cp = ContextParallel(method, mesh(**{method: 2}))
    return cp, cp.prepare(build(name, "eager", num_hidden_layers=layers, pad_token_id=0))


def batch_of(cp: ContextParallel, step: int, source: str) -> tuple[Any, Tensor, AbstractContextManager[Any]]:
    """Returns a batch of another length and other documents at each step, its position ids and its block."""
    length, first = 40 + 7 * step % 24, 5 + step
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(step))
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


def loss_and_gradients(cp: ContextParallel, model: nn.Module, step: int, source: str) -> list[Tensor]:
    batch, position_ids, block = batch_of(cp, step, source)
    inputs = {"input_ids": batch.ids, "position_ids": position_ids, "attention_mask": batch.attention_mask}
    with block:
        loss = model(**batch.inputs | inputs).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients]


def compiled_case(
    name: str, method: str, layers: int, whole_model: bool, sources: tuple[str, ...]
) -> tuple[float, list[int]]:
    """Returns the greatest error of steps against eager mode, and the number of new graphs in each step."""
    cp, model = prepared(name, method, layers)
    eager, graphs = copy.deepcopy(model), list[Any]()

    def counting(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    for module in [model] if whole_model else model.model.layers:
        module.compile(backend=counting, fullgraph=not whole_model)
    error, new_graphs = 0.0, list[int]()
    for step in range(3 * len(sources)):
        earlier, source = len(graphs), sources[step % len(sources)]
        actual, expected = (loss_and_gradients(cp, each, step, source) for each in (model, eager))
        error = max(error, *map(relative_error, actual, expected))
        new_graphs.append(len(graphs) - earlier)
    return error, new_graphs


@pytest.mark.parametrize(
    "case",
    [("llama", "ring", 1, True, ("position ids",)), ("mistral, narrow", "ulysses", 2, False, SOURCES)],
    ids=["model", "layers"],
)
def test_compiled_models_equal_eager_ones_without_a_graph_for_each_batch(worlds, case):
    for error, new_graphs in worlds(2).run(compiled_case, *case):
        assert error < 1e-10
        # The last third has other lengths and documents than before.
        assert sum(new_graphs[-len(new_graphs) // 3 :]) == 0, new_graphs


def results_of_a_compiled_layer() -> tuple[list[float], list[str], list[str]]:
    """Errors of outputs, and the messages of an eager and of a compiled layer for the same wrong arguments."""
    cp, model = prepared("llama", "ring", 1)
    eager = copy.deepcopy(model)
    model.model.layers[0].compile(backend="eager")
    return layer_errors(cp, eager, model), refusals(cp, eager), refusals(cp, model)


def layer_errors(cp: ContextParallel, eager_model: nn.Module, model: nn.Module) -> list[float]:
    """Errors of layers that get the mask function's position ids, then others, then the first ones again.

    The documents of the expected outputs are given to `sequence`.
    """
    eager, layer = eager_model.model.layers[0], model.model.layers[0]
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


def refusals(cp: ContextParallel, model: nn.Module) -> list[str]:
    """Errors for no position ids, and for one token more on one rank."""
    messages = list[str]()
    batch, _, _ = batch_of(cp, 0, "one document")
    one_more = torch.arange(batch.ids.shape[1] + 1)[None]
    longer = torch.cat([batch.ids, batch.ids[:, :1]], 1) if cp.method.shard == 1 else batch.ids
    for inputs in ({"input_ids": batch.ids}, {"input_ids": longer, "position_ids": one_more[:, : longer.shape[1]]}):
        with sequence(layout=batch.layout), pytest.raises(ValueError) as error:
            model(**inputs)
        messages.append(str(error.value))
    return messages


def test_compiled_layers_read_their_own_arguments_and_raise_the_errors_of_eager_ones_on_every_rank(worlds):
    ranks = worlds(2).run(results_of_a_compiled_layer)
    for errors, eager, compiled in ranks:
        assert max(errors) < 1e-12, errors
        assert eager == compiled == ranks[0][1]
