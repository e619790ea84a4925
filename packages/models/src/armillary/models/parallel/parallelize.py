"""`parallelize`: puts attention, checkpointing, tensor parallelism, torch.compile and FSDP2 onto a plain model."""

from __future__ import annotations

from types import MethodType
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from armillary.attention import Method
from armillary.attention.internal import check_rank_grid, sequence_axis
from armillary.core import Axis, accumulation_dtype, sum_gradients
from armillary.core.internal import compat
from armillary.models.activation_checkpoint.policy import Checkpointing
from armillary.models.block import Block, run_plainly
from armillary.models.gpt import GPT
from armillary.models.layers.state_mixers import StateMixer
from armillary.models.llama import HybridDecoder, Llama
from armillary.models.parallel.tensor_parallelism import styles_for, tensor_parallel

ZeroStage = Literal[1, 2, 3]

# Mesh axes over which parameters are sharded. They are flattened into one axis.
SHARDING = ("shard", "nodes", "devices", "ring", "ulysses")


def parallelize(
    model: Llama | GPT,
    mesh: DeviceMesh,
    *,
    attention: Method | None = None,
    checkpointing: Checkpointing | None = None,
    precision: torch.dtype | None = torch.float32,
    cpu_offload: bool = False,
    compiler: str | None = None,
    zero_stage: ZeroStage = 3,
    contiguous_states: bool = False,
) -> None:
    """Distributes the model over the mesh, in place. The model is then called as before, with this rank's tokens.

    Sets attention and checkpointing; then applies tensor parallelism over `tp`, if the mesh has that axis; then
    torch.compile to each block; then FSDP2 over shard x ring x ulysses, with copies over `replicate`. Build the model
    on "meta", and call `to_empty` and `initialize` or `load_pretrained` afterwards:

        with torch.device("meta"):
            model = Llama(LlamaConfig.llama3_8b())
        attend = build_attention("usp", mesh)
        parallelize(model, mesh, attention=attend, precision=torch.bfloat16)
        model.to_empty(device="cuda")
        initialize(model, seed=0)

    Args:
        mesh: a mesh with some of the axes replicate, shard, ring, ulysses and tp, such as `build_mesh` returns. FSDP2
            needs at least one of shard, ring and ulysses. `nodes` and `devices` count as `ring` does.
        attention: method for all layers, over axes of this mesh; by default unchanged. With `tp` it gets this rank's
            heads.
        checkpointing: the activation checkpointing policy; by default blocks run as before.
        precision: dtype of forward and backward under FSDP2. Weights keep their dtype; gradients are reduced in float32
            (float64 for float64). None does not apply FSDP2: parameters are not sharded, and the caller must sum
            gradients over ranks.
        cpu_offload: True lets FSDP2 keep parameters, gradients and the optimizer's state in the host's memory.
        compiler: backend of torch.compile, such as "inductor", for each block. Under a checkpoint policy,
            or with `Checkpointing(tiled=True)`, only the token-wise part is compiled, not attention. Each layout needs
            a graph of its own: beyond Dynamo's limit of graphs, blocks run eagerly, with a warning.
        zero_stage: stage of ZeRO under FSDP2. 3 gathers a block's parameters twice per micro-batch, for forward and for
            backward; 2 gathers them once per micro-batch, and 1 once per step (`begin_micro_batch`).
        contiguous_states: True moves hidden states to contiguous shards before a hybrid's layers with a state, and back
            after them (`relayout`). For each group of adjacent layers with a state, a rank sends at most 2 B T E
            elements in forward, and as many in backward. Attention keeps the layout of the call.

    Raises:
        ValueError: an argument does not fit the model or the mesh. Raised before any module or parameter is changed.
    """
    # 1. Check everything before anything changes.
    check(model, mesh, attention, precision, compiler, zero_stage, contiguous_states)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if checkpointing is not None:
        checkpointing.tensors_by_block(len(blocks))  # raises for counts above the number of blocks
    # 2. Attention and checkpointing are attributes of the blocks.
    for block in blocks:
        block.attention = block.attention if attention is None else attention
    if checkpointing is not None:
        checkpointing.apply(model)  # raises, before it changes anything, if the blocks' own attention is no `Method`
    for module in model.modules():
        if isinstance(module, HybridDecoder):
            module.contiguous_states = contiguous_states
    # 3. Modules and parameters. The order matters: the compiled graphs must contain the modules of tensor parallelism,
    # and must not contain FSDP's hooks.
    if "tp" in (mesh.mesh_dim_names or ()):
        tensor_parallel(model, mesh["tp"])
    if compiler is not None:
        for block in blocks:
            compile_block(block, compiler)
    if precision is not None:
        shard_parameters(model, mesh, precision, cpu_offload, zero_stage)


