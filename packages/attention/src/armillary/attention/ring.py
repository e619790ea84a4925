"""Ring Attention (arXiv 2310.01889): keys and values go round, queries stay.

    step          0    1    2    3
    rank 0 holds  k0   k3   k2   k1
    rank 1 holds  k1   k0   k3   k2        each step: send what is in hand to rank r + 1, compute with it meanwhile
    rank 2 holds  k2   k1   k0   k3
    rank 3 holds  k3   k2   k1   k0

With the zigzag layout every cell of a causal mask costs the same, so that all ranks finish each step together.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from armillary.attention import rotate_keys
from armillary.attention.call import Call, Saved
from armillary.attention.method import Method, layout_of
from armillary.attention.rotate_keys import Rotation
from armillary.core import Axis, SequenceLayout


class Ring(Method):
    """Ring Attention over one mesh axis of P ranks.

    Args:
        axis: a 1-D mesh, such as `mesh["ring"]`.

    Bytes sent, for e bytes an element and a an accumulated gradient element: (P - 1) * 2 B T K D e forward,
    (P - 1) * 2 B T K D (e + a) backward, all p2p to the next rank.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.axis = Axis.of(axis)
        self.shards = self.sequence_shards = self.axis.size
        self.shard = self.axis.rank

    def layout(self, length: int, kind: str = "zigzag") -> SequenceLayout:
        return layout_of(kind, length, self.axis.size)

    def walk(self) -> Rotation:
        """Which shard's keys are in hand at each step."""
        rank, size = self.axis.rank, self.axis.size
        in_hand = tuple((rank - step) % size for step in range(size))
        return Rotation(self.axis, home=rank, in_hand=in_hand, to=(rank + 1) % size, source=(rank - 1) % size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved]:
        out, lse = rotate_keys.forward(q, k, v, self.walk(), call)
        return out, Saved(q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = rotate_keys.backward(dout, saved, self.walk(), call)
        return dq.to(saved.q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype)
