"""The commands of the README with fewer steps and tokens, in forked processes."""

import re
from functools import partial
from pathlib import Path

from launches import Launch, agent

from armillary.train.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
STEP = re.compile(
    r"^step: (\d+) loss: (\d+\.\d{4}) grad_norm: \d+\.\d{4} lr: \d\.\d\de-\d\d memory: \d+\.\d\dGiB "
    r"tps/rank: [\d,]+( tflops/rank: \S+ mfu: \d+\.\d%)?$",
    re.MULTILINE,
)


def test_the_main_command_trains_on_four_ranks(tmp_path):
    flags = ["--train.steps", "8", "--data.sequence-length", "256", "--log.every", "4"]
    with Launch(agent("--nproc-per-node", "4", flags=flags), tmp_path) as launch:
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    changed = {"train.steps": "80 -> 8", "data.sequence-length": "1024 -> 256", "log.every": "10 -> 4"}
    shown = "".join(f"  {name:20}  {change}\n" for name, change in changed.items())
    assert f"recipe: debug\n{shown}warm-up: 4 of 8 steps; " in output
    steps = STEP.findall(output)
    assert [int(step) for step, *_ in steps] == [1, 4, 8]
    assert float(steps[0][1]) > 5.3  # ln 257 = 5.55 for a uniform guess
    assert float(steps[-1][1]) < float(steps[0][1]) - 1
    assert re.search(r"^validation: step: 8 loss: \d\.\d{4}$", output, re.MULTILINE)
    assert re.search(r"^trained 8 steps, [\d,]+ tokens in \d+ s on 4 ranks$", output, re.MULTILINE)
    assert "  checkpoint   outputs/checkpoint/step-8" in output
    assert len(list((tmp_path / "outputs/checkpoint/step-8").glob("rank-*.safetensors"))) == 4


def test_under_torchrun_the_last_line_is_the_error(tmp_path):
    with Launch(agent("--nproc-per-node", "2", flags=["--train.steps", "0"]), tmp_path) as launch:
        assert launch.wait() == 1  # torchrun's exit code, independent of its ranks'
        output = launch.printed
    messages = re.compile(r"\[rank (\d)\] armillary-train: --train.steps 0: must be at least 1")
    lines = [line for line in output.splitlines() if set(line) != {"="}]
    last = messages.fullmatch(lines[-1].strip())  # torchrun indents it
    assert last is not None, output
    # The first rank of the host prints it too, and torchrun shows it once per rank that has failed by then.
    assert len(messages.findall(output.partition("====")[0])) <= 1
    cause = output.partition("Root Cause")[2]
    assert "exitcode  : 2 " in cause and "<N/A>" not in cause and f"rank      : {last[1]} " in cause


def test_trains_on_one_process_without_torchrun(tmp_path):
    with Launch(partial(main, ["--train.steps", "2", "--data.sequence-length", "128"]), tmp_path) as launch:
        assert launch.wait() == 0, launch.printed
        output = launch.printed
    assert [step for step, *_ in STEP.findall(output)] == ["1", "2"]
    assert " on 1 rank\n" in output


def test_a_bad_start_prints_the_reason_per_rank_and_fails(tmp_path):
    with Launch(agent("--nproc-per-node", "2", flags=["--parallel.ring", "3"]), tmp_path) as launch:
        assert launch.wait() == 1
        output = launch.printed
    message = "= 3 ranks, but 2 are running; make the axes multiply to 2 or start 3 ranks"
    lines = [line for line in output.splitlines() if re.match(r"\[rank \d\] armillary-train: ", line)]
    # torchrun ends the other ranks as soon as one fails, so one of them may print nothing.
    assert lines
    assert all(re.match(r"\[rank [01]\] armillary-train: ", line) and message in line for line in lines)
    assert "in prepare" not in output  # no traceback


def test_readme_shows_a_log_in_the_current_format():
    shown = STEP.findall(README)
    assert len(shown) >= 3
    losses = [float(loss) for _, loss, _ in shown]
    assert losses[-1] < losses[0] - 1
    assert "pip install uv && uv run torchrun --nproc-per-node 4 -m armillary.train" in README
    assert re.search(r"^ *uv run pytest", README, re.MULTILINE)


def test_ci_runs_exactly_the_test_command_of_the_readme():
    script = (Path(__file__).parent.parent / ".ci/run").read_text()
    assert script.rstrip().endswith("uv run pytest")