def check(
    model: Llama | GPT,
    mesh: DeviceMesh,
    attention: Method | None,
    precision: torch.dtype | None,
    compiler: str | None,
    zero_stage: int,
    contiguous_states: bool,
) -> None:
    """Raises ValueError for arguments of `parallelize` that do not fit this model or mesh. Changes nothing."""
    config, is_tensor_parallel = model.config, "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor: the model is already on a mesh")
    if precision is not None:
        sharding_axes(mesh)
    if is_tensor_parallel:
        styles_for(model, Axis.of(mesh["tp"]))
    if attention is not None:
        ranks = mesh["tp"].size() if is_tensor_parallel else 1
        heads = (config.heads // ranks, config.kv_heads // ranks)
        q, k = (torch.empty(1, 1, count, config.head_dim, device="meta") for count in heads)
        attention.check(q, k, k[..., :1].expand(-1, -1, -1, config.value_dim))
        for axis in attention.axes if is_tensor_parallel else ():
            check_rank_grid(Axis.of(mesh["tp"]), axis)
    if contiguous_states and is_tensor_parallel:
        # Between blocks each of the R ranks of tp has every R-th token of the shard. No `SequenceLayout` describes it.
        raise ValueError(f"contiguous_states=True on {mesh['tp'].size()} ranks of tp: its tokens cannot be moved")
    for block in model.modules():
        if isinstance(block, Block) and isinstance(block.mixer, StateMixer):
            method = block.attention if attention is None else attention
            if isinstance(method, Method):
                sequence_axis(method)  # raises if a layer with a state cannot share a sequence over these ranks
    compilers = [] if compiler is None else torch.compiler.list_backends(exclude_tags=())
    if compiler is not None and compiler not in compilers:
        raise ValueError(f"compiler {compiler!r} must be one of {', '.join(compilers)}")
    if zero_stage not in get_args(ZeroStage):
        raise ValueError(f"zero_stage={zero_stage!r}: 1, 2 and 3 are accepted")


def compile_block(block: Block, compiler: str, fullgraph: bool = False) -> None:
    """Compiles a block in place, or its token-wise part if a checkpoint policy runs it in parts."""
    # With `fullgraph`, torch raises for a graph break, and also beyond Dynamo's limit of graphs per function. Therefore
    # it is False in training, which should continue beyond that limit.
    target: nn.Module = block
    if block.run is run_plainly:
        compiled = torch.compile(run_plainly, backend=compiler, fullgraph=fullgraph)
        # Inside the graph, the short convolution's exchange returns a number of tokens that depends on the documents.
        target.run = compat.with_dynamic_results(compiled) if isinstance(block.mixer, StateMixer) else compiled
    else:
        compiled = torch.compile(type(block).after_attention, backend=compiler, fullgraph=fullgraph)
        target.after_attention = MethodType(compiled, block)


def shard_parameters(
    model: Llama | GPT, mesh: DeviceMesh, precision: torch.dtype, cpu_offload: bool = False, zero_stage: ZeroStage = 3
) -> None:
    """Applies FSDP2 in place: shards parameters over the mesh axes `SHARDING`, and replicates over `replicate` (HSDP).

    Each block is a unit of FSDP2, whose parameters are gathered when it runs. So are the embedding table and the head,
    if they are not tied. Gradients are summed over all ranks, not averaged: divide the loss by the global number of
    labels.

    Args:
        mesh: a mesh with some of these axes, and possibly others, such as `build_mesh` returns.
        precision: dtype of forward and backward. Gradients are reduced in float32 (float64 for float64).
        cpu_offload: True keeps parameters, gradients and optimizer state in the host's memory.
        zero_stage: 3 frees a block's gathered parameters after its forward, and gathers them again in backward. 2 keeps
            them from forward to backward. Both shard gradients and optimizer state. 1 shards only optimizer state: call
            `armillary.models.parallel.begin_micro_batch` before each micro-batch of a step. Without these calls, 1 is
            the same as 2.

    Raises:
        ValueError: the mesh has none of the sharding axes.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=accumulation_dtype(precision))
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    # 1. A 1-D mesh over the sharding axes, or 2-D [replicate, sharding] for HSDP.
    fsdp_mesh = compat.flatten(mesh, sharding_axes(mesh), "fsdp")
    if "replicate" in (mesh.mesh_dim_names or ()) and mesh["replicate"].size() > 1:
        fsdp_mesh = compat.join(mesh["replicate"], fsdp_mesh)
    # 2. The units, inner modules first: a unit has the parameters that no inner unit has. True for units that stay
    # gathered from forward to backward, because they are used last in forward and first in backward: the head, and the
    # model itself, which has among others the final norm and tied weights.
    units: list[tuple[nn.Module, bool]] = [(module, False) for module in model.modules() if isinstance(module, Block)]
    if isinstance(model, Llama) and model.lm_head is not None:
        units += [(model.model.embed_tokens, False), (model.lm_head, True)]
    for module, stays_gathered in (*units, (model, True)):
        fully_shard(
            module,
            mesh=fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            reshard_after_forward=zero_stage == 3 and not stays_gathered,
        )
    sum_gradients(model)  # FSDP2 would average them


def sharding_axes(mesh: DeviceMesh) -> list[str]:
    """Returns the axes of the mesh over which parameters are sharded. Raises ValueError if it has none."""
    names = mesh.mesh_dim_names or ()
    axes = [name for name in SHARDING if name in names]
    if not axes:
        available = ", ".join(names) or "no names"
        raise ValueError(f"parameters are sharded over any of {', '.join(SHARDING)}; the mesh has {available}")
    return axes


def begin_micro_batch(model: nn.Module, last: bool) -> None:
    """Starts a micro-batch under ZeRO stage 1. Call it on every rank before each micro-batch's forward.

    Gathered parameters and unsharded gradients stay until the step's last micro-batch. So a step gathers
    parameters once, and reduces gradients once.

    Args:
        model: a model after `shard_parameters`.
        last: True for the last micro-batch of a step.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)  # reduce-scatter gradients only in the last backward
    model.set_reshard_after_backward(last)  # free gathered parameters only after the last backward
    model.set_is_last_backward(last)  # the last backward waits at its end for the reductions
