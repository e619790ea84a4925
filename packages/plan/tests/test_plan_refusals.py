"""Wrong arguments, flags and files: each is refused by its name and value, a command's in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.core.testing import refusal
from armillary.models import GPTConfig, LlamaConfig
from armillary.models.hub.configs import FAMILIES
from armillary.models.internal import describe
from armillary.plan import Cluster, Link
from armillary.plan import tune as tuner
from armillary.plan.cli import main as plan
from armillary.plan.memory import Job, estimate

# A cluster's file that differs from a preset, and the words in the error.
CLUSTERS = [
    ("nodes = 2", "ranks_per_node", "accelerator"),
    ("nodes = ",),
    ("like = '8xb9000'", "8xb9000", "8xh100"),
    ("like = 3", "like = 3"),
    *(
        (f"like = '8xh100'\n{text}", *words)
        for text, *words in (
            ("node = 2", "node", "ranks_per_node"),
            ("nodes = 0", "nodes = 0", "1"),
            ("nodes = '2kB'", "nodes = '2kB'", "64k"),
            ("nodes = true", "nodes = True"),
            ("switch_ranks = 3", "switch_ranks=3", "ranks_per_node=8"),
            ("host_memory = '-1TB'", "host_memory = '-1TB'"),
            ("between = 3", "between = 3"),
            ("[between]\nspeed = 2", "between.speed", "bandwidth"),
            ("[between]\nbandwidth = '11G'", "between.bandwidth = '11G'", "80GB"),
            ("[between]\nlatency = -1.0", "between.latency = -1.0"),
            ("[between]\nper = 'moon'", "between.per = 'moon'", "'rank'", "'pair'", "'group'"),
            ("[accelerator]\nflops = '989TB'", "accelerator.flops = '989TB'", "64k"),
            ("[accelerator]\nflops = inf", "accelerator.flops = inf"),
        )
    ),
]

GPT = GPTConfig(dim=8, layers=1, heads=2, max_positions=4096)
MINICPM3 = {
    "model_type": "minicpm3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
MINICPM3 |= {"num_attention_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
MINICPM3 |= {"qk_nope_head_dim": 8, "v_head_dim": 8}
FILES = {
    "binary.toml": bytes(range(256)),
    "deep.toml": b"a = " + b"[" * 50_000,
    "typo.toml": b"like = '8xh100'\nfoo = 3",
    "many.toml": b"like = '8xh100'\nnodes = 99999999999",
    "gemma2/config.json": json.dumps({"model_type": "gemma2", "hidden_size": 64}).encode(),
    "minicpm3/config.json": json.dumps(MINICPM3).encode(),
    "lacking/config.json": json.dumps(MINICPM3 | {"kv_lora_rank": None}).encode(),
    "experts/config.json": json.dumps(MINICPM3 | {"model_type": "deepseek_v3", "n_routed_experts": 8}).encode(),
    "sparse/config.json": json.dumps(
        MINICPM3 | {"model_type": "glm4_moe_lite", "n_routed_experts": 8, "mlp_layer_types": ["dense", "sparse"]}
    ).encode(),
    "kimi/config.json": json.dumps(MINICPM3 | {"model_type": "kimi_linear"}).encode(),
    "gpt2/config.json": json.dumps(describe(GPT, torch.bfloat16)).encode(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name in ("folder.toml", "folder", *(Path(file).parent for file in FILES)):
        (root / name).mkdir(exist_ok=True)
    for name, content in FILES.items():
        (root / name).write_bytes(content)
    (root / "loop.toml").symlink_to(root / "loop.toml.other")
    (root / "loop.toml.other").symlink_to(root / "loop.toml")
    return root


@pytest.fixture
def working_directory(folder, monkeypatch):
    """Changes to a directory with all files, and makes the tuner fail if it starts."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tuner, "tune", None)
    return folder


