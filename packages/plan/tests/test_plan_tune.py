"""The tuner: measurements, resuming, the choice, and its file for the trainer."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.models import Checkpointing
from armillary.models.block import Block
from armillary.plan.memory.estimate import AttentionChoice
from armillary.plan.search.candidates import Candidate, Mesh, candidates
from armillary.plan.tune import bench, tuner
from armillary.plan.tune.command import TuneOptions, read_options
from armillary.plan.tune.measurements import Measurement, TunerState, cache_key, difference, load, save
from armillary.plan.tune.prune import CandidatePrediction, all_candidates, partition, predictor, prune
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    recipes,
    train_loop,
)
from armillary.train.command import read_command
from armillary.train.parts import fake_world

SMALL = Config(
    model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
    data=DataConfig(sequence_length=50, global_batch_size=4),
    validation=ValidationConfig(batches=1),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=3, device="cpu"),
)
METHODS = ("ring", "ulysses", "upipe+ring", "wallfacer")


class Killed(BaseException):
    """Stands for a kill: no handler catches it."""


def tune_plan(folder: Path, config: Config = SMALL, **options: Any) -> TuneOptions:
    return TuneOptions(out=folder / "tuned.toml", attention=METHODS, run=config, iterations=1, **options)


def tune_and_print(plan: TuneOptions, *args: Any) -> tuple[TunerState, str]:
    """The tuner's state and output on a rank."""
    output = io.StringIO()
    with redirect_stdout(output):
        state = tuner.tune(plan, *args)
    return state, output.getvalue()


# -- measurements -----------------------------------------------------------------------------------------------------


def test_the_fastest_measurement_is_chosen(worlds, tmp_path):
    plan = replace(tune_plan(tmp_path), attention=("ring", "ulysses"))
    results = worlds(4).run(tune_and_print, plan)
    tuned = results[0][0]
    assert all(actual == tuned for actual, _ in results)
    assert load(tmp_path / "tuned.json", tuned.settings) == tuned
    assert tuned.complete and tuned.remaining == 0 and not tuned.attempts and not tuned.excluded
    assert {each.candidate for each in tuned.measurements} == set(all_candidates(plan, 4))
    assert all(each.seconds is not None and 0 < each.fastest_pass <= each.seconds for each in tuned.measurements)
    last = [each for each in tuned.measurements if each.paired_seconds is not None]
    best = (
        min(last, key=lambda each: each.paired_seconds)
        if last
        else min(tuned.measurements, key=lambda each: each.seconds)
    )
    assert tuned.choice == best.candidate
    shown = results[0][1].splitlines()
    count = len(tuned.measurements)
    assert shown[0] == f"{count} candidates"
    assert [line.split()[0] for line in shown[1 : 1 + count]] == [f"{i}/{count}" for i in range(1, count + 1)]
    assert shown[1].startswith(f"1/{count} ring on ring 4: ") and shown[1].endswith("s (the best)")
    assert shown[-1] == f"chosen: {tuned.choice}; train with --config {tmp_path}/tuned.toml"
    assert all(output == "" for _, output in results[1:])


def built(config: Config, candidate: Candidate) -> tuple[int, tuple[int, ...], int, str]:
    measured = bench.Bench.of(config, candidate, torch.device("cpu"))
    measured.step()
    blocks = [module for module in measured.model.modules() if isinstance(module, Block)]
    gradients = [parameter.grad for parameter in measured.model.parameters()]
    assert all(gradient is None for gradient in gradients)
    return (
        len(blocks),
        tuple(measured.tokens.shape),
        measured.layout.length,
        str(next(measured.model.parameters()).dtype),
    )


def test_the_measured_block_is_the_trainers(worlds):
    config = replace(SMALL, checkpointing=Checkpointing("layer"), train=replace(SMALL.train, precision="float64"))
    candidate = Candidate(Mesh(2, 1, 2), AttentionChoice("upipe", 2))
    for actual in worlds(4).run(built, config, candidate):
        assert actual == (1, (2, 25), 50, "torch.float64")


