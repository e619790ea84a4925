"""The tuner: candidates, the measured block, failures, the choice and its file for the trainer."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.core.testing import fake_world
from armillary.models import Checkpointing
from armillary.models.block import Block
from armillary.plan import tune
from armillary.plan.memory import AttentionChoice
from armillary.plan.search.candidates import Candidate, Mesh, candidates
from armillary.plan.tune import Measurement, TuneOptions, all_candidates, candidates_to_measure, read_options
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
    recipes,
)
from armillary.train.cli import read_command
from armillary.train.internal import Ranks

SMALL = Config(
    model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
    data=DataConfig(sequence_length=50, global_batch_size=4),
    validation=ValidationConfig(batches=1),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=3, device="cpu"),
)
METHODS = ("ring", "ulysses", "upipe+ring", "wallfacer")


def options_for(folder: Path, config: Config = SMALL, **options: Any) -> TuneOptions:
    return replace(TuneOptions(out=folder / "tuned.toml", attention=METHODS, run=config, iterations=1), **options)


def tune_and_print(*args: Any) -> tuple[list[Measurement], str]:
    """The measurements and the output of a rank."""
    output = io.StringIO()
    with redirect_stdout(output):
        measurements = tune.tune(*args)
    return measurements, output.getvalue()


# -- the choice -------------------------------------------------------------------------------------------------------


def rank_2_dislikes_ulysses(_: Config, candidate: Candidate, *__: object) -> list[float]:
    """Seconds of three passes: smaller rings are faster, but Ulysses is slow on one rank, and first passes are slow."""
    seconds = 1.0 + candidate.mesh.ring + len(str(candidate)) / 1000
    slow = dist.get_rank() == 2 and candidate.attention.name == "ulysses"
    return [100.0, 9.0 if slow else seconds, 9.0 if slow else seconds]


def test_the_candidate_that_is_fastest_on_its_slowest_rank_is_written(worlds, tmp_path):
    options = options_for(tmp_path)
    results = worlds(4).run(tune_and_print, options, rank_2_dislikes_ulysses)
    measurements, output = results[0]
    assert {each.candidate for each in measurements} == set(all_candidates(options, 4))
    seconds = [each.seconds for each in measurements]
    assert seconds == sorted(seconds) and seconds[-1] == 9.0
    best = measurements[0].candidate
    assert best.attention.name != "ulysses"
    assert read_command(["--config", str(options.out)])[0].run == best.apply_to(SMALL)
    assert output.splitlines()[-1] == f"chosen: {best}; train with --config {options.out}"
    assert all(str(each.candidate) in output for each in measurements)
    assert all(result == (measurements, "") for result in results[1:])


def test_the_file_names_the_recipe_and_flags_override_it(tmp_path):
    recipe = recipes.llama3_8b_1m()
    config = replace(recipe, data=replace(recipe.data, path=(Path('a "b"'), Path("c")), weights=(1.0, 0.5)))
    options = replace(options_for(tmp_path, config), recipe="llama3_8b_1m")
    chosen = Candidate(Mesh(1, 2, 2), AttentionChoice("upipe+ring", 2))
    with redirect_stdout(io.StringIO()):
        tune.report(options, [Measurement(chosen, 1.0)], 4)
    lines = options.out.read_text().splitlines()
    assert lines[0] == f"# {chosen}, measured by armillary-tune to be fastest on 4 ranks"
    assert lines[1] == 'recipe = "llama3_8b_1m"' and "steps" not in options.out.read_text()
    run = read_command(["--config", str(options.out), "--parallel.ring", "4"])[0].run
    assert run == replace(config, parallel=run.parallel)
    assert (run.parallel.ring, run.parallel.ulysses, run.parallel.attention) == (4, 2, "upipe+ring")


# -- failures ---------------------------------------------------------------------------------------------------------


def failing(config: Config, candidate: Candidate, device: torch.device, iterations: int, ranks: Ranks) -> list[float]:
    """Ring runs out of memory, Ulysses with shards is refused, UPipe is the fastest."""
    if candidate.attention.name == "ring":
        raise torch.OutOfMemoryError("no memory is left\nfor two lines")
    if candidate.attention.name == "ulysses":
        config = replace(config, data=replace(config.data, global_batch_size=1))
        return tune.measure(config, candidate, device, iterations, ranks)
    return [1e-6]


def test_failed_candidates_are_shown_with_their_reason_and_others_measured(worlds, tmp_path):
    options = options_for(tmp_path, attention=("ring", "ulysses", "upipe+ring"))
    results = worlds(4).run(tune_and_print, options, failing)
    measurements, output = results[0]
    assert all(result == (measurements, "") for result in results[1:])
    reasons = {str(each.candidate): each.reason for each in measurements}
    assert reasons["ring on ring 4"] == reasons["ring on shard 2 x ring 2"] == "no memory is left"
    refused = reasons["ulysses on shard 2 x ulysses 2"]
    assert refused.startswith("--data.global-batch-size 1 cannot be shared by replicate 1 x shard 2")
    assert refused in output
    assert measurements[0].seconds == 1e-6 and measurements[0].candidate.attention.name == "upipe+ring"


def hopeless(*_: object) -> list[float]:
    raise RuntimeError("nothing works")


def refusal_of(*args: Any) -> str:
    with pytest.raises(ValueError) as error:
        tune_and_print(*args)
    return str(error.value)


def test_nothing_is_written_if_every_candidate_fails(worlds, tmp_path):
    for message in worlds(2).run(refusal_of, options_for(tmp_path), hopeless):
        assert all(word in message for word in ("2 candidates", "ring on ring 2", "nothing works"))
    assert not (tmp_path / "tuned.toml").exists()


def test_ranks_with_other_options_are_refused(worlds, tmp_path):
    for message in worlds(2).run(refused_on_ranks, tmp_path):
        assert "--iterations" in message


def refused_on_ranks(folder: Path) -> str:
    return refusal_of(options_for(folder, iterations=1 + dist.get_rank()))


# -- the measured block -----------------------------------------------------------------------------------------------


def built(config: Config, *every: Candidate) -> list[tuple[int, tuple[int, ...], str, str]]:
    """(blocks, shape of the tokens, layout, dtype) of each candidate's pass, which runs once."""
    results = list[tuple[int, tuple[int, ...], str, str]]()
    for candidate in every:
        run_pass = tune.build_pass(config, candidate, torch.device("cpu"))
        run_pass()
        measured = getclosurevars(run_pass).nonlocals
        parameters = list(measured["model"].parameters())
        assert all(parameter.grad is None for parameter in parameters)
        blocks = [module for module in measured["model"].modules() if isinstance(module, Block)]
        results.append(
            (len(blocks), tuple(measured["tokens"].shape), measured["layout"].text, str(parameters[0].dtype))
        )
    return results