# A command line whose words all appear in the error, or (command line, words in the error).
PLAN = [
    ("nothing", "nothing", "search", "memory", "run"),
    ("steps --ranks 4", "steps", "docs/tools/draw_steps.py"),
    ("bytes --ranks 4", "bytes", "benchmarks/sent_bytes.py"),
    "--nothing",
    ("search --tokens", "--tokens"),
    "--tokens 0",
    "--tokens 99999999999T",
    ("--tokens 3", "3 tokens", "8 shards"),
    ("--tokens 128KiB", "--tokens", "128KiB", "64Ki"),
    ("--document-tokens 2KB", "--document-tokens", "2KB", "64k"),
    "--best 0",
    ("--model gpt-5", "--model gpt-5", "llama3-8b", "config.json"),
    ("--model gemma2", "--model", "config.json", "'gemma2'", *FAMILIES),
    ("--model folder", "config.json"),
    ("--model lacking", "--model lacking", "kv_lora_rank"),
    ("--model experts", "--model experts", "n_routed_experts=8"),
    ("--model sparse", "--model sparse", "n_routed_experts=8"),
    ("--model kimi", "--model kimi", "linear_attention", "full_attention"),
    ("--model minicpm3 --out x.toml", "--out x.toml", "--model minicpm3"),
    ("--model gpt2 --tokens 8Ki", "--tokens 8,192", "gpt2", "4,096"),
    ("--attention nothing", "--attention nothing", "upipe"),
    ("--attention local --cluster 16xh100", "--attention local", "16 ranks"),
    ("--kernel fast", "--kernel fast", "cpu_flash"),
    ("--cluster 12xh100", "--cluster 12xh100", "8xh100"),
    ("--cluster 800000xh100", "--cluster 800000xh100", "16,384"),
    ("--cluster many.toml", "799,999,999,992", "16,384"),
    "--cluster none.toml",
    "--cluster folder.toml",
    "--cluster loop.toml",
    "--cluster binary.toml",
    "--cluster deep.toml",
    ("--cluster typo.toml", "typo.toml", "foo", "ranks_per_node"),
    ("--reserve 1000TB", "--reserve", "1,000,000,000,000,000", "--host-reserve"),
    ("--reserve 5Gi", "--reserve", "5Gi", "64KiB"),
    ("--host-reserve -1GB", "--host-reserve", "-1GB"),
    ("--plot x.foo", "--plot x.foo", ".png"),
    "--plot folder",
    "--plot none/x.png",
    ("memory --nothing", "--nothing"),
    ("memory --model gpt2 --tokens 8Ki", "--tokens 8,192", "gpt2", "4,096"),
    ("memory --model gpt2 --tokens 8Ki --max-context", "--tokens 8,192", "gpt2", "4,096"),
    ("memory --model gpt2 --tokens 4Ki --max-context", "--max-context", "4,096"),
    ("memory --shard 0", "--shard 0"),
    ("memory --shard 3", "shard 3", "ring 1", "ulysses 2", "8"),
    ("memory --attention ring --ulysses 8", "ulysses", "8"),
    ("memory --heads-per-stage 0", "--heads-per-stage 0"),
    ("memory --heads-per-stage 3", "heads_per_stage=3", "8"),
    ("memory --reserve 100GiB", "--reserve", "107,374,182,400"),
    ("memory --checkpointing.policy some", "some", "layer"),
    ("memory --checkpointing.policy none", "offload"),
    ("run --cluster moon", "--cluster moon"),
    ("run --model.vocab-size 257 --parallel.ring 3", "ring 3", "8"),
    ("run --data.sequence-length 64KiB", "--data.sequence-length", "64KiB", "64Ki"),
    ("run --recipe finetune --model.dim 128", "--model.dim", "pretrained"),
]

TUNE = [
    "--nothing",
    "--json",
    "--iterations 0",
    "--best 0",
    ("--slower 0.5", "--slower", "--best"),
    ("--attention flash", "--attention flash", "ring"),
    ("--cluster 8xh100 --parallel.tp 2", "--cluster", "--parallel.replicate 1", "--parallel.tp 2"),
    ("--out tuned.json", "--out tuned.json", ".toml"),
    ("--recipe finetune --model.no-qk-norm", "--model.no-qk-norm", "pretrained"),
    "--config none.toml",
]

COMMANDS = [
    (main, name, line.split(), words or line.split())
    for main, name, rows in ((plan, "plan", PLAN), (tuner.main, "tune", TUNE))
    for line, *words in ((row,) if isinstance(row, str) else row for row in rows)
] + [
    (plan, "plan", argv, words)
    for argv, *words in (
        ([""], "''"),
        (["--tokens", ""], "--tokens"),
        (["--tokens", "9" * 5000], "--tokens"),
        (["--cluster", ""], "--cluster"),
        (["--plot", ""], "--plot"),
    )
]

JOB = Job(model=LlamaConfig.debug(), axes={"ring": 2}, attention=lambda mesh: None, length=64)
CALLS: list[tuple[Callable[[], object], str]] = [
    *(
        (lambda name=name: Cluster.named(name), f"{name!r}.*8xh100.*emulated-")
        for name in ("tpu", "12xh100", "8x", "0xh100", "0x4xh100", "2x0xh100", "2x9xh100")
    ),
    (lambda: Link(bandwidth=0), "bandwidth.*0"),
    (lambda: Link(bandwidth=1e9, latency=-1), "latency.*-1"),
    (lambda: Link(bandwidth=1e9, per="moon"), "per.*moon"),
    (lambda: Link(bandwidth=1e9, turns=1.5), "turns.*1.5"),
    (lambda: Link(bandwidth=1e9, speed=1), "speed.*1"),
    (lambda: replace(Cluster.named("8xh100").accelerator, flops=0), "flops.*0"),
    (lambda: estimate(JOB), "AttentionChoice"),
]


@pytest.mark.parametrize(
    ("main", "name", "argv", "words"), COMMANDS, ids=[f"{name} {' '.join(argv)}"[:60] for _, name, argv, _ in COMMANDS]
)
def test_commands_refuse_wrong_arguments_in_one_line(working_directory, main, name, argv, words):
    error = refusal(main, argv)
    assert error.startswith(f"armillary-{name}: ")
    assert [word for word in words if word not in error] == [], error


@pytest.mark.parametrize(("text", "words"), [(text, words) for text, *words in CLUSTERS])
def test_cluster_files_are_refused_with_key_and_value(tmp_path, text, words):
    file = tmp_path / "ours.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        Cluster.load(file)
    assert [word for word in ("ours.toml", *words) if word not in str(error.value)] == []


@pytest.mark.parametrize(("call", "named"), CALLS, ids=[named for _, named in CALLS])
def test_calls_are_refused_by_argument_and_value(call, named):
    with pytest.raises(ValueError, match=f"(?s){named}"):
        call()
