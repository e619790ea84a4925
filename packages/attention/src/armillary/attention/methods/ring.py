"""Ring Attention (arXiv 2310.01889): keys and values go round, queries stay.

    step          0    1    2    3
    rank 0 holds  k0   k3   k2   k1
    rank 1 holds  k1   k0   k3   k2        each step: send what is in hand to rank r + 1, compute with it meanwhile
    rank 2 holds  k2   k1   k0   k3
    rank 3 holds  k3   k2   k1   k0

With the zigzag layout every cell of a causal mask costs the same, so that all ranks finish each step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import Schedule, Steps, Work
from armillary.attention.methods.base import Method
from armillary.attention.rotation import keys as rotate_keys
from armillary.attention.rotation import queries as rotate_queries
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import Circle, Moving
from armillary.attention.spec import Call, Saved
from armillary.core import Axis
from armillary.core.checked import one_of

Backward = Literal["auto", "keys", "queries"]


class Ring(Method):
    """Ring Attention over one mesh axis of P ranks.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is made for it, so every rank of the axis must
            construct the method; construct it once and share it between layers.
        backward: what goes round in backward: keys and values with their gradients, or queries with theirs. "auto"
            takes what sends fewer bytes: queries for multi-head attention in 16 bits, keys for most else.

    Bytes sent, for e bytes an element and a an accumulated gradient element, all p2p: forward (P - 1) 2 B T K D e;
    backward (P - 1) 2 B T K D (e + a), or with queries (P - 1) B T H (3 D e + a + D a). Less under a
    mask: a token goes no further than to the last rank that sees it.
    """

    def __init__(self, axis: DeviceMesh, backward: Backward = "auto") -> None:
        self.axis = Axis.of(axis)
        self.backward_moves: Backward = check_backward(backward)
        self.back = self.axis.duplicate()
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def rotation(self, moving: Moving) -> Rotation:
        """All ranks of the axis, each with its own shard."""
        return Rotation.of_all(self.axis, self.back, moving)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
        out, lse = rotate_keys.forward(q, k, v, self.rotation("keys"), call)
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        if fewer_bytes(self.backward_moves, Work.of_call(saved, call)) == "keys":
            return rotate_keys.backward(dout, saved, self.rotation("keys"), call)
        return rotate_queries.backward(dout, saved, self.rotation("queries"), call, direct=False)


def check_backward(backward: Backward) -> Backward:
    """Refuses anything but the three choices."""
    return cast(Backward, one_of("backward", backward, get_args(Backward)))


def fewer_bytes(choice: Backward, work: Work) -> Moving:
    """What to send round in backward: as told, or by bytes of a whole shard, so that all ranks agree."""
    if choice != "auto":
        return choice
    keys = work.key_layout.length * (work.k + work.v) * (work.e + work.a)
    queries = work.layout.length * ((work.q + 2 * work.out) * work.e + (work.lse + work.q) * work.a)
    return "queries" if queries < keys else "keys"


def schedule(work: Work, backward: Backward = "auto") -> Schedule:
    """What `Ring` sends and computes over the shards of `work`."""
    ranks = work.layout.shards
    going_back = backward_steps(work, check_backward(backward), lambda moving: [Circle.of_all(ranks, moving)])
    return Schedule(rotate_keys.forward_steps(work, [Circle.of_all(ranks, "keys")]), going_back)


def backward_steps(work: Work, backward: Backward, circles: Callable[[Moving], Sequence[Circle]]) -> Steps:
    """The walk of the cheaper backward, or the one that is told, round the circles that it takes."""
    moving = fewer_bytes(backward, work)
    if moving == "keys":
        return rotate_keys.backward_steps(work, circles(moving))
    return rotate_queries.backward_steps(work, circles(moving), direct=False)