def test_settings_of_a_rank_are_kept_and_belong_to_the_key(tmp_path):
    flags = ["--parallel.tp", "2", "--parallel.replicate", "2", "--parallel.ring", "7", "--parallel.attention", "ring"]
    flags += ["--parallel.kernel", "dense", "--parallel.zero-stage", "2", "--parallel.compiler", "eager"]
    parallel = read_options(flags).measured_run.parallel
    assert parallel == ParallelConfig(tp=2, replicate=2, kernel="dense", zero_stage=2, compiler="eager")
    for name in ("kernel", "zero_stage", "compiler"):
        others = replace(parallel, **{name: getattr(ParallelConfig(), name)})
        keys = (cache_key(replace(SMALL, parallel=each), 4, torch.float32) for each in (parallel, others))
        assert f"--parallel.{name.replace('_', '-')}" in difference(*keys)
    config = replace(SMALL, parallel=parallel)
    assert all_candidates(replace(tune_plan(tmp_path, config), attention=()), 16) == list(
        candidates(heads=2, ranks=4, rows=2)
    )


# -- resuming ---------------------------------------------------------------------------------------------------------


class FakeBench:
    """Returns seconds from a function of the candidate, and records the candidates."""

    def __init__(self, seconds: Callable[[Candidate], float], until: int | None = None) -> None:
        self.seconds, self.until, self.candidates = seconds, until, list[Candidate]()

    def __call__(self, config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Measurement:
        if len(self.candidates) == self.until:
            raise Killed
        self.candidates.append(candidate)
        return Measurement(candidate, self.seconds(candidate), self.seconds(candidate))


def by_ring(candidate: Candidate) -> float:
    """Smaller rings are faster, by more than the noise."""
    return candidate.mesh.ring + candidate.mesh.shard / 4 + len(str(candidate.attention)) / 10


def kill_and_resume(plan: TuneOptions, kills: list[int]) -> tuple[list[list[Candidate]], TunerState]:
    """Returns the candidates that each run measured, and the last state. All runs but the last are killed."""
    measured = []
    for count in kills:
        bench = FakeBench(by_ring, until=count)
        with pytest.raises(Killed), redirect_stdout(io.StringIO()):
            tuner.tune(plan, bench)
        measured.append(bench.candidates)
    last = FakeBench(by_ring)
    with redirect_stdout(io.StringIO()):
        tuned = tuner.tune(plan, last)
    return [*measured, last.candidates], tuned


def test_a_killed_run_resumes_without_repeating_measurements(worlds, tmp_path):
    every = all_candidates(tune_plan(tmp_path), 4)
    for measured, tuned in worlds(4).run(kill_and_resume, tune_plan(tmp_path), [2, 3]):
        assert [len(part) for part in measured] == [2, 3, len(every) - 5]
        assert [candidate for part in measured for candidate in part] == every
        assert tuned.choice == min(every, key=by_ring) and tuned.complete
    # All candidates are measured: another run measures none and chooses the same.
    assert worlds(4).run(kill_and_resume, tune_plan(tmp_path), [])[0] == ([[]], tuned)
    # More methods add candidates.
    plan = replace(tune_plan(tmp_path), attention=(*METHODS, "token_ring"))
    ((measured,), repeated), *_ = worlds(4).run(kill_and_resume, plan, [])
    assert {candidate.attention.name for candidate in measured} == {"token_ring"}
    assert repeated.choice == tuned.choice and len(repeated.measurements) == len(every) + len(measured)


def test_candidate_that_killed_two_runs_is_skipped(worlds, tmp_path):
    for measured, tuned in worlds(2).run(kill_and_resume, tune_plan(tmp_path), [1, 0]):
        first, second, *remaining = all_candidates(tune_plan(tmp_path), 2)
        assert measured == [[first], [], remaining]
        skipped = tuned.measurements[1]
        assert skipped == Measurement(second, reason=skipped.reason)
        assert "2 times" in skipped.reason and "tuned.json" in skipped.reason
        assert tuned.attempts == {}


def test_a_file_with_other_settings_is_refused_on_every_rank(worlds, tmp_path):
    save(tmp_path / "tuned.json", TunerState(cache_key(SMALL, 2, torch.float32)))
    longer = replace(SMALL, data=replace(SMALL.data, sequence_length=60))
    for message in worlds(2).run(refusal, tune_plan(tmp_path, longer)):
        assert all(word in message for word in (f"{tmp_path}/tuned.json", "--data.sequence-length", "50", "60"))
    (tmp_path / "tuned.json").write_text("[1")
    assert all(f"{tmp_path}/tuned.json" in message for message in worlds(2).run(refusal, tune_plan(tmp_path)))


def refusal(plan: TuneOptions, *args: Any) -> str:
    with pytest.raises(ValueError) as error, redirect_stdout(io.StringIO()):
        tuner.tune(plan, *args)
    return str(error.value)


# -- failures ---------------------------------------------------------------------------------------------------------


def failing(config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Measurement:
    if candidate.attention.name == "ring":
        raise torch.OutOfMemoryError("no memory is left\nfor two lines")
    if candidate.attention.name == "ulysses":
        return bench.measure(
            replace(config, data=replace(config.data, global_batch_size=1)), candidate, device, iterations
        )
    return Measurement(candidate, 1.0, 1.0)


def test_failed_candidates_are_recorded_with_their_reason(worlds, tmp_path):
    tuned, output = worlds(4).run(tune_and_print, tune_plan(tmp_path), failing, compared)[0]
    reasons = {str(each.candidate): each.reason for each in tuned.measurements}
    assert reasons["ring on ring 4"] == reasons["ring on shard 2 x ring 2"] == "no memory is left"
    assert reasons["ulysses on shard 2 x ulysses 2"].startswith(
        "--data.global-batch-size 1 cannot be shared by replicate 1 x shard 2"
    )
    assert reasons["upipe+ring, 2 heads a stage on ring 2 x ulysses 2"] is None
    assert "ring on ring 4: no memory is left\n" in output


def hopeless(*_: object) -> Measurement:
    raise RuntimeError("nothing works")


def test_no_choice_if_every_candidate_fails(worlds, tmp_path):
    for message in worlds(2).run(refusal, tune_plan(tmp_path), hopeless):
        assert all(word in message for word in ("2 candidates", "ring on ring 2", "nothing works"))
    assert not (tmp_path / "tuned.toml").exists()


# -- noise ------------------------------------------------------------------------------------------------------------


def compared(config: Config, candidates: list[Candidate], device: torch.device, rounds: int) -> list[float]:
    return [3.0, 1.0, 2.0][: len(candidates)]


def incomparable(*_: object) -> list[float]:
    raise torch.OutOfMemoryError("not all at once")


def slow_ring_4(candidate: Candidate) -> float:
    """Only ring 4 is slow; the other candidates are within a few percent."""
    return 2.0 if candidate.mesh.ring == 4 else 1.0 + len(candidate.attention.name) / 400


def test_the_fastest_are_compared_in_turns(worlds, tmp_path):
    tuned, output = worlds(4).run(tune_and_print, tune_plan(tmp_path), FakeBench(slow_ring_4), compared)[0]
    near = [each.candidate for each in tuned.fastest_first[:3]]
    assert [each.paired_seconds for each in tuned.fastest_first[:3]] == [3.0, 1.0, 2.0]
    assert all(each.paired_seconds is None for each in tuned.fastest_first[3:])
    assert tuned.choice == near[1]
    assert "the 3 fastest again, in turns\n" in output
    tuned, output = worlds(4).run(tune_and_print, tune_plan(tmp_path / "b"), FakeBench(slow_ring_4), incomparable)[0]
    assert tuned.choice == near[0] and "not compared: not all at once\n" in output


def test_hybrids_are_measured_on_their_repeated_blocks(worlds):
    model = replace(SMALL.model, layers=4, mixers=("mamba2", "attention"))
    candidate = Candidate(Mesh(1, 2, 1), AttentionChoice("ring"), "contiguous")
    actual = worlds(2).run(built, replace(SMALL, model=model), candidate)
    assert [blocks for blocks, *_ in actual] == [2, 2]


def turns(config: Config) -> list[float]:
    expected = [Candidate(Mesh(1, 2, 1), AttentionChoice("ring")), Candidate(Mesh(1, 1, 2), AttentionChoice("ulysses"))]
    return bench.compare(config, expected, torch.device("cpu"), 3)


def test_ranks_agree_on_seconds_in_turns(worlds):
    actual = worlds(2).run(turns, SMALL)
    assert actual[0] == actual[1] and len(actual[0]) == 2 and min(actual[0]) > 0


def documents_measured(config: Config) -> tuple[list[str], list[float]]:
    every = [Candidate(Mesh(1, 2, 1), AttentionChoice("ring"), layout) for layout in ("zigzag", "balanced")]
    layouts = [bench.Bench.of(config, each, torch.device("cpu")).layout.text for each in every]
    return layouts, bench.compare(config, every, torch.device("cpu"), 2)


def test_layouts_of_packed_documents_are_timed(worlds, tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i:02}.txt").write_text("x" * 24)  # half a row, end of document included
    data = replace(SMALL.data, documents=True, path=(tmp_path / "text",), global_batch_size=2)
    config = replace(SMALL, data=data)
    plan = replace(tune_plan(tmp_path), run=config)
    layouts = {each.layout for each in all_candidates(plan, 4) if each.mesh.ring > 1}
    assert layouts == {"zigzag", "contiguous", "balanced"}
    assert {each.layout for each in all_candidates(tune_plan(tmp_path), 4)} == {"zigzag"}
    actual = worlds(2).run(documents_measured, config)
    assert actual[0] == actual[1]
    (zigzag, balanced), seconds = actual[0]
    assert (zigzag, balanced) == ("0:13,38:50;13:38", "0:25;25:50") and min(seconds) > 0


# -- the planner ------------------------------------------------------------------------------------------------------


def test_partition_by_predicted_time_and_memory():
    a, b, c, d = list(candidates(heads=4, ranks=4, rows=1))[:4]
    predictions = [
        CandidatePrediction(a, 3.1),
        CandidatePrediction(b, 3.0),
        CandidatePrediction(c, 2.0),
        CandidatePrediction(d, 1.0, "9 of 8 GiB"),
    ]
    expected, left_out = partition(predictions, slower=1.5)
    assert expected == [c, b]
    assert left_out == [
        Measurement(a, reason="predicted to take 1.55 times as long as the fastest"),
        Measurement(d, reason="predicted not to fit: 9 of 8 GiB"),
    ]
    assert partition([CandidatePrediction(a, 1.0, "all"), CandidatePrediction(b, 2.0, "all")], slower=3)[0] == [a, b]


BIG = replace(
    SMALL,
    model=ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336),
    data=DataConfig(sequence_length=131_072, global_batch_size=1),
    checkpointing=Checkpointing("attention_output", offload=True),
    optimizer=OptimizerConfig(cpu_offload=True),
)


def test_the_planner_prunes_by_time_and_by_memory(tmp_path):
    plan = TuneOptions(run=BIG, cluster="8xh100", slower=1.05)
    every = all_candidates(plan, 8)
    expected, left_out = prune(plan, 8, torch.bfloat16, every)
    assert 0 < len(expected) < len(every)
    assert {*expected, *(each.candidate for each in left_out)} == set(every)
    assert all("times as long as the fastest" in (each.reason or "") for each in left_out)
    predict = predictor(plan, 8, torch.bfloat16)
    times = [predict(candidate).seconds for candidate in expected]
    assert times == sorted(times) and times[-1] <= 1.05 * times[0]
    assert len(prune(replace(plan, slower=1e9), 8, torch.bfloat16, every)[0]) == len(every)
    longer = replace(BIG, data=DataConfig(sequence_length=3_000_000, global_batch_size=1))
    expected, left_out = prune(replace(plan, run=longer, slower=9), 8, torch.bfloat16, every)
    reasons = {str(each.candidate): each.reason or "" for each in left_out}
    assert reasons["token_ring on ring 8"].startswith("predicted not to fit: ")
    assert "upipe, 8 heads a stage on ulysses 8" in list(map(str, expected))  # stages need little memory
    with pytest.raises(ValueError, match=r"--cluster 8xh100 .*8.*4"):
        prune(plan, 4, torch.bfloat16, all_candidates(plan, 4))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--iterations", "0"], ["--iterations 0"]),
        (["--slower", "0.9"], ["--slower 0.9"]),
        (["--attention", "rign"], ["--attention rign", "ring"]),
        (["--cluster", "8xh100", "--parallel.tp", "2"], ["--cluster 8xh100", "--parallel.tp 2"]),
        (["--iteratoins", "3"], ["--iteratoins"]),
    ],
)
def test_invalid_plans_are_refused(flags, words):
    with pytest.raises(ValueError) as error:
        read_options(flags)
    assert all(word in str(error.value) for word in words)


