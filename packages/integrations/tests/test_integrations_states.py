"""Unmodified transformers hybrids on shards: logits and gradients equal those of separate documents on one rank."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from armillary.attention import AttentionMask, ContextParallel, Local, Ring, Ulysses, sequence
from armillary.core.testing import mesh, relative_error
from armillary.integrations import register_transformers

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY = 72, 64
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0}
SMALL |= {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR, FULL = "linear_attention", "full_attention"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
MODELS = {
    "Qwen3Next": DELTA | EXPERTS | {"head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3_5": DELTA | {"head_dim": 8},
    "OlmoHybrid": DELTA | {"linear_num_key_heads": 4},
    "KimiLinear": EXPERTS
    | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_num_heads": 4, "linear_head_dim": 8}
    | {"num_experts": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    | {"v_head_dim": 8, "num_key_value_heads": 4},
    "Lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "Bamba": MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 0},
    "FalconH1": MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 64},
    "NemotronH": {"layers_block_type": [LINEAR, FULL, "mlp", LINEAR], "mamba_num_heads": 4, "mamba_head_dim": 16}
    | {"n_groups": 2, "ssm_state_size": 8, "chunk_size": 16, "head_dim": 8},
    "Zamba2": {"num_hidden_layers": 3, "layers_block_type": [LINEAR, "hybrid", LINEAR], "mamba_d_state": 8}
    | {"n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 2, "chunk_size": 16, "num_key_value_heads": 4},
}
MODELS["Mamba2"] = {"num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2}
MODELS["Mamba2"] |= {"chunk_size": 16}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig"}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def build(family: str, implementation: str):
    """A tiny model with reproducible random weights."""
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
        **SMALL | MODELS[family], attn_implementation=implementation
    )
    torch.manual_seed(0)
    built = getattr(transformers, f"{family}ForCausalLM")(config).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    return built


@contextmanager
def in_float64():
    """Keeps float64 where models convert to float32. Unlike a torch function mode, it also acts in recomputation."""
    tensor, softmax = torch.Tensor, F.softmax
    originals = tensor.float, tensor.to, tensor.type

    def converted(original):
        def convert(x, *args, **kwargs):
            narrows = original is originals[0] or torch.float32 in (*args, *kwargs.values())
            return x if narrows and x.dtype is torch.float64 else original(x, *args, **kwargs)

        return convert

    with pytest.MonkeyPatch.context() as patch:
        for name, original in zip(("float", "to", "type"), originals, strict=True):
            patch.setattr(tensor, name, converted(original))
        patch.setattr(F, "softmax", lambda x, dim=None, dtype=None, **options: softmax(x, dim=dim, **options))
        yield


def tokens():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    return ids, torch.randn(2, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)


METHODS = {
    "ring": lambda: Ring(mesh(ring=4)["ring"]),
    "usp": lambda: Ulysses(mesh(ring=2, ulysses=2)["ulysses"], inner=Ring(mesh(ring=2, ulysses=2)["ring"])),
}
DOCUMENTS = {
    "one": None,
    "each row its own": ((0, 2, 31, 40, LENGTH), (0, 47, LENGTH)),
}


def on_a_shard(family: str, method: str, kind: str, documents, checkpointed: bool):
    """Local logits, and gradients summed over ranks."""
    attend = METHODS[method]()
    register_transformers(attend)
    layout = attend.layout(LENGTH, kind)
    ids, dout = (layout.take(x, attend.shard) for x in tokens())
    built = build(family, "armillary")
    if checkpointed:
        built.gradient_checkpointing_enable({"use_reentrant": False})
    with in_float64():
        with sequence(layout=layout, documents=documents):
            logits = built(ids, position_ids=layout.positions(attend.shard)[None], use_cache=False).logits
        logits.backward(dout)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in built.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return layout.positions(attend.shard), logits.detach(), grads


def on_one_rank(family: str, documents):
    built, (ids, dout) = build(family, "eager"), tokens()
    rows = [(0, LENGTH)] * 2 if documents is None else documents
    logits = []
    for row, ends in enumerate(rows):
        with in_float64():
            document_logits = [built(ids[row : row + 1, a:b], use_cache=False).logits for a, b in pairwise(ends)]
        logits.append(torch.cat(document_logits, dim=1))
    torch.cat(logits).backward(dout)
    return torch.cat(logits).detach(), {name: p.grad for name, p in built.named_parameters()}


CASES = [
    *((family, "ring", "zigzag", "each row its own", True) for family in MODELS),
    *(
        pytest.param(family, "usp", "contiguous", "one", False, marks=[] if family == "Qwen3Next" else pytest.mark.long)
        for family in MODELS
    ),
]


@pytest.mark.parametrize(("family", "method", "kind", "documents", "checkpointed"), CASES)
def test_a_sharded_hybrid_equals_one_rank(worlds, family, method, kind, documents, checkpointed):
    logits, grads = on_one_rank(family, DOCUMENTS[documents])
    ranks = worlds(4).run(on_a_shard, family, method, kind, DOCUMENTS[documents], checkpointed)
    for positions, part, _ in ranks:
        assert relative_error(part, logits[:, positions]) < 1e-9
    for (name, grad), actual in zip(grads.items(), ranks[0][2], strict=True):
        if grad is None or not grad.any():
            assert not actual.any(), name
        else:
            assert relative_error(actual, grad) < 1e-8, name


class HeadWithoutOptions(transformers.Mamba2PreTrainedModel):
    """A user's model whose forward takes no options; its backbone has the same config."""

    def __init__(self, config):
        super().__init__(config)
        self.backbone = transformers.Mamba2Model(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        self.post_init()

    def forward(self, input_ids, position_ids=None):
        return self.lm_head(self.backbone(input_ids)[0])


def build_user_model():
    whole = build("Mamba2", "eager")
    built = HeadWithoutOptions(whole.config).double().train()
    built.load_state_dict(whole.state_dict())
    return built


def prepared_on_a_shard(users: bool):
    """Loss and gradients of a prepared model whose layers are recomputed in backward."""
    cp = ContextParallel("ring", mesh(ring=2))
    built = cp.prepare(build_user_model() if users else build("Mamba2", "eager"))
    built.gradient_checkpointing_enable({"use_reentrant": False})
    with in_float64():
        with cp.shard(tokens()[0], documents=DOCUMENTS["each row its own"]) as batch:
            # Only the options of the backbone tell it the layout.
            output = built(batch.ids, batch.position_ids) if users else built(**batch.inputs, use_cache=False).loss
            loss = cp.loss(output, batch)
        with cp.shard(tokens()[0]) as batch, torch.no_grad():  # other documents, before backward recomputes the layers
            built(batch.ids, position_ids=batch.position_ids)
        loss.backward()
    cp.reduce_gradients(built)
    return float(loss), [p.grad for p in built.parameters()]


@pytest.mark.parametrize("users", [False, True], ids=["Mamba2ForCausalLM", "a head without options"])
def test_a_prepared_model_need_not_pass_options_to_its_backbone(worlds, users):
    documents = DOCUMENTS["each row its own"]
    whole, (ids, _) = build("Mamba2", "eager"), tokens()
    losses = []
    with in_float64():
        for row, ends in enumerate(documents):
            for a, b in pairwise(ends):
                logits = whole(ids[row : row + 1, a:b], use_cache=False).logits
                losses.append(F.cross_entropy(logits[0, :-1], ids[row, a + 1 : b], reduction="sum"))
        count = sum(b - a - 1 for ends in documents for a, b in pairwise(ends))
        loss = sum(losses) / count
        loss.backward()
    for actual, gradients in worlds(2).run(prepared_on_a_shard, users):
        assert abs(actual - loss.item()) < 1e-9 * loss.item()
        for (name, parameter), gradient in zip(whole.named_parameters(), gradients, strict=True):
            assert relative_error(gradient, parameter.grad) < 1e-8, name


def test_documents_restart_states_on_one_rank():
    register_transformers(Local())
    documents = DOCUMENTS["each row its own"]
    (expected, _), ids = on_one_rank("Bamba", documents), tokens()[0]
    with in_float64(), sequence(layout=Local().layout(LENGTH), documents=documents):
        logits = build("Bamba", "armillary")(ids, use_cache=False).logits
    assert relative_error(logits, expected) < 1e-9


TREE = AttentionMask.tree((0, 20, 31, 50, LENGTH), (-1, 0, 1, 0))


def test_a_tree_equals_its_paths():
    register_transformers(Local())
    ids, built = tokens()[0], build("Qwen3Next", "armillary")
    positions = torch.cat([torch.arange(50), torch.arange(20, 42)])
    with in_float64(), sequence(layout=Local().layout(LENGTH), mask=TREE):
        logits = built(ids, position_ids=positions.expand(2, -1), use_cache=False).logits
    alone = build("Qwen3Next", "eager")
    for path in ([(0, 50)], [(0, 20), (50, LENGTH)]):
        tokens_of_path = torch.cat([torch.arange(*run) for run in path])
        with in_float64():
            expected = alone(ids[:, tokens_of_path], use_cache=False).logits
        assert relative_error(logits[:, tokens_of_path], expected) < 1e-9
