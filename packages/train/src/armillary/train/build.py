"""Building a run from its configuration: the process group, the model on its mesh, rows of data, and the optimizer."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method
from armillary.attention.internal import choose_kernel
from armillary.core import Axis, SequenceLayout, accumulation_dtype, build_mesh, start_process_group, world_size
from armillary.data import Batch, PackedSequences, TokenStore, check_length, python_corpus
from armillary.data.console import flag_in_errors, is_out_of_memory
from armillary.data.internal import PACKINGS, Documents, open_tokens, read_tokenizer
from armillary.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    initialize,
    load_pretrained,
    parallelize,
    pretrained_config,
)
from armillary.models.internal import meta_model, weight_map
from armillary.train.axes import choose_axes, data_mesh, mesh_axes
from armillary.train.checkpoint import check_output
from armillary.train.config.check import check_config, check_log, configured_method, model_config
from armillary.train.config.overlay import by_flag
from armillary.train.config.sections import Config, DataConfig, ModelConfig
from armillary.train.device import (
    CONNECTIONS,
    allocator_settings,
    choose_device,
    connections,
    cuda_setup,
    inputs_of,
    kernel_with_sm_margin,
    set_allocator,
)
from armillary.train.optimizer import build_optimizer
from armillary.train.ranks import check_consistent
from armillary.train.step import Run, batch_mask, shards_states


@contextmanager
def process_group(config: Config) -> Generator[torch.device]:
    """Context manager that starts a default process group, unless the caller has one; yields this rank's device.

    Raises:
        ValueError: the configuration is invalid, or this machine cannot run it.
        TimeoutError: other ranks did not arrive.
    """
    # 1. Checks that need no other rank come before the ranks wait for each other.
    check_config(config)
    if config.train.device != "cpu":
        os.environ[CONNECTIONS] = str(connections(config.cuda))  # CUDA reads it when it starts
    device = choose_device(config.train)
    check_log(config.log, config.train.steps, device)
    if device.type == "cuda":
        set_allocator(allocator_settings(config.cuda.expandable_segments))  # before the first allocation
    check_kernel(config, precision(config, device), device)
    # 2. The default process group. A group that the caller started is not destroyed below.
    owns_group = not dist.is_initialized()
    if owns_group:
        with_gloo = config.optimizer.cpu_offload  # besides NCCL, for gradients in the host's memory
        start_process_group(device.type, collective_timeout(config), with_gloo=with_gloo, bind=config.cuda.bind_device)
    yield device
    # After an error the group is not destroyed (no `finally`): that could wait for ranks that are in a collective.
    if owns_group:
        dist.destroy_process_group()


def prepare(config: Config, device: torch.device) -> Run:
    """Returns a run, with its mesh, data, model and optimizer. Every rank must call it.

    Raises:
        ValueError: configuration or data are invalid, or differ between ranks.
    """
    # 1. The mesh. Ranks with different flags would wait for each other in different collectives, so they are refused.
    axes = choose_axes(config, world_size())
    check_consistent("the configuration", by_flag(config) | axes)
    if config.model.pretrained is not None:
        weight_map(config.model.pretrained)  # raises for a folder without weights, before memory is allocated for them
    mesh = mesh_of(config, device, axes)
    # 2. The model, with an embedding for each token of the data's vocabulary, on the meta device (without memory).
    stores = open_stores(config.data, config.model.pretrained)
    vocab_size = vocabulary_size(stores, config.model)
    stores = [store.with_vocabulary(vocab_size) for store in stores]
    sizes = model_config(config.model, vocab_size, config.data.sequence_length)
    model, attention = shard_model(sizes, config, mesh, precision(config, device))
    attention.kernel = kernel_with_sm_margin(config, model.config, precision(config, device), device, axes["ring"])
    check_output(config)
    # 3. The rows. Ranks of one replica (ring x ulysses x tp) share the same rows; each replica has rows of its own.
    replica = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    training, validation = load_rows(config, stores, attention, replica)
    check_consistent("data", training.state_dict())  # hosts may have other files at the same path
    # 4. Weights and optimizer. Each rank keeps only its shards.
    with parameters_in_errors(model):
        model.to_empty(device="cpu" if config.optimizer.cpu_offload else device)
    if config.model.pretrained is None:
        initialize(model, config.train.seed)
    else:
        load_pretrained(model, config.model.pretrained)
    optimizer = build_optimizer(model, config.optimizer)
    data_axis = Axis.of(data_mesh(mesh))  # all ranks that have different tokens
    return Run(config, device, data_axis, model, optimizer, training, validation)


@contextmanager
def parameters_in_errors(model: Llama | GPT) -> Generator[None]:
    """Puts the model's sizes in front of the message of an error of its block that says that memory is exhausted."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        count, vocabulary = sum(parameter.numel() for parameter in model.parameters()), model.config.vocab_size
        sizes = f"--model: {count:,} parameters, with a vocabulary of {vocabulary:,} tokens"
        raise MemoryError(f"{sizes}, do not fit into the memory of rank {dist.get_rank()}: {error}") from error


def check_kernel(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the configured kernel cannot run the model's attention on this device, and names others."""
    model = model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)
    with flag_in_errors(f"--parallel.kernel {config.parallel.kernel}"):
        choose_kernel(inputs_of(config, model, dtype, device), config.parallel.kernel)


