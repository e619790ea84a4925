"""All that can be done to a plain model from outside, in the order in which it has to be done."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import Method
from armillary.models.block import Block, plainly
from armillary.models.checkpoint import Checkpointing
from armillary.models.gpt import GPT
from armillary.models.llama import Llama
from armillary.models.parallel.sharding import shard_parameters, sharding_axes
from armillary.models.parallel.tensor import tensor_parallel


def parallelize(
    model: Llama | GPT,
    mesh: DeviceMesh,
    *,
    attention: Method | None = None,
    checkpointing: Checkpointing | None = None,
    precision: torch.dtype | None = torch.float32,
    on_host: bool = False,
    compiler: str | None = None,
) -> None:
    """Puts the model onto the mesh, in place. It is called as before, on this rank's tokens of the sequence.

    First tensor parallelism over `tp`, if the mesh has such an axis; then attention and checkpoints; then
    torch.compile, block by block; then FSDP2 over shard x ring x ulysses, with copies over replicate. Best built on
    "meta", followed by `to_empty` and `initialize` or `load_pretrained`.

        with torch.device("meta"):
            model = Llama(LlamaConfig.llama3_8b())
        attend = build_attention("usp", mesh)
        parallelize(model, mesh, attention=attend, precision=torch.bfloat16)
        model.to_empty(device="cuda")
        initialize(model, seed=0)

    Args:
        mesh: with any of the axes replicate, shard, ring, ulysses and tp, such as `build_mesh` makes.
        attention: for all layers, over this mesh's axes; as it is unless given. Heads are this rank's of `tp`.
        checkpointing: what blocks keep for backward; all unless given.
        precision: of forward and backward under FSDP2, whose master weights and reductions are float32; None: no FSDP2,
            parameters stay whole, and it is the caller who sums gradients over ranks.
        on_host: FSDP2 keeps parameters, gradients and the optimizer's state in the host's memory.
        compiler: backend of torch.compile, such as "inductor": each block becomes one graph. Where blocks are run in
            parts (a checkpoint policy), what follows attention is compiled, and attention is not.

    Raises:
        ValueError: something does not fit the model's sizes or the mesh, before anything is changed or sent.
    """
    check_attention(model, mesh, attention)
    if precision is not None:
        sharding_axes(mesh)
    if "tp" in (mesh.mesh_dim_names or ()):
        tensor_parallel(model, mesh["tp"])
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.attention = block.attention if attention is None else attention
    if checkpointing is not None:
        checkpointing.apply(model)
    if compiler is not None:
        for block in blocks:
            compile_block(block, compiler)
    if precision is not None:
        shard_parameters(model, mesh, precision, on_host)


def check_attention(model: Llama | GPT, mesh: DeviceMesh, attention: Method | None) -> None:
    """Refuses a method that cannot split the heads that a rank of `tp` has."""
    config, ranks = model.config, mesh["tp"].size() if "tp" in (mesh.mesh_dim_names or ()) else 1
    if attention is not None:
        heads = (config.heads // ranks, config.kv_heads // ranks)
        q, k = (torch.empty(1, 1, count, config.head_dim, device="meta") for count in heads)
        attention.check(q, k, k)


def compile_block(block: Block, compiler: str) -> None:
    """Compiles the block, or what follows attention where it is run in parts."""
    made: nn.Module = block
    part = "run" if block.run is plainly else "rest"
    # Pieces may be of many sizes: more than Dynamo compiles anew are then run as they are, instead of ending the run.
    setattr(made, part, torch.compile(getattr(block, part), backend=compiler, fullgraph=part == "run"))
