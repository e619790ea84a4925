"""The tuner: what it measures, keeps, goes on with and chooses, and the file with its choice for the trainer."""

import io
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
from armillary.plan.tune.bench import Timing
from armillary.plan.tune.cache_key import question_of
from armillary.plan.tune.command import Order, read_order
from armillary.plan.tune.measurements import Measured, Tuned, read, write
from armillary.plan.tune.prune import CandidatePrediction, all_candidates, parted, predictor, pruned
from armillary.train import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    prepare,
    process_group,
    recipes,
    train,
)
from armillary.train.config import LogConfig, ValidationConfig
from armillary.train.config.command import read_command

SMALL = Config(
    model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=48),
    data=DataConfig(sequence_length=50, global_batch_size=4),
    validation=ValidationConfig(batches=1),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=3, device="cpu"),
)
METHODS = ("ring", "ulysses", "upipe+ring", "wallfacer")


class Killed(BaseException):
    """As if the process were gone: nobody handles it."""


def order(folder: Path, config: Config = SMALL, **options: Any) -> Order:
    return Order(out=folder / "tuned.toml", attention=METHODS, run=config, iterations=1, **options)


def tuned_by(order: Order, *args: Any) -> tuple[Tuned, str]:
    """What a rank was given, and what it has printed."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        tuned = tuner.tune(order, *args)
    return tuned, printed.getvalue()


# -- what is measured ---------------------------------------------------------------------------------------------


def test_it_chooses_the_fastest_of_what_it_measured(worlds, tmp_path):
    asked = replace(order(tmp_path), attention=("ring", "ulysses"))
    results = worlds(4).run(tuned_by, asked)
    tuned = results[0][0]
    assert all(found == tuned for found, _ in results)
    assert read(tmp_path / "tuned.json", "") == tuned
    assert tuned.complete and tuned.left == 0 and not tuned.attempts and not tuned.left_out
    assert {each.candidate for each in tuned.measured} == set(all_candidates(asked, 4))
    assert all(each.seconds is not None and 0 < each.least <= each.seconds for each in tuned.measured)
    last = [each for each in tuned.measured if each.again is not None]
    best = min(last, key=lambda each: each.again) if last else min(tuned.measured, key=lambda each: each.seconds)
    assert tuned.choice == best.candidate
    shown = results[0][1].splitlines()
    count = len(tuned.measured)
    assert shown[0] == f"{count} candidates"
    assert [line.split()[0] for line in shown[1 : 1 + count]] == [f"{i}/{count}" for i in range(1, count + 1)]
    assert shown[1].startswith(f"1/{count} ring on ring 4: ") and shown[1].endswith("s (the best)")
    assert shown[-1] == f"chosen: {tuned.choice}; train with --config {tmp_path}/tuned.toml"
    assert all(printed == "" for _, printed in results[1:])


def built(config: Config, candidate: Candidate) -> tuple[int, tuple[int, ...], int, str]:
    made = bench.Bench.of(config, candidate, torch.device("cpu"))
    made.step()
    blocks = [module for module in made.model.modules() if isinstance(module, Block)]
    gradients = [parameter.grad for parameter in made.model.parameters()]
    assert all(gradient is None for gradient in gradients)
    return len(blocks), tuple(made.tokens.shape), made.layout.length, str(next(made.model.parameters()).dtype)


def test_a_block_is_measured_as_the_trainer_has_it(worlds):
    config = replace(SMALL, checkpointing=Checkpointing("layer"), train=replace(SMALL.train, precision="float64"))
    candidate = Candidate(Mesh(2, 1, 2), AttentionChoice("upipe", 2))
    for found in worlds(4).run(built, config, candidate):
        assert found == (1, (2, 25), 50, "torch.float64")


def test_replicate_tp_and_the_kernel_stay_as_they_are(tmp_path):
    flags = ["--parallel.tp", "2", "--parallel.replicate", "2", "--parallel.ring", "7", "--parallel.attention", "ring"]
    kept = read_order([*flags, "--parallel.kernel", "dense"]).measured_run.parallel
    assert kept == ParallelConfig(tp=2, replicate=2, kernel="dense")
    config = replace(SMALL, parallel=kept)
    assert all_candidates(replace(order(tmp_path, config), attention=()), 16) == list(
        candidates(heads=2, ranks=4, rows=2)
    )


# -- what is kept -------------------------------------------------------------------------------------------------


class Stand:
    """Measures nothing: seconds by the names of methods. Notes whom it was asked for."""

    def __init__(self, seconds: Callable[[Candidate], float], until: int | None = None) -> None:
        self.seconds, self.until, self.asked = seconds, until, list[Candidate]()

    def __call__(self, config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Timing:
        if len(self.asked) == self.until:
            raise Killed
        self.asked.append(candidate)
        return Timing(self.seconds(candidate), self.seconds(candidate))


def by_ring(candidate: Candidate) -> float:
    """The smaller the ring, the faster; no two are nearly alike."""
    return candidate.mesh.ring + candidate.mesh.shard / 4 + len(str(candidate.attention)) / 10


def killed_and_resumed(order: Order, kills: list[int]) -> tuple[list[list[Candidate]], Tuned]:
    """Whom each run was asked for; the last one is not killed."""
    asked = []
    for count in kills:
        stand = Stand(by_ring, until=count)
        with pytest.raises(Killed), redirect_stdout(io.StringIO()):
            tuner.tune(order, stand)
        asked.append(stand.asked)
    last = Stand(by_ring)
    with redirect_stdout(io.StringIO()):
        tuned = tuner.tune(order, last)
    return [*asked, last.asked], tuned


def test_a_killed_run_goes_on_and_measures_nothing_twice(worlds, tmp_path):
    every = all_candidates(order(tmp_path), 4)
    for asked, tuned in worlds(4).run(killed_and_resumed, order(tmp_path), [2, 3]):
        assert [len(part) for part in asked] == [2, 3, len(every) - 5]
        assert [candidate for part in asked for candidate in part] == every
        assert tuned.choice == min(every, key=by_ring) and tuned.complete
    # Nothing is left: who comes back measures nothing, and is given the same.
    assert worlds(4).run(killed_and_resumed, order(tmp_path), [])[0] == ([[]], tuned)
    # More methods are more to measure.
    more = replace(order(tmp_path), attention=(*METHODS, "token_ring"))
    ((asked,), again), *_ = worlds(4).run(killed_and_resumed, more, [])
    assert {candidate.attention.name for candidate in asked} == {"token_ring"}
    assert again.choice == tuned.choice and len(again.measured) == len(every) + len(asked)


def test_what_ends_a_run_twice_is_not_begun_a_third_time(worlds, tmp_path):
    for asked, tuned in worlds(2).run(killed_and_resumed, order(tmp_path), [1, 0]):
        first, second, *others = all_candidates(order(tmp_path), 2)
        assert asked == [[first], [], others]
        assert tuned.measured[1] == Measured(second, reason="has ended 2 runs; take it out of the file to try it again")
        assert tuned.attempts == {}


def test_a_file_of_another_question_is_refused_on_every_rank(worlds, tmp_path):
    write(tmp_path / "tuned.json", Tuned(question_of(SMALL, 2, "float32")))
    longer = replace(SMALL, data=replace(SMALL.data, sequence_length=60))
    for message in worlds(2).run(refusal, order(tmp_path, longer)):
        assert message == (
            f"--out {tmp_path}/tuned.json: was measured with --data.sequence-length 50, and here it is 60; name "
            "another file, or remove this one"
        )
    (tmp_path / "tuned.json").write_text("[1")
    assert all("is no file of armillary-tune" in message for message in worlds(2).run(refusal, order(tmp_path)))


def refusal(order: Order, *args: Any) -> str:
    with pytest.raises(ValueError) as error, redirect_stdout(io.StringIO()):
        tuner.tune(order, *args)
    return str(error.value)


# -- what fails ---------------------------------------------------------------------------------------------------


def failing(config: Config, candidate: Candidate, device: torch.device, iterations: int) -> Timing:
    if candidate.attention.name == "ring":
        raise torch.OutOfMemoryError("no memory is left\nfor two lines")
    if candidate.attention.name == "ulysses":
        return bench.measure(
            replace(config, data=replace(config.data, global_batch_size=1)), candidate, device, iterations
        )
    return Timing(1.0, 1.0)


def test_candidates_that_cannot_be_run_are_kept_with_their_reason(worlds, tmp_path):
    tuned, printed = worlds(4).run(tuned_by, order(tmp_path), failing, compared)[0]
    reasons = {str(each.candidate): each.reason for each in tuned.measured}
    assert reasons["ring on ring 4"] == reasons["ring on shard 2 x ring 2"] == "no memory is left"
    assert reasons["ulysses on shard 2 x ulysses 2"].startswith(
        "--data.global-batch-size 1 cannot be shared by replicate 1 x shard 2"
    )
    assert reasons["upipe+ring, 2 heads a stage on ring 2 x ulysses 2"] is None
    assert "ring on ring 4: no memory is left\n" in printed


def hopeless(*_: object) -> Timing:
    raise RuntimeError("nothing works")


def test_where_nothing_can_be_run_there_is_no_choice(worlds, tmp_path):
    for message in worlds(2).run(refusal, order(tmp_path), hopeless):
        assert message == "none of 2 candidates could be run, such as ring on ring 2: nothing works"
    assert not (tmp_path / "tuned.toml").exists()


# -- noise --------------------------------------------------------------------------------------------------------


def compared(config: Config, wanted: list[Candidate], device: torch.device, rounds: int) -> list[float]:
    return [3.0, 1.0, 2.0][: len(wanted)]


def incomparable(*_: object) -> list[float]:
    raise torch.OutOfMemoryError("not all at once")


def alike(candidate: Candidate) -> float:
    """Ring 4 alone is slow; the others are within a few percent."""
    return 2.0 if candidate.mesh.ring == 4 else 1.0 + len(candidate.attention.name) / 400


def test_the_nearest_are_compared_in_turns(worlds, tmp_path):
    tuned, printed = worlds(4).run(tuned_by, order(tmp_path), Stand(alike), compared)[0]
    near = [each.candidate for each in tuned.fastest[:3]]
    assert [each.again for each in tuned.fastest[:3]] == [3.0, 1.0, 2.0]
    assert all(each.again is None for each in tuned.fastest[3:])
    assert tuned.choice == near[1]
    assert "the 3 fastest again, in turns\n" in printed
    tuned, printed = worlds(4).run(tuned_by, order(tmp_path / "b"), Stand(alike), incomparable)[0]
    assert tuned.choice == near[0] and "not compared: not all at once\n" in printed


def turns(config: Config) -> list[float]:
    wanted = [Candidate(Mesh(1, 2, 1), AttentionChoice("ring")), Candidate(Mesh(1, 1, 2), AttentionChoice("ulysses"))]
    return bench.compare(config, wanted, torch.device("cpu"), 3)


def test_ranks_agree_on_seconds_of_turns(worlds):
    found = worlds(2).run(turns, SMALL)
    assert found[0] == found[1] and len(found[0]) == 2 and min(found[0]) > 0


# -- the planner --------------------------------------------------------------------------------------------------


def test_what_is_predicted_slow_or_too_large_is_left_out_and_the_rest_goes_fastest_first():
    a, b, c, d = list(candidates(heads=4, ranks=4, rows=1))[:4]
    predictions = [
        CandidatePrediction(a, 3.1),
        CandidatePrediction(b, 3.0),
        CandidatePrediction(c, 2.0),
        CandidatePrediction(d, 1.0, "9 of 8 GiB"),
    ]
    wanted, left_out = parted(predictions, slower=1.5)
    assert wanted == [c, b]
    assert left_out == [
        Measured(a, reason="predicted to take 1.55 times as long as the fastest"),
        Measured(d, reason="predicted not to fit: 9 of 8 GiB"),
    ]
    assert parted([CandidatePrediction(a, 1.0, "all"), CandidatePrediction(b, 2.0, "all")], slower=3)[0] == [a, b]


BIG = replace(
    SMALL,
    model=ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336),
    data=DataConfig(sequence_length=131_072, global_batch_size=1),
    checkpointing=Checkpointing("attention_output", offload=True),
    optimizer=OptimizerConfig(cpu_offload=True),
)


def test_the_planner_prunes_by_time_and_by_memory(tmp_path):
    asked = Order(run=BIG, cluster="8xh100", slower=1.05)
    every = all_candidates(asked, 8)
    wanted, left_out = pruned(asked, 8, torch.bfloat16, every)
    assert 0 < len(wanted) < len(every)
    assert {*wanted, *(each.candidate for each in left_out)} == set(every)
    assert all("times as long as the fastest" in (each.reason or "") for each in left_out)
    predict = predictor(asked, 8, torch.bfloat16)
    times = [predict(candidate).seconds for candidate in wanted]
    assert times == sorted(times) and times[-1] <= 1.05 * times[0]
    assert len(pruned(replace(asked, slower=1e9), 8, torch.bfloat16, every)[0]) == len(every)
    longer = replace(BIG, data=DataConfig(sequence_length=3_000_000, global_batch_size=1))
    wanted, left_out = pruned(replace(asked, run=longer, slower=9), 8, torch.bfloat16, every)
    reasons = {str(each.candidate): each.reason or "" for each in left_out}
    assert reasons["token_ring on ring 8"].startswith("predicted not to fit: ")
    assert "upipe, 8 heads a stage on ulysses 8" in list(map(str, wanted))  # stages take little
    with pytest.raises(ValueError, match="--cluster 8xh100 has 8 ranks, and 4 are running"):
        pruned(asked, 4, torch.bfloat16, all_candidates(asked, 4))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--iterations", "0"], "--iterations 0: must be at least 1"),
        (["--slower", "0.9"], "--slower 0.9: must be at least 1"),
        (["--attention", "rign"], "--attention rign: no such method; known: local, ring,"),
        (["--cluster", "8xh100", "--parallel.tp", "2"], "the planner knows neither --parallel.replicate 1 nor"),
        (["--iteratoins", "3"], "--iteratoins"),
    ],
)
def test_orders_that_will_not_do_are_refused(flags, said):
    with pytest.raises(ValueError) as error:
        read_order(flags)
    assert said in str(error.value)


# -- the choice ---------------------------------------------------------------------------------------------------


CHOSEN = Candidate(Mesh(1, 2, 2), AttentionChoice("upipe+ring", 2))


def chosen(folder: Path, config: Config = SMALL, recipe: str | None = None) -> Path:
    """The file of a choice."""
    asked = replace(order(folder, config), recipe=recipe)
    tuner.write_files(asked, Tuned(question_of(config, 4, "float32"), complete=True, choice=CHOSEN))
    return asked.out


def trained(config: Config, folder: Path) -> tuple[list[float], dict[str, int]]:
    config = replace(config, train=replace(config.train, output=folder))
    with redirect_stdout(io.StringIO()), process_group(config) as device:
        run = prepare(config, device)
        losses = train(run).losses
    return losses, {name: getattr(run.config.parallel, name) for name in ("shard", "ring", "ulysses")}


def test_the_trainer_takes_the_choice_and_is_told_everything_else_too(worlds, tmp_path):
    path = chosen(tmp_path)
    command, overrides = read_command(["--config", str(path)])
    written_out = ParallelConfig(ring=2, ulysses=2, attention="upipe+ring", heads_per_stage=2)
    assert command.run == replace(SMALL, parallel=written_out)
    assert "  parallel.ring             none -> 2" in overrides
    (losses, axes), *others = worlds(4).run(trained, command.run, tmp_path / "run")
    assert len(losses) == 3 and axes == {"shard": 1, "ring": 2, "ulysses": 2}
    assert all(found == (losses, axes) for found in others)


def test_the_file_begins_with_the_recipe_and_flags_win_over_it(tmp_path):
    recipe = recipes.llama3_8b_1m()
    config = replace(recipe, data=replace(recipe.data, path=(Path('a "b"'), Path("c")), weights=(1.0, 0.5)))
    path = chosen(tmp_path, config, "llama3_8b_1m")
    lines = path.read_text().splitlines()
    assert lines[0] == f"# {CHOSEN}, measured by armillary-tune to be fastest on 4 ranks"
    assert lines[1] == 'recipe = "llama3_8b_1m"' and "steps" not in path.read_text()
    run = read_command(["--config", str(path), "--parallel.ring", "4"])[0].run
    assert run == replace(config, parallel=run.parallel)
    assert (run.parallel.ring, run.parallel.ulysses, run.parallel.attention) == (4, 2, "upipe+ring")


def test_a_choice_that_was_removed_is_written_again(worlds, tmp_path):
    worlds(2).run(killed_and_resumed, order(tmp_path), [])
    before = (tmp_path / "tuned.toml").read_bytes()
    (tmp_path / "tuned.toml").unlink()
    assert worlds(2).run(killed_and_resumed, order(tmp_path), [])[0][0] == [[]]
    assert (tmp_path / "tuned.toml").read_bytes() == before


def test_a_choice_for_other_ranks_is_refused_by_its_mesh(worlds, tmp_path):
    config = read_command(["--config", str(chosen(tmp_path))])[0].run
    for message in worlds(2).run(start_refused, config):
        assert "ring 2 x ulysses 2 x tp 1 = 4 ranks, but 2 are running" in message


def start_refused(config: Config) -> str:
    with pytest.raises(ValueError) as error, process_group(config) as device:
        prepare(config, device)
    return str(error.value)


def test_measurements_that_are_none_are_refused(worlds, tmp_path):
    for text, why in (('{"question": 3}', "question: Input should be an object"), ("[" * 100_000, "")):
        (tmp_path / "tuned.json").write_text(text)
        for message in worlds(2).run(refusal, order(tmp_path)):
            assert message.startswith(f"--out {tmp_path}/tuned.json: is no file of armillary-tune ({why}")