def mesh_of(config: Config, device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """Returns the mesh for axes of `choose_axes`, with the configured communicators. Every rank must call it."""
    setup, timeout = cuda_setup(config, axes["ring"]), collective_timeout(config)
    # Some methods split `ring` into `nodes` and `devices`, which then get the priority of `ring`.
    high_priority = (*setup.high_priority, "nodes", "devices") if setup.high_priority else ()
    return build_mesh(
        device.type, **mesh_axes(config, axes), timeout=timeout, high_priority=high_priority, max_ctas=setup.max_ctas
    )


def collective_timeout(config: Config) -> timedelta:
    """Returns the time-out of collectives: above that of a step after the first, which the watchdog thus ends first."""
    return timedelta(minutes=1 + 1.5 * config.train.timeout_minutes)


def shard_model(
    sizes: LlamaConfig | GPTConfig, config: Config, mesh: DeviceMesh, precision: torch.dtype
) -> tuple[Llama | GPT, Method]:
    """Returns a model on the meta device, with parameters sharded over the mesh, and its attention method.

    Args:
        sizes: sizes of the configured model, or of a smaller one, such as the tuner's single block.
        config: its sections `parallel` and `checkpointing`, and the optimizer's offload, are applied to the model.
        precision: dtype of forward and backward; parameters have its `accumulation_dtype`.

    Raises:
        ValueError: sizes that do not fit the mesh or the attention method.
    """
    parallel = config.parallel
    attention = configured_method(parallel).build(mesh)
    attention.kernel = parallel.kernel
    # Parameters have no memory yet: `prepare` allocates only this rank's shards.
    model = meta_model(sizes).to(accumulation_dtype(precision))
    parallelize(
        model,
        mesh,
        attention=attention,
        checkpointing=config.checkpointing,
        precision=precision,
        cpu_offload=config.optimizer.cpu_offload,
        compiler=parallel.compiler,
        zero_stage=parallel.zero_stage,
        contiguous_states=parallel.contiguous_states,
    )
    return model, attention


def precision(config: Config, device: torch.device) -> torch.dtype:
    """Returns the dtype of forward and backward; weights, gradients and optimizer have its `accumulation_dtype`."""
    setting = config.train.precision
    if setting == "auto":
        setting = "bfloat16" if device.type == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[setting]


def open_stores(config: DataConfig, pretrained: Path | None = None) -> list[TokenStore]:
    """Returns the stores at the configured paths; text is tokenized in memory, as the pretrained folder says.

    Raises ValueError if a path is unreadable, incomplete or without text, or its tokens are not the pretrained model's.
    """
    if not config.path:
        return [TokenStore.of(python_corpus(), read_tokenizer(pretrained), "Python's own text")]
    return [open_tokens(path, pretrained) for path in config.path]


def vocabulary_size(stores: list[TokenStore], model: ModelConfig) -> int:
    """Returns the vocabulary size of the model: from the pretrained folder or the flag, else from the stores."""
    store_size = max((store.vocabulary.size for store in stores if store.vocabulary.size), default=None)
    size = model.vocab_size if model.pretrained is None else pretrained_config(model.pretrained).vocab_size
    if size is None and store_size is None:
        raise ValueError(f"{stores[0].name} does not record the size of its vocabulary; set --model.vocab-size")
    if size is not None and store_size is not None and size < store_size:
        tokens = f"the tokens of the data go up to {store_size - 1}"
        if model.pretrained is not None:
            raise ValueError(f"--model.pretrained {model.pretrained}: its vocabulary has {size} tokens, but {tokens}")
        raise ValueError(f"--model.vocab-size {size}: {tokens}; give at least {store_size}")
    return size or store_size or 0


def load_rows(
    config: Config, stores: list[TokenStore], attention: Method, replica: int
) -> tuple[PackedSequences, PackedSequences]:
    """Returns packed rows for training and for validation, from disjoint sets of documents.

    Args:
        attention: method whose layout and shard decide which tokens of a row this rank reads.
        replica: this rank's data-parallel index.

    Raises:
        ValueError: the stores' documents cannot be split or mixed, or have fewer tokens in total than a row.
    """
    length, kind = config.data.sequence_length, config.data.layout
    states = shards_states(config, model_config(config.model, config.model.vocab_size or 1, length))
    with flag_in_errors("--data.sequence-length"):  # fewer tokens than shards, or more than the stores have
        check_length(stores, length)
        layout = attention.layout(length, kind, states=states)

    # A balanced layout gives ranks nearly equal numbers of visible pairs, which depend on the batch's documents.
    def balanced_layout(documents: Documents) -> SequenceLayout:
        return attention.layout(length, "balanced", batch_mask(documents, None, config.data.documents), states)

    # The loader's thread plans attention (tiles and sends) for the next batch, while the current one trains.
    def plan(batch: Batch) -> None:
        mask = batch_mask(batch.documents, None, config.data.documents)
        attention.plan_ahead(mask, batch.layout, len(batch.documents))

    def rows(stores_subset: list[TokenStore]) -> PackedSequences:
        return PackedSequences(
            stores_subset,
            layout=layout,
            shard=attention.shard,
            rows_per_batch=config.rows_per_batch,
            packing=PACKINGS[config.data.packing],
            weights=config.data.weights or None,
            seed=config.train.seed,
            replica=replica,
            replicas=config.replicas,
            reset_positions=config.data.reset_positions,
            layout_for=balanced_layout if kind == "balanced" and config.data.documents else None,
            # Without documents every batch has the same mask and layout: the first call's plan serves all.
            plan=plan if config.data.documents else None,
        )

    training, validation = zip(*(store.split(config.data.validation_fraction) for store in stores), strict=True)
    return rows(list(training)), rows(list(validation))
