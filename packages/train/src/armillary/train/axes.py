"""The sizes of the mesh axes, from the configuration and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import gcd, isqrt

from torch.distributed.device_mesh import DeviceMesh

from armillary.core.internal import compat
from armillary.train.config.check import configured_method, model_config
from armillary.train.config.sections import Config

# Axes whose ranks hold different tokens: gradients and losses are summed over all of them.
DATA_AXES = ("replicate", "shard", "nodes", "devices", "ring", "ulysses")


def choose_axes(config: Config, world: int) -> dict[str, int]:
    """Returns the sizes of all axes for `world` ranks.

    Ring or ulysses, if not configured, gets the remaining ranks. `build_mesh` refuses axes that do not divide `world`.
    """
    parallel = config.parallel
    ring, ulysses = (parallel.ring, parallel.ulysses) if parallel.cp is None else split_cp(config, parallel.cp)
    fixed_ranks = parallel.replicate * parallel.shard * (ring or 1) * (ulysses or 1) * parallel.tp
    free_ranks = max(1, world // max(fixed_ranks, 1))
    if ulysses is None:
        # The largest divisor up to the square root, so that the ring, which gets the quotient, is no smaller: few head
        # counts allow a large ulysses.
        divisors = (u for u in range(1, isqrt(free_ranks) + 1) if free_ranks % u == 0)
        ulysses = free_ranks if ring is not None else max(divisors)
        free_ranks //= ulysses
    return {
        "replicate": parallel.replicate,
        "shard": parallel.shard,
        "ring": free_ranks if ring is None else ring,
        "ulysses": ulysses,
        "tp": parallel.tp,
    }


def mesh_axes(config: Config, axes: Mapping[str, int]) -> dict[str, int]:
    """Returns the axes of the mesh: `axes`, with `ring` split into `nodes` and `devices` if the method uses these.

    Raises ValueError if `--parallel.nodes` does not divide the ring, or the method has no such axis.
    """
    method = configured_method(config.parallel)
    if config.parallel.nodes is None and "nodes" in method.sequence.axes and "LOCAL_WORLD_SIZE" in os.environ:
        # By default a node has as many ranks as this machine. If that would make one node, or nodes of one device, the
        # ring has the fewest nodes above 1. A machine has devices x ulysses x tp ranks, and `devices` must divide ring.
        devices = gcd(axes["ring"], max(1, int(os.environ["LOCAL_WORLD_SIZE"]) // (axes["ulysses"] * axes["tp"])))
        if 1 < devices < axes["ring"]:
            method = configured_method(config.parallel, nodes=axes["ring"] // devices)
    return method.mesh_axes(axes)


def split_cp(config: Config, cp: int) -> tuple[int, int]:
    """Splits a context-parallel degree into (ring, ulysses)."""
    model = model_config(config.model, config.model.vocab_size or 1, config.data.sequence_length)
    tp = config.parallel.tp
    node = int(os.environ.get("LOCAL_WORLD_SIZE", cp * tp))
    # Ulysses gets the largest divisor that also divides the heads and key heads of a tp rank and a node's ranks per tp
    # rank, so that its all-to-alls stay within the node.
    ulysses = gcd(cp, model.heads // tp, model.kv_heads // tp, max(1, node // tp))
    return cp // ulysses, ulysses


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    return compat.flatten(mesh, [name for name in DATA_AXES if name in names], "data")
