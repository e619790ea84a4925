"""`parallelize`: puts attention, checkpointing, tensor parallelism, torch.compile and FSDP2 onto a plain model."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from armillary.attention import Method
from armillary.attention.context_parallel.communication import sequence_axis
from armillary.attention.methods.rank_grid import check_rank_grid
from armillary.core import Axis, compat
from armillary.models.activation_checkpoint.policy import Checkpointing
from armillary.models.block import Block, Decoder, run_plainly
from armillary.models.gpt import GPT
from armillary.models.layers.state_mixers import StateMixer
from armillary.models.llama import Llama
from armillary.models.parallel.fsdp import ZeroStage, shard_parameters, sharding_axes
from armillary.models.parallel.tensor import styles_for, tensor_parallel


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
    """Puts the model onto the mesh, in place. Its call is unchanged, on this rank's tokens of the sequence.

    Sets attention and checkpointing; then applies tensor parallelism over `tp`, if the mesh has that axis; then
    torch.compile, per block; then FSDP2 over shard x ring x ulysses, replicated over replicate. Build the model on
    "meta", and call `to_empty` and `initialize` or `load_pretrained` afterwards:

        with torch.device("meta"):
            model = Llama(LlamaConfig.llama3_8b())
        attend = build_attention("usp", mesh)
        parallelize(model, mesh, attention=attend, precision=torch.bfloat16)
        model.to_empty(device="cuda")
        initialize(model, seed=0)

    Args:
        mesh: such as `build_mesh` returns, with some of the axes replicate, shard, ring, ulysses and tp; FSDP2 needs at
            least one of shard, ring and ulysses.
        attention: method for all layers, over this mesh's axes; by default unchanged. It sees this rank's heads of
            `tp`.
        checkpointing: the activation checkpointing policy; by default blocks keep all tensors.
        precision: dtype of forward and backward under FSDP2, whose master weights and reductions are float32. None: no
            FSDP2, parameters are not sharded, and the caller sums gradients over ranks.
        cpu_offload: FSDP2 keeps parameters, gradients and the optimizer's state in the host's memory.
        compiler: backend of torch.compile, such as "inductor": each block becomes one graph. Under a checkpoint policy
            only the token-wise part is compiled, not attention. One graph per layout of the shards: beyond Dynamo's
            limit of graphs, blocks run eagerly, with a warning.
        zero_stage: under FSDP2, 2 gathers a block's parameters once for forward and backward, 3 once for each; 1 once
            a step (`begin_micro_batch`).
        contiguous_states: hidden states move to contiguous shards before a hybrid's layers with a state, and back after
            them (`relayout`): 2 B T E elements at most for each run of such layers, forward and backward. Attention has
            the layout of the call.

    Raises:
        ValueError: something does not fit the model or the mesh. Raised before any module or parameter is changed.
    """
    # 1. Check everything before anything changes.
    check(model, mesh, attention, precision, compiler, contiguous_states)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if checkpointing is not None:
        checkpointing.tensors_by_block(len(blocks))  # raises for counts above the number of blocks
    # 2. Attention and checkpointing are attributes of the blocks.
    for block in blocks:
        block.attention = block.attention if attention is None else attention
    for module in model.modules():
        if isinstance(module, Decoder):
            module.contiguous_states = contiguous_states
    if checkpointing is not None:
        checkpointing.apply(model)
    # 3. Modules and parameters, in this order only: graphs contain the modules of tensor parallelism, and FSDP's hooks
    # stay outside of graphs.
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
    contiguous_states: bool,
) -> None:
    """Raises ValueError for settings that do not fit this model or mesh, before anything is changed."""
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
        attention.check(q, k, k)
        for axis in attention.axes if is_tensor_parallel else ():
            check_rank_grid(Axis.of(mesh["tp"]), axis)
    if contiguous_states and is_tensor_parallel:
        # Between blocks each rank of tp has every R-th token of its shard, which no `SequenceLayout` describes.
        raise ValueError(f"contiguous_states=True on {mesh['tp'].size()} ranks of tp: its tokens cannot be moved")
    for block in model.modules():
        if isinstance(block, Block) and isinstance(block.mixer, StateMixer):
            method = block.attention if attention is None else attention
            if isinstance(method, Method):
                sequence_axis(method)  # refuses ranks on which a layer with a state cannot share a sequence
    compilers = [] if compiler is None else torch.compiler.list_backends(exclude_tags=())
    if compiler is not None and compiler not in compilers:
        raise ValueError(f"compiler {compiler!r} must be one of {', '.join(compilers)}")


def compile_block(block: Block, compiler: str, fullgraph: bool = False) -> None:
    """Compiles a block in place, or its token-wise part if a checkpoint policy runs it in parts.

    Args:
        fullgraph: raises an error for a graph break, but also beyond Dynamo's limit of graphs per function. Therefore
            off in training: reaching that limit should not end a run.
    """
    target: nn.Module = block
    if block.run is run_plainly:
        compiled = torch.compile(run_plainly, backend=compiler, fullgraph=fullgraph)
        # A mixer's short convolution returns as many tokens of halos as the mask has documents.
        target.run = compat.with_dynamic_results(compiled) if isinstance(block.mixer, StateMixer) else compiled
    else:
        compiled_rest = torch.compile(type(block).after_attention, backend=compiler, fullgraph=fullgraph)
        target.after_attention = MethodType(compiled_rest, block)
