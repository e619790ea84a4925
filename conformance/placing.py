"""Placements of the DTensors of a case, on the method's axes and on `shard` and `tp`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from armillary.attention import AttentionMask
from armillary.core.internal import dtensor
from conformance.case import Case
from conformance.tensors import HEAD_DIMS, SHARED, CasePart, global_shape

TOKENS = ("nodes", "devices", "ring", "ulysses")
"""The axes of methods, which shard tokens."""


@dataclass(frozen=True)
class Placing:
    """Turns a rank's parts of a case into DTensors, if the case has them, and back.

    Args:
        dtensor_mesh: the mesh of the DTensors.
        complaints: texts about results that are not DTensors or have wrong placements. `local` appends to them.
    """

    case: Case
    dtensor_mesh: DeviceMesh | None = None
    complaints: list[str] = field(default_factory=list[str])

    def part(self, shard: int) -> CasePart:
        """Returns this rank's part, which has shard `shard` of the sequence."""
        return CasePart(shard, self._rank("shard", "b"), self._rank("tp", "h"))

    def sizes(self) -> tuple[int, int]:
        """Returns the number of parts of the batch and of the heads."""
        return self._size("shard", "b"), self._size("tp", "h")

    def mask(self, part: CasePart) -> AttentionMask:
        """Returns the mask of this rank's rows."""
        mask, (parts, _) = self.case.mask, self.sizes()
        if parts == 1 or not mask.per_row:
            return mask
        sizes = dtensor.chunk_sizes(self.case.batch, parts)
        first = sum(sizes[: part.rows])
        return AttentionMask.rows([mask.row(row) for row in range(first, first + sizes[part.rows])])

    def place(self, name: str, x: Tensor) -> Tensor:
        """Returns a method's argument from this rank's part: a DTensor, or x itself."""
        if not self._is_dtensor(name):
            return x
        assert self.dtensor_mesh is not None, "DTensors need a mesh"
        placements, shape = self.placements(name), torch.Size(global_shape(self.case, name))
        # from_local computes the global shape for shards of one size; otherwise shape and stride must be given.
        even = DTensor.from_local(x, self.dtensor_mesh, placements, run_check=False)
        if even.shape == shape:
            return even
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.dtensor_mesh, placements, run_check=False, shape=shape, stride=stride)

    def local(self, name: str, x: Tensor, gradient: bool = False) -> Tensor:
        """Returns this rank's part of a result, or of the gradient of tensor `name`."""
        if not self._is_dtensor(name):
            return x
        result_name, expected = f"d{name}" if gradient else name, self.placements(name, gradient)
        if not isinstance(x, DTensor):
            self.complaints.append(f"{result_name} is no DTensor")
            return x
        sizes = x.device_mesh.shape
        # On an axis with one rank every placement is the same tensor.
        placed = all(a == b or n == 1 for a, b, n in zip(x.placements, expected, sizes, strict=True))
        if not placed or x.shape != global_shape(self.case, name):
            self.complaints.append(
                f"{result_name} is {dtensor.describe(x)}; it must be {global_shape(self.case, name)} {expected}"
            )
        return x.to_local()

    def placements(self, name: str, gradient: bool = False) -> list[Placement]:
        """Returns the placements of a tensor of the case, or of its gradient."""
        assert self.dtensor_mesh is not None
        return [self._placement(axis, name, gradient) for axis in self.dtensor_mesh.mesh_dim_names or ()]

    def _placement(self, axis: str, name: str, gradient: bool) -> Placement:
        """Returns the placement on one axis.

        The gradient of a replicated tensor is `Partial` on axes whose ranks use it for different tokens, rows or heads.
        """
        replicated = Partial() if gradient else Replicate()
        if axis in TOKENS or (axis == "shard" and "b" in self.case.beside):
            return replicated if name in SHARED else Shard(int(axis in TOKENS))
        if axis == "tp" and "h" in self.case.beside:
            return Shard(HEAD_DIMS[name] % len(global_shape(self.case, name))) if name in HEAD_DIMS else replicated
        return Replicate()

    def _is_dtensor(self, name: str) -> bool:
        return self.case.dtensor and (self.case.weights or name not in SHARED)

    def _size(self, axis: str, letter: str) -> int:
        names = () if self.dtensor_mesh is None else self.dtensor_mesh.mesh_dim_names or ()
        cut = self.case.dtensor and letter in self.case.beside and axis in names
        return self.dtensor_mesh.size(names.index(axis)) if cut and self.dtensor_mesh is not None else 1

    def _rank(self, axis: str, letter: str) -> int:
        return (
            self.dtensor_mesh.get_local_rank(axis)
            if self.dtensor_mesh is not None and self._size(axis, letter) > 1
            else 0
        )
