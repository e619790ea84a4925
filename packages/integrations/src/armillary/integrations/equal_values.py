"""Comparison of values that must be equal on all ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from armillary.attention import Method
from armillary.attention.parts import gather_integers

PLAIN = (Tensor, int, float, str)
"""Types of values that are compared, also inside of nested values."""


def unequal_values(values: Mapping[str, Any], method: Method) -> dict[str, int]:
    """Returns the names of values that are not equal, to the bit, on all ranks of a method; the same on every rank.

    Each name has the first shard whose value differs from that of shard 0.

    Bytes sent: a `gather_integers` of three integers for each value. Every rank of the method must call it.
    """
    if method.shards == 1:
        return {}
    named = [(name, x) for name, value in values.items() for x in pytree.tree_leaves(value) if isinstance(x, PLAIN)]
    # 56-bit hashes fit into int64, so one gather of integers compares values of any type.
    digests: dict[int, dict[int, int]] = {}
    lines = [[i, method.shard, _digest(x)] for i, (_, x) in enumerate(named)]
    for i, shard, digest in gather_integers(lines, method):
        digests.setdefault(i, {})[shard] = digest
    unequal: dict[str, int] = {}
    for i, by_shard in sorted(digests.items()):
        # A rank that was passed fewer values has sent fewer digests.
        differing = [shard for shard in range(method.shards) if by_shard.get(shard) != by_shard.get(0)]
        if differing:
            unequal.setdefault(named[i][0] if i < len(named) else "arguments of other ranks", differing[0])
    return unequal


def _digest(x: Tensor | int | float | str) -> int:
    """Returns a hash of contents, shape and dtype."""
    if not isinstance(x, Tensor):
        content = repr(x).encode()
    else:
        # A copy, because NumPy keeps the storage of the tensor that it views.
        bits = x.detach().contiguous().flatten().view(torch.uint8).to("cpu", copy=True)
        content = f"{tuple(x.shape)} {x.dtype} ".encode() + bits.numpy().tobytes()
    return int.from_bytes(blake2b(content, digest_size=7).digest(), "big")