# -- the choice -------------------------------------------------------------------------------------------------------


def test_hybrids_are_predicted_in_every_layout_with_a_process_group():
    model = replace(BIG.model, mixers=("delta_rule", "mamba2", "attention"), layers=6)
    run = replace(BIG, model=model, data=DataConfig(sequence_length=16_384, global_batch_size=1))
    plan = TuneOptions(run=run, cluster="8xh100")
    rings = [each for each in all_candidates(plan, 8) if each.mesh.ring == 8 and each.attention.name == "ring"]
    assert {each.layout for each in rings} == {"zigzag", "contiguous"}
    predict = predictor(plan, 8, torch.bfloat16)
    with fake_world(ring=8):  # like the tuner's process group, in which rank 0 predicts
        predictions = {each.layout: predict(each) for each in rings}
    assert predictions["zigzag"].seconds != predictions["contiguous"].seconds


CHOSEN = Candidate(Mesh(1, 2, 2), AttentionChoice("upipe+ring", 2))


def chosen(folder: Path, config: Config = SMALL, recipe: str | None = None) -> Path:
    """Writes the configuration file of a choice; returns its path."""
    plan = replace(tune_plan(folder, config), recipe=recipe)
    tuner.write_files(plan, TunerState(cache_key(config, 4, torch.float32), complete=True, choice=CHOSEN))
    return plan.out


