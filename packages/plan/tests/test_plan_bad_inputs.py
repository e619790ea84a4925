"""A table of arguments and files that will not do: each is refused by one readable line that names it."""

import pytest

from armillary.core.testing.refusals import refusal
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
    raise AssertionError("it was started")


@pytest.fixture
def here(folder, monkeypatch):
    """The folder of all files as the working directory, and nothing that starts."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tuner, "tune", unexpected)
    return folder


PLAN = [
    ("nothing", "no command 'nothing'; known: search, memory, run, bytes"),
    ("--nothing", "Unrecognized options: --nothing"),
    ("search --tokens", "Missing value for argument '--tokens'"),
    ("--tokens 0", "--tokens: 0 is no whole number"),
    ("--tokens -5", "--tokens: -5 is no whole number"),
    ("--tokens 1.5", "--tokens: '1.5' is no whole number"),
    ("--tokens many", "--tokens: 'many' is no whole number"),
    ("--tokens nan", "--tokens: 'nan' is no whole number"),
    ("--tokens 99999999999T", "--tokens: '99999999999T' is more than 2^63 - 1"),
    ("--tokens 3", "a sequence of 3 tokens is shorter than its 8 shards"),
    ("--rows 0", "--rows 0: must be at least 1"),
    ("--best 0", "--best 0: must be at least 1"),
    ("--best x", "--best: 'x' is no whole number"),
    ("--model gpt-5", "--model gpt-5: known are debug, llama3-8b"),
    ("--attention nothing", "no candidates: 1 rows on 8 ranks, --attention nothing"),
    ("--cluster 3xh100", "--cluster 3xh100: no cluster '3xh100'"),
    ("--cluster 0xh100", "--cluster 0xh100: no cluster '0xh100'"),
    ("--cluster 8xb9000", "--cluster 8xb9000: no cluster '8xb9000'"),
    ("--cluster 800000xh100", "--cluster 800000xh100: 800,000 ranks; at most 16,384 are supported"),
    ("--cluster none.toml", "--cluster none.toml: No such file or directory"),
    ("--cluster folder.toml", "--cluster folder.toml: Is a directory"),
    ("--cluster loop.toml", "--cluster loop.toml: Too many levels of symbolic links"),
    ("--cluster binary.toml", "binary.toml: 'utf-8' codec can't decode"),
    ("--cluster deep.toml", "deep.toml: brackets are nested too deeply"),
    ("--cluster c-none.toml", "missing keys ['ranks_per_node', "),
    ("--cluster c-cut.toml", "c-cut.toml: Invalid value"),
    ("--cluster c-unknown.toml", "unknown keys ['foo']"),
    ("--cluster c-like.toml", "no cluster '8xb9000'"),
    ("--cluster c-like-number.toml", "c-like-number.toml: like = 3 must be the name of a cluster"),
    ("--cluster c-like-list.toml", "like = ['8xh100'] must be the name of a cluster"),
    ("--cluster c-nodes.toml", "nodes=-1 must be at least 1"),
    ("--cluster c-nodes-text.toml", "'x' is no whole number"),
    ("--cluster c-nodes-half.toml", "nodes=1.5 must be a whole number"),
    ("--cluster c-nodes-list.toml", "nodes = [1] must be a number"),
    ("--cluster c-nodes-true.toml", "nodes = True must be a number"),
    ("--cluster c-nodes-many.toml", "799,999,999,992 ranks; at most 16,384 are supported"),
    ("--cluster c-table.toml", "between = 3 must be a table"),
    ("--cluster c-fast.toml", "'fast' is no whole number"),
    ("--cluster c-latency.toml", "latency=-1.0 must not be below 0, and finite"),
    ("--cluster c-latency-nan.toml", "latency=nan must not be below 0, and finite"),
    ("--cluster c-per.toml", "per='moon'; known: rank, pair, group"),
    ("--cluster c-flops.toml", "flops=-1.0 must be above 0, and finite"),
    ("--cluster c-flops-inf.toml", "flops=inf must be above 0, and finite"),
    ("--reserve 1000TB", "--reserve 1,000,000,000,000,000 and --host-reserve"),
    ("--reserve much", "--reserve: 'much' is no whole number"),
    ("--host-reserve -1GB", "--host-reserve: -1000000000 is no whole number"),
    ("--plot x.foo", "--plot x.foo: pictures are PNGs"),
    ("--plot folder", "--plot folder: pictures are PNGs"),
    ("--plot none/x.png", "--plot none/x.png: there is no folder none"),
    ("memory --nothing", "Unrecognized options: --nothing"),
    ("memory --tokens x", "--tokens: 'x' is no whole number"),
    ("memory --tokens 1000G", "--tokens 1,000,000,000,000: by closed formulas a step takes "),
    ("memory --attention flash", "no attention method 'flash'"),
    ("memory --shard 0", "--shard 0: must be at least 1"),
    ("memory --shard 3", "shard 3 x ring 1 x ulysses 2 = 6 ranks, but 8 x H100 80 GB are 8"),
    ("memory --ring 5", "shard 1 x ring 5 x ulysses 1 = 5 ranks"),
    ("memory --ulysses -1", "--ulysses -1: must be at least 1"),
    ("memory --rows 0", "--rows 0: must be at least 1"),
    ("memory --heads-per-stage 0", "--heads-per-stage 0: must be at least 1"),
    ("memory --heads-per-stage 3", "heads_per_stage=3 must be a positive multiple of 8 ranks"),
    ("memory --host-memory x", "--host-memory: 'x' is no whole number"),
    ("memory --checkpointing.policy some", "invalid choice 'some'"),
    ("memory --checkpointing.policy none", "offload keeps checkpoints in the host's memory"),
    ("run --cluster moon", "--cluster moon: no cluster 'moon'"),
    ("run --cluster none.toml", "--cluster none.toml: No such file or directory"),
    ("run --model.vocab-size 257 --parallel.ring 3", "= 6 ranks, but 8 are running"),
    ("run --optimizer.lr -1", "--optimizer.lr -1.0: must be above 0"),
    ("run --data.path none", "none cannot be read (No such file"),
    ("run --recipe none", "--recipe none: known are debug"),
    ("bytes --tokens x", "--tokens: 'x' is no whole number"),
    ("bytes --tokens 5", "a sequence of 5 tokens is shorter than its 64 shards"),
    ("bytes --heads 0", "--heads 0: must be at least 1"),
    ("bytes --kv-heads 5", "52 query heads cannot share 5 key/value heads"),
    ("bytes --head-dim 0", "--head-dim 0: must be at least 1"),
    ("bytes --ranks 0", "--ranks 0: must be at least 1"),
    ("bytes --ranks 100000", "--ranks 100000: must be at least 1 and at most 16,384"),
    ("bytes --ulysses 0", "--ulysses 0: must be at least 1"),
    ("bytes --attention flash", "no attention method 'flash'"),
    ("bytes --team 0", "--team 0: must be at least 1"),
    ("bytes --team -1 --attention wallfacer", "--team -1: must be at least 1"),
    ("bytes --team 3 --attention wallfacer", "3"),
    ("bytes --of-ranks 64", "there is no rank 64 of 64; choose from 0 to 63"),
    ("bytes --of-ranks -1", "there is no rank -1 of 64"),
    ("bytes --dtype int8", "invalid choice 'int8'"),
]

TUNE = [
    ("--nothing", "Unrecognized options: --nothing"),
    ("--json", "Unrecognized options: --json"),
    ("--iterations 0", "--iterations 0: must be at least 1"),
    ("--iterations x", "--iterations: 'x' is no whole number"),
    ("--slower 0.5", "--slower 0.5: must be at least 1"),
    ("--slower nan", "--slower nan: must be at least 1"),
    ("--slower inf", "--slower inf: must be at least 1"),
    ("--attention flash", "--attention flash: no such method; known: local"),
    ("--cluster moon", "--cluster moon: no cluster 'moon'"),
    ("--cluster 8xh100 --parallel.tp 2", "the planner knows neither --parallel.replicate 1 nor --parallel.tp 2"),
    ("--out folder", "--out folder: must be a file that ends in .toml"),
    ("--out tuned.json", "--out tuned.json: must be a file that ends in .toml"),
    ("--train.steps 0", "--train.steps 0: must be at least 1"),
    ("--recipe none", "--recipe none: known are debug"),
    ("--config none.toml", "--config none.toml: cannot be read"),
]

ROWS = [
    *((plan, "plan", *row) for row in PLAN),
    *((tuner.main, "tune", *row) for row in TUNE),
]


@pytest.mark.parametrize(("main", "name", "line", "said"), ROWS, ids=[f"{row[1]} {row[2]}"[:60] for row in ROWS])
def test_a_command_refuses_it_in_one_line(here, main, name, line, said):
    found = refusal(main, line.split())
    assert found.startswith(f"armillary-{name}: ") and said in found


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([""], "no command ''"),
        (["--tokens", ""], "--tokens: '' is no whole number"),
        (["--tokens", "9" * 5000], "is no whole number"),
        (["--cluster", ""], "--cluster : no cluster ''"),
        (["--plot", ""], "--plot .: pictures are PNGs"),
    ],
    ids=range(5),
)
def test_odd_words_are_refused_in_one_line(here, argv, said):
    assert said in refusal(plan, argv)


def test_a_cluster_that_cannot_be_is_refused(tmp_path):
    for text in ("nodes = 1e400", 'like = "8xh100"\nhost_memory = "-1TB"', 'like = "8xh100"\nranks_per_node = 0'):
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(ValueError, match=r"c\.toml"):
            Cluster.load(tmp_path / "c.toml")
