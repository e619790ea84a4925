"""Invalid arguments and files: each is refused in one line with the argument's name and value."""

import pytest

from armillary.core.testing import refusal
from armillary.plan import Cluster
from armillary.plan.cli import main as plan
from armillary.plan.tune import cli as tuner

FILES = {
    "binary.toml": bytes(range(256)),
    "deep.toml": "a = " + "[" * 50_000,
    "c-none.toml": "",
    "c-cut.toml": "like = ",
    "c-unknown.toml": "like = '8xh100'\nfoo = 3",
    "c-like.toml": "like = '8xb9000'",
    "c-like-number.toml": "like = 3",
    "c-like-list.toml": "like = ['8xh100']",
    "c-nodes.toml": "like = '8xh100'\nnodes = -1",
    "c-nodes-text.toml": "like = '8xh100'\nnodes = 'x'",
    "c-nodes-half.toml": "like = '8xh100'\nnodes = 1.5",
    "c-nodes-list.toml": "like = '8xh100'\nnodes = [1]",
    "c-nodes-true.toml": "like = '8xh100'\nnodes = true",
    "c-nodes-many.toml": "like = '8xh100'\nnodes = 99999999999",
    "c-table.toml": "like = '8xh100'\nbetween = 3",
    "c-fast.toml": "like = '8xh100'\n[between]\nbandwidth = 'fast'",
    "c-latency.toml": "like = '8xh100'\n[between]\nlatency = -1.0",
    "c-latency-nan.toml": "like = '8xh100'\n[between]\nlatency = nan",
    "c-per.toml": "like = '8xh100'\n[between]\nper = 'moon'",
    "c-flops.toml": "like = '8xh100'\n[accelerator]\nflops = -1.0",
    "c-flops-inf.toml": "like = '8xh100'\n[accelerator]\nflops = inf",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("folder.toml", "folder"):
        (root / name).mkdir()
    (root / "loop.toml").symlink_to(root / "loop.toml.other")
    (root / "loop.toml.other").symlink_to(root / "loop.toml")
    return root


def unexpected(*_):
    raise AssertionError("the tuner was started")


@pytest.fixture
def working_directory(folder, monkeypatch):
    """Changes to a directory with all files, and makes the tuner fail if it starts."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tuner, "tune", unexpected)
    return folder


# A command line whose words all appear in the error, or (command line, words in the error).
PLAN = [
    ("nothing", "nothing", "search", "memory", "run"),
    "--nothing",
    ("search --tokens", "--tokens"),
    "--tokens 0",
    "--tokens -5",
    "--tokens 1.5",
    "--tokens many",
    "--tokens nan",
    "--tokens 99999999999T",
    ("--tokens 3", "3 tokens", "8 shards"),
    "--rows 0",
    "--best 0",
    "--best x",
    ("--model gpt-5", "--model gpt-5", "llama3-8b"),
    ("--attention nothing", "--attention nothing", "upipe"),
    ("--attention local --cluster 16xh100", "--attention local", "16 ranks"),
    ("--cluster 3xh100", "--cluster 3xh100", "8xh100"),
    "--cluster 0xh100",
    "--cluster 8xb9000",
    ("--cluster 800000xh100", "--cluster 800000xh100", "16,384"),
    "--cluster none.toml",
    "--cluster folder.toml",
    "--cluster loop.toml",
    "--cluster binary.toml",
    "--cluster deep.toml",
    ("--cluster c-none.toml", "c-none.toml", "ranks_per_node", "accelerator"),
    "--cluster c-cut.toml",
    ("--cluster c-unknown.toml", "c-unknown.toml", "foo", "ranks_per_node"),
    ("--cluster c-like.toml", "c-like.toml", "8xb9000"),
    ("--cluster c-like-number.toml", "c-like-number.toml", "like = 3"),
    ("--cluster c-like-list.toml", "c-like-list.toml", "like = ['8xh100']"),
    ("--cluster c-nodes.toml", "c-nodes.toml", "nodes = -1", "1"),
    ("--cluster c-nodes-text.toml", "c-nodes-text.toml", "nodes = 'x'"),
    ("--cluster c-nodes-half.toml", "c-nodes-half.toml", "nodes = 1.5"),
    ("--cluster c-nodes-list.toml", "c-nodes-list.toml", "nodes = [1]"),
    ("--cluster c-nodes-true.toml", "c-nodes-true.toml", "nodes = True"),
    ("--cluster c-nodes-many.toml", "799,999,999,992", "16,384"),
    ("--cluster c-table.toml", "c-table.toml", "between = 3"),
    ("--cluster c-fast.toml", "c-fast.toml", "between.bandwidth = 'fast'"),
    ("--cluster c-latency.toml", "c-latency.toml", "between.latency = -1.0"),
    ("--cluster c-latency-nan.toml", "c-latency-nan.toml", "between.latency = nan"),
    ("--cluster c-per.toml", "c-per.toml", "between.per = 'moon'", "'rank'", "'pair'", "'group'"),
    ("--cluster c-flops.toml", "c-flops.toml", "accelerator.flops = -1.0"),
    ("--cluster c-flops-inf.toml", "c-flops-inf.toml", "accelerator.flops = inf"),
    ("--reserve 1000TB", "--reserve", "1,000,000,000,000,000", "--host-reserve"),
    "--reserve much",
    ("--host-reserve -1GB", "--host-reserve", "-1GB"),
    ("--reserve 5Gi", "--reserve", "5Gi", "64KiB"),
    ("--host-reserve 100G", "--host-reserve", "100G", "80GB"),
    ("--tokens 128KiB", "--tokens", "128KiB", "64Ki"),
    ("--document-tokens 2KB", "--document-tokens", "2KB", "64k"),
    ("memory --tokens 1MB", "--tokens", "1MB", "64k"),
    ("memory --host-memory 2T", "--host-memory", "2T", "80GB"),
    ("memory --reserve 5k", "--reserve", "5k", "80GB"),
    ("run --data.sequence-length 64KiB", "--data.sequence-length", "64KiB", "64Ki"),
    ("steps --ranks 4", "steps", "docs/tools/draw_steps.py"),
    ("bytes --ranks 4", "bytes", "benchmarks/sent_bytes.py"),
    ("--plot x.foo", "--plot x.foo", ".png"),
    "--plot folder",
    "--plot none/x.png",
    ("memory --nothing", "--nothing"),
    ("memory --tokens x", "--tokens", "x"),
    ("memory --attention flash", "flash", "upipe"),
    ("memory --shard 0", "--shard 0"),
    ("memory --shard 3", "shard 3", "ring 1", "ulysses 2", "8"),
    ("memory --ring 5", "shard 1", "ring 5", "ulysses 1", "8"),
    ("memory --ulysses -1", "--ulysses -1"),
    ("memory --rows 0", "--rows 0"),
    ("memory --heads-per-stage 0", "--heads-per-stage 0"),
    ("memory --heads-per-stage 3", "heads_per_stage=3", "8"),
    ("memory --host-memory x", "--host-memory", "x"),
    ("memory --checkpointing.policy some", "some", "layer"),
    ("memory --checkpointing.policy none", "offload"),
    ("memory --model gpt-9", "--model gpt-9", "llama3-8b"),
    ("memory --attention ring --ulysses 8", "ulysses", "8"),
    ("memory --reserve 100GiB", "--reserve", "107,374,182,400"),
    ("run --cluster moon", "--cluster moon"),
    ("run --cluster none.toml", "--cluster none.toml"),
    ("run --model.vocab-size 257 --parallel.ring 3", "ring 3", "8"),
    ("run --optimizer.lr -1", "--optimizer.lr -1.0"),
    ("run --data.path none", "none"),
    ("run --recipe finetune --model.dim 128", "--model.dim", "pretrained"),
    ("run --recipe none", "--recipe none", "debug"),
]

TUNE = [
    "--nothing",
    "--json",
    "--iterations 0",
    "--iterations x",
    "--slower 0.5",
    "--slower nan",
    "--slower inf",
    ("--attention flash", "--attention flash", "ring"),
    "--cluster moon",
    ("--cluster 8xh100 --parallel.tp 2", "--cluster", "--parallel.replicate 1", "--parallel.tp 2"),
    ("--out folder", "--out folder", ".toml"),
    ("--out tuned.json", "--out tuned.json", ".toml"),
    "--train.steps 0",
    ("--recipe finetune --model.no-qk-norm", "--model.no-qk-norm", "pretrained"),
    ("--recipe none", "--recipe none", "debug"),
    "--config none.toml",
]

ROWS = [
    (main, name, *((row, *row.split()) if isinstance(row, str) else row))
    for main, name, rows in ((plan, "plan", PLAN), (tuner.main, "tune", TUNE))
    for row in rows
]


@pytest.mark.parametrize(
    ("main", "name", "line", "words"),
    [(main, name, line, words) for main, name, line, *words in ROWS],
    ids=[f"{row[1]} {row[2]}"[:60] for row in ROWS],
)
def test_invalid_arguments_are_refused_in_one_line(working_directory, main, name, line, words):
    error = refusal(main, line.split())
    assert error.startswith(f"armillary-{name}: ")
    assert [word for word in words if word not in error] == [], error


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([""], "''"),
        (["--tokens", ""], "--tokens"),
        (["--tokens", "9" * 5000], "--tokens"),
        (["--cluster", ""], "--cluster"),
        (["--plot", ""], "--plot"),
    ],
    ids=range(5),
)
def test_empty_and_long_words_are_refused_in_one_line(working_directory, argv, word):
    assert word in refusal(plan, argv)


def test_a_clusters_file_is_named_in_its_errors(tmp_path):
    for text in ("nodes = 1e400", 'like = "8xh100"\nhost_memory = "-1TB"', 'like = "8xh100"\nranks_per_node = 0'):
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(ValueError, match=r"c\.toml"):
            Cluster.load(tmp_path / "c.toml")
