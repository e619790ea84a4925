"""TokenRing (arXiv 2412.20501): queries go round one way, partial results come straight back the other way.

    step          0    1    2    3
    rank 0 holds  q0   q3   q2   q1        each step: send the queries in hand to rank r + 1, compute with them,
    rank 1 holds  q1   q0   q3   q2        and return the partial (out, lse) of the step before to its owner
    rank 2 holds  q2   q1   q0   q3
    rank 3 holds  q3   q2   q1   q0

Both directions of each link are busy. The paper is about inference; here backward rotates queries too, with their dout,
out and lse, and shares of dq return straight to their owners.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.comm_plan import Schedule, Work
from armillary.attention.methods.base import Method
from armillary.attention.rotation import queries as rotate_queries
from armillary.attention.rotation.rotate import Rotation
from armillary.attention.rotation.topology import Circle
from armillary.attention.spec import Call, Saved
from armillary.core import Axis


class TokenRing(Method):
    """TokenRing over one mesh axis of P ranks. Wins where K = H and links carry both directions at once.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`. A second communicator is made for what returns, so every rank of the
            axis must construct the method; construct it once and share it between layers.

    Bytes sent, for e bytes an element and a an accumulated gradient element, all p2p: forward (P - 1) B T H D e one way
    and (P - 1) B T H (D e + a) the other; backward (P - 1) B T H (3 D e + a) and (P - 1) B T H D a. Less under
    a mask: a token goes no further than to the last rank that sees it.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = Axis.of(axis)
        self.back = self.axis.duplicate()
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def rotation(self) -> Rotation:
        """All ranks of the axis, each with its own shard."""
        return Rotation.of_all(self.axis, self.back, "queries")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
        out, lse = rotate_queries.forward(q, k, v, self.rotation(), call)
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        return rotate_queries.backward(dout, saved, self.rotation(), call, direct=True)


def schedule(work: Work) -> Schedule:
    """What `TokenRing` sends and computes over the shards of `work`."""
    circles = [Circle.of_all(work.layout.shards, "queries")]
    return Schedule(
        rotate_queries.forward_steps(work, circles), rotate_queries.backward_steps(work, circles, direct=True)
    )
