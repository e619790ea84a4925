"""A small training run on gloo ranks, for tests."""

import io
import resource
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import armillary.train
from armillary.train import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    Summary,
    TrainConfig,
    ValidationConfig,
    prepare,
    process_group,
    train_loop,
)

TEXT = (Path(armillary.train.__file__).parent,)
"""Small, since reading all of Python's source would take longer than training."""
SMALL = Config(
    model=ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, hidden_dim=48),
    data=DataConfig(path=TEXT, sequence_length=60, global_batch_size=4),
    validation=ValidationConfig(every=20, batches=1),
    log=LogConfig(plot=False),
    train=TrainConfig(steps=6, device="cpu"),
)


def at(config: Config, folder: Path, **changes: Any) -> Config:
    """Returns the configuration with this output folder, and other changes of its section `train`."""
    return replace(config, train=replace(config.train, output=folder, **changes))


def on_mesh(config: Config, **axes: Any) -> Config:
    """Returns the configuration on a mesh with these axes and no others."""
    return replace(config, parallel=ParallelConfig(**{"ring": 1, "ulysses": 1} | axes))


@contextmanager
def file_size_limit(count: int) -> Generator[None]:
    """Lets this process write only files of up to `count` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def train_small(config: Config) -> tuple[Summary, str]:
    """Trains on this rank; returns the summary and the output."""
    output = io.StringIO()
    with redirect_stdout(output), process_group(config) as device:
        summary = train_loop(prepare(config, device))
    return summary, output.getvalue()
