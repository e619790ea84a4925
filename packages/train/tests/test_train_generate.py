"""`armillary-generate` equals transformers on any mesh, from checkpoints and from Hugging Face folders."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from armillary.attention import Local
from armillary.models import Llama, generate
from armillary.models.hub.configs import parse as parse_config
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    SaveConfig,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
)
from armillary.train.checkpoint.manifest import Manifest
from armillary.train.checkpoint.reader import read_tensors
from armillary.train.generate.cli import main
from armillary.train.generate.cli import run as continue_prompts
from armillary.train.generate.command import Generate, read_generate

PROMPTS = ("3", "5 17 9", "1 2 3 4 5 6 7", " ".join(str(7 * i % 60) for i in range(23)))
"""Prompts of 1, 3, 7 and 23 tokens: fewer than the ranks, and never a multiple of them."""
NEW = 6
MESHES = [
    ParallelConfig(),
    ParallelConfig(ring=4, ulysses=1, attention="ring"),
    ParallelConfig(ring=2, ulysses=1, tp=2, attention="ring"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder, and the tokens that transformers generates for each prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("folder")
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None, bos_token_id=None)).double().eval()
    model.save_pretrained(path)
    rows = [torch.tensor([[int(word) for word in prompt.split()]]) for prompt in PROMPTS]
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    actual = [
        model.generate(row, attention_mask=torch.ones_like(row), **options) for row in rows
    ]  # token 0 is not padding
    return path, [ids[0, row.shape[1] :].tolist() for ids, row in zip(actual, rows, strict=True)]


def request_for(source: Path) -> Generate:
    return Generate(source, prompt=PROMPTS, tokens=NEW, ids=True, device="cpu", precision="float64")


def run_requests(requests: list[Generate]) -> list[tuple[list[list[int]], str]]:
    """Returns (tokens of each prompt, printed output) for each request."""
    actual = []
    for each in requests:
        output = io.StringIO()
        with redirect_stdout(output):
            tokens = [one.ids for one in continue_prompts(each)]
        actual.append((tokens, output.getvalue()))
    return actual


def test_generation_matches_transformers_on_any_mesh(worlds, folder):
    path, expected = folder
    lines = "".join(f"{p}{''.join(f' {i}' for i in ids)}\n" for p, ids in zip(PROMPTS, expected, strict=True))
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    requests = [replace(request_for(path), parallel=parallel) for parallel in MESHES]
    for ranks in (1, 4):
        for rank, actual in enumerate(worlds(ranks).run(run_requests, requests if ranks > 1 else requests[:1])):
            for tokens, output in actual:
                assert tokens == expected and output == ("" if rank else lines)


def run_sampled(request: Generate) -> tuple[list[list[int]], str]:
    return run_requests([replace(request, temperature=2.0, top_p=0.9, seed=3, json=True)])[0]


def test_samples_are_equal_on_all_ranks_and_printed_as_json(worlds, folder):
    actual = worlds(4).run(run_sampled, request_for(folder[0]))
    assert all(tokens == actual[0][0] for tokens, _ in actual) and actual[0][0] != folder[1]
    messages = json.loads(actual[0][1])
    assert messages["step"] is None and [one["ids"] for one in messages["prompts"]] == actual[0][0]
    assert [one["prompt"] for one in messages["prompts"]] == list(PROMPTS) and messages["prompts"][0]["text"] is None


def train_two_steps(output: Path) -> None:
    config = Config(
        model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
        data=DataConfig(path=(Path(__file__).parent,), sequence_length=32, global_batch_size=2),
        validation=ValidationConfig(every=20, batches=1),
        save=SaveConfig(every=1),
        log=LogConfig(plot=False),
        train=TrainConfig(steps=2, device="cpu", output=output),
    )
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        train_loop(prepare(config, device))


@pytest.fixture(scope="module")
def run_folder(worlds, tmp_path_factory):
    """The output folder of a run of two ranks, trained on bytes."""
    path = tmp_path_factory.mktemp("run")
    worlds(2).run(train_two_steps, path)
    return path


def generate_on_one_rank(checkpoint: Path, prompt: str) -> list[int]:
    """Tokens generated by the unsharded model on one rank."""
    model = Llama(parse_config(Manifest.read(checkpoint).model), Local()).double()
    files = Manifest.read(checkpoint).files
    model.load_state_dict(read_tensors(checkpoint, files, "model", torch.float64))
    return generate(model, torch.tensor([list(prompt.encode())]), new_tokens=NEW)[0].tolist()


def test_a_checkpoint_of_two_ranks_generates_on_four(worlds, run_folder):
    texts = ("def main(", "é")
    request = Generate(run_folder, texts, tokens=NEW, stop=False, device="cpu", precision="float64")
    older = replace(request, step=1), replace(request, source=run_folder / "checkpoint" / "step-1")
    actual = worlds(4).run(run_requests, [request, *older])[0]
    for step, (tokens, output) in zip((2, 1, 1), actual, strict=True):
        assert tokens == [generate_on_one_rank(run_folder / "checkpoint" / f"step-{step}", text) for text in texts]
        assert output.startswith("def main(") and "\né" in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("none --prompt x", "none: "),
        ("empty --prompt x", "empty: "),
        ("begun --prompt x", "begun: "),
        ("began --prompt x", "began/checkpoint: "),
        ("run --prompt x --step 7", "--step 7: run/checkpoint .*1, 2"),
        ("run/checkpoint/step-1 --prompt x --step 2", "--step 2: run/checkpoint/step-1 "),
        ("hub --prompt x --step 1", "--step 1: hub "),
        ("hub --prompt x", "hub: .*--tokenizer.*--ids"),
        ("run", "--prompt"),
        ("odd-data --prompt x", "odd-data/config.json: data=\\[1\\]"),
        ("odd-path --prompt x", "odd-path/config.json: data.path=5"),
        ("run --prompt x --tokenizer none.json", "none.json"),
        ("run --prompt x --tokens 64q", "--tokens: '64q'"),
        ("run --prompt x --temperature -1", "temperature=-1.0"),
        ("run --prompt x --top-p 2", "top_p=2.0"),
        ("run --prompt x --parallel.replicate 2", "--parallel.replicate 2: "),
        ("run --prompt x --parallel.attention rong", "'rong'"),
    ],
)
def test_invalid_requests_are_one_line(line, message, run_folder, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, place in {"run": run_folder, "hub": folder[0]}.items():
        Path(name).symlink_to(place)
    for name in ("empty", "begun", "began/checkpoint"):
        Path(name).mkdir(parents=True)
    Path("begun/config.json").write_text('{"train": {}}')
    for name, data in {"odd-data": [1], "odd-path": {"path": 5}}.items():
        Path(name).mkdir()
        Path(name, "checkpoint").symlink_to(run_folder / "checkpoint")
        Path(name, "config.json").write_text(json.dumps({"train": {}, "data": data}))
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    (messages,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and re.search(message, messages)


def refusals(requests: list[Generate]) -> list[str]:
    actual = []
    for request in requests:
        with pytest.raises(ValueError) as refused, redirect_stdout(io.StringIO()):
            continue_prompts(request)
        actual.append(str(refused.value))
        dist.barrier()
    return actual


def test_model_errors_are_raised_on_all_ranks(worlds, folder, run_folder, tmp_path):
    from armillary.models import GPT, GPTConfig

    GPT(GPTConfig(vocab_size=60, dim=24, layers=1, heads=4, max_positions=12), Local()).save_pretrained(tmp_path)
    hub, wide = request_for(folder[0]), shutil.copytree(folder[0], tmp_path / "wide")
    fields = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(fields | {"hidden_size": 10**6}))
    run = shutil.copytree(run_folder, tmp_path / "run")
    place = run / "checkpoint" / "step-2"
    saved = Manifest.read(place)
    replace(saved, model=saved.model | {"num_hidden_layers": 10**6}).write(place)
    broken = shutil.copytree(run_folder, tmp_path / "broken")
    for manifest in broken.glob("checkpoint/*/manifest.json"):
        manifest.write_text("{}")
    requests = [
        replace(hub, prompt=("1 99",)),
        replace(hub, prompt=("one",)),
        replace(hub, prompt=(), prompt_file=Path("none.txt")),
        replace(hub, parallel=ParallelConfig(ring=3)),
        replace(request_for(tmp_path), prompt=("1", "1 2 3 4 5 6 7 8")),
        request_for(wide),
        request_for(run),
        replace(hub, device="cuda"),
        request_for(broken),
    ]
    for actual in worlds(2).run(refusals, requests):
        for message, expected in zip(
            actual,
            [
                "--prompt has token 99, and the model knows 0..59",
                "--prompt 'one': with --ids it must be numbers of tokens",
                "--prompt-file none.txt: cannot be read",
                "3 ranks, but 2 are running",
                "a prompt of 8 tokens and --tokens 6, but the model has learned 12 positions; give at most --tokens 4",
                f"the weights in {wide} do not fit its config.json: ",
                f"{place}/manifest.json: model: 1000000 layers",
                "--device cuda: ",
                f"no checkpoint in {broken}/checkpoint is intact (",
            ],
            strict=True,
        ):
            assert expected in message and "--train." not in message


def test_prompts_are_read_from_files(tmp_path):
    from armillary.train.generate.command import prompts_of

    (tmp_path / "prompt.txt").write_text("two\nlines\n")
    request = read_generate(
        ["run", "--prompt", "one", "--prompt-file", str(tmp_path / "prompt.txt"), "--tokens", "1Ki"]
    )
    assert prompts_of(request) == ["one", "two\nlines"] and request.tokens == 1024