def trained(config: Config, folder: Path) -> tuple[list[float], dict[str, int]]:
    config = replace(config, train=replace(config.train, output=folder))
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        run = prepare(config, device)
        losses = train_loop(run).losses
    return losses, {name: getattr(run.config.parallel, name) for name in ("shard", "ring", "ulysses")}


def test_the_trainer_runs_the_choice_with_all_other_flags(worlds, tmp_path):
    path = chosen(tmp_path)
    command, overrides = read_command(["--config", str(path)])
    written_out = ParallelConfig(ring=2, ulysses=2, attention="upipe+ring", heads_per_stage=2)
    assert command.run == replace(SMALL, parallel=written_out)
    assert "  parallel.ring             none -> 2" in overrides
    (losses, axes), *results = worlds(4).run(trained, command.run, tmp_path / "run")
    assert len(losses) == 3 and axes == {"shard": 1, "ring": 2, "ulysses": 2}
    assert all(actual == (losses, axes) for actual in results)


def test_the_file_names_the_recipe_and_flags_override_it(tmp_path):
    recipe = recipes.llama3_8b_1m()
    config = replace(recipe, data=replace(recipe.data, path=(Path('a "b"'), Path("c")), weights=(1.0, 0.5)))
    path = chosen(tmp_path, config, "llama3_8b_1m")
    lines = path.read_text().splitlines()
    assert lines[0] == f"# {CHOSEN}, measured by armillary-tune to be fastest on 4 ranks"
    assert lines[1] == 'recipe = "llama3_8b_1m"' and "steps" not in path.read_text()
    run = read_command(["--config", str(path), "--parallel.ring", "4"])[0].run
    assert run == replace(config, parallel=run.parallel)
    assert (run.parallel.ring, run.parallel.ulysses, run.parallel.attention) == (4, 2, "upipe+ring")


def test_a_removed_choice_is_restored(worlds, tmp_path):
    worlds(2).run(kill_and_resume, tune_plan(tmp_path), [])
    before = (tmp_path / "tuned.toml").read_bytes()
    (tmp_path / "tuned.toml").unlink()
    assert worlds(2).run(kill_and_resume, tune_plan(tmp_path), [])[0][0] == [[]]
    assert (tmp_path / "tuned.toml").read_bytes() == before


def test_a_choice_for_other_ranks_is_refused(worlds, tmp_path):
    config = read_command(["--config", str(chosen(tmp_path))])[0].run
    for message in worlds(2).run(start_refused, config):
        assert re.search("ring 2 x ulysses 2 x tp 1 = 4 .*2 ", message)


def start_refused(config: Config) -> str:
    with pytest.raises(ValueError) as error, process_group(config) as device:
        prepare(config, device)
    return str(error.value)


def test_invalid_measurement_files_are_refused(worlds, tmp_path):
    for text, key in (('{"settings": 3}', "settings"), ("[" * 100_000, "")):
        (tmp_path / "tuned.json").write_text(text)
        for message in worlds(2).run(refusal, tune_plan(tmp_path)):
            assert message.startswith(f"--out {tmp_path}/tuned.json: ") and key in message