def test_the_measured_block_is_the_trainers(worlds):
    config = replace(SMALL, checkpointing=Checkpointing("layer"), train=replace(SMALL.train, precision="float64"))
    candidate = Candidate(Mesh(2, 1, 2), AttentionChoice("upipe", 2))
    for ((blocks, shape, _, dtype),) in worlds(4).run(built, config, candidate):
        assert (blocks, shape, dtype) == (1, (2, 25), "torch.float64")


def test_hybrids_are_measured_on_their_repeated_blocks_and_documents_on_their_layouts(worlds, tmp_path):
    model = replace(SMALL.model, layers=4, mixers=("mamba2", "attention"))
    ring = Candidate(Mesh(1, 2, 1), AttentionChoice("ring"), "contiguous")
    assert [blocks for ((blocks, *_),) in worlds(2).run(built, replace(SMALL, model=model), ring)] == [2, 2]
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i:02}.txt").write_text("x" * 24)  # half a row, end of document included
    data = replace(SMALL.data, documents=True, path=(tmp_path / "text",), global_batch_size=2)
    config = replace(SMALL, data=data)
    every = all_candidates(options_for(tmp_path, config), 4)
    assert {each.layout for each in every if each.mesh.ring > 1} == {"zigzag", "contiguous", "balanced"}
    assert {each.layout for each in all_candidates(options_for(tmp_path), 4)} == {"zigzag"}
    zigzag, balanced = worlds(2).run(built, config, replace(ring, layout="zigzag"), replace(ring, layout="balanced"))[0]
    assert (zigzag[2], balanced[2]) == ("0:13,38:50;13:38", "0:25;25:50")


# -- the candidates ---------------------------------------------------------------------------------------------------


def test_settings_of_a_rank_are_kept(tmp_path):
    flags = ["--parallel.tp", "2", "--parallel.replicate", "2", "--parallel.ring", "7", "--parallel.attention", "ring"]
    flags += ["--parallel.kernel", "dense", "--parallel.zero-stage", "2", "--parallel.compiler", "eager"]
    parallel = read_options(flags).measured_run.parallel
    assert parallel == ParallelConfig(tp=2, replicate=2, kernel="dense", zero_stage=2, compiler="eager")
    config = replace(SMALL, parallel=parallel)
    assert all_candidates(options_for(tmp_path, config, attention=()), 16) == list(candidates(heads=2, ranks=4, rows=2))


BIG = replace(
    SMALL,
    model=ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336),
    data=DataConfig(sequence_length=131_072, global_batch_size=1),
    checkpointing=Checkpointing("attention_output", offload=True),
    optimizer=OptimizerConfig(cpu_offload=True),
)


def measured_on_8(config: Config, **options: Any) -> list[Candidate]:
    return candidates_to_measure(TuneOptions(run=config, cluster="8xh100", **options), 8, torch.bfloat16)


def test_with_a_cluster_the_predicted_fastest_that_fit_are_measured():
    every = measured_on_8(BIG, best=1000)
    assert set(every) == set(all_candidates(TuneOptions(run=BIG), 8))
    assert measured_on_8(BIG, best=3) == every[:3] and len(measured_on_8(BIG)) == 10
    longer = replace(BIG, data=DataConfig(sequence_length=3_000_000, global_batch_size=1))
    fitting = [str(candidate) for candidate in measured_on_8(longer, best=1000)]
    assert "token_ring on ring 8" not in fitting
    assert "upipe, 8 heads a stage on ulysses 8" in fitting  # stages need little memory
    with pytest.raises(ValueError, match=r"--cluster 8xh100 .*8.*4"):
        candidates_to_measure(TuneOptions(run=BIG, cluster="8xh100"), 4, torch.bfloat16)


def test_hybrids_are_predicted_in_every_layout_with_a_process_group():
    model = replace(BIG.model, mixers=("delta_rule", "attention"), layers=2)
    run = replace(BIG, model=model, data=DataConfig(sequence_length=16_384, global_batch_size=1))
    with fake_world(ring=8):  # like the tuner's process group, in which rank 0 predicts
        rings = [each for each in measured_on_8(run, attention=("ring",), best=1000) if each.mesh.ring == 8]
    assert {each.layout for each in rings} == {"zigzag", "contiguous"}
