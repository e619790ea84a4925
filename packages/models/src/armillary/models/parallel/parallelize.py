"""Attention, checkpointing, tensor parallelism, compilation and FSDP2 of a plain model, in the order that works."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from armillary.attention import Method
from armillary.attention.methods.rank_grid import check_rank_grid
from armillary.core import Axis
from armillary.models.activation_checkpoint.policy import Checkpointing
from armillary.models.block import Block, run_plainly
from armillary.models.gpt import GPT
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
) -> None:
    """Puts the model onto the mesh, in place. It is called as before, on this rank's tokens of the sequence.

    First attention and checkpoints; then tensor parallelism over `tp`, if the mesh has such an axis; then
    torch.compile, block by block; then FSDP2 over shard x ring x ulysses, with copies over replicate. Best built on
    "meta", followed by `to_empty` and `initialize` or `load_pretrained`.

        with torch.device("meta"):
            model = Llama(LlamaConfig.llama3_8b())
        attend = build_attention("usp", mesh)
        parallelize(model, mesh, attention=attend, precision=torch.bfloat16)
        model.to_empty(device="cuda")
        initialize(model, seed=0)

    Args:
        mesh: such as `build_mesh` makes; some of replicate, shard, ring, ulysses and tp are enough, among them one of
            shard, ring and ulysses for FSDP2.
        attention: for all layers, over this mesh's axes; as it is unless given. Heads are this rank's of `tp`.
        checkpointing: what blocks keep for backward; all unless given.
        precision: of forward and backward under FSDP2, whose master weights and reductions are float32; None: no FSDP2,
            parameters stay whole, and it is the caller who sums gradients over ranks.
        cpu_offload: FSDP2 keeps parameters, gradients and the optimizer's state in the host's memory.
        compiler: backend of torch.compile, such as "inductor": each block becomes one graph. Where blocks are run in
            parts (a checkpoint policy), what follows attention is compiled, and attention is not. Shards of more than a
            few different layouts are run as they are, with a warning: a graph is made for a layout.
        zero_stage: under FSDP2, 2 gathers a block's parameters once for forward and backward, 3 once for each.

    Raises:
        ValueError: something does not fit the model or the mesh. Raised before any module or parameter is changed.
    """
    check(model, mesh, attention, precision, compiler)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if checkpointing is not None:
        checkpointing.kept_by_blocks(len(blocks))
    for block in blocks:
        block.attention = block.attention if attention is None else attention
    if checkpointing is not None:
        checkpointing.apply(model)
    if "tp" in (mesh.mesh_dim_names or ()):
        tensor_parallel(model, mesh["tp"])
    if compiler is not None:
        for block in blocks:
            compile_block(block, compiler)
    if precision is not None:
        shard_parameters(model, mesh, precision, cpu_offload, zero_stage)


def check(
    model: Llama | GPT, mesh: DeviceMesh, attention: Method | None, precision: torch.dtype | None, compiler: str | None
) -> None:
    """Refuses settings that do not fit this model or mesh, before anything is changed."""
    config, cut = model.config, "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor: the model is on a mesh already")
    if precision is not None:
        sharding_axes(mesh)
    if cut:
        styles_for(model, Axis.of(mesh["tp"]))
    if attention is not None:
        ranks = mesh["tp"].size() if cut else 1
        heads = (config.heads // ranks, config.kv_heads // ranks)
        q, k = (torch.empty(1, 1, count, config.head_dim, device="meta") for count in heads)
        attention.check(q, k, k)
        for axis in attention.axes if cut else ():
            check_rank_grid(Axis.of(mesh["tp"]), axis)
    compilers = [] if compiler is None else torch.compiler.list_backends(exclude_tags=())
    if compiler is not None and compiler not in compilers:
        raise ValueError(f"no compiler {compiler!r}; known: {', '.join(compilers)}")


def compile_block(block: Block, compiler: str, fullgraph: bool = False) -> None:
    """Compiles a block in place, or its token-wise part if a checkpoint policy runs it in parts.

    Args:
        fullgraph: more than one graph is an error. So is a graph beyond Dynamo's limit for a function, which should not
            end a training run.
    """
    compiled: nn.Module = block
    if block.run is run_plainly:
        compiled.run = torch.compile(run_plainly, backend=compiler, fullgraph=fullgraph)
    else:
        compiled_rest = torch.compile(type(block).rest, backend=compiler, fullgraph=fullgraph)
        compiled.rest = MethodType(compiled_rest, block)
