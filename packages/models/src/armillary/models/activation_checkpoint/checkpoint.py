"""The checkpoint of one run of a block: tensors kept for its backward, and the recomputation of others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from armillary.core import compat
from armillary.models.activation_checkpoint.offload import OffloadedTensors, settle
from armillary.models.activation_checkpoint.segments import Keep

What = Literal["x", "attended"]
"""A block's input; or what its attention gave, out and lse."""


class Computes(Protocol):
    """A run of a block that can be repeated."""

    @property
    def block(self) -> Any: ...

    def again(self) -> Computes: ...

    def rest(self, x: Tensor, out: Tensor, into: Tensor | None) -> Tensor: ...

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class Gathers(Protocol):
    """A block whose parameters FSDP2 gathers."""

    def unshard(self) -> Any: ...

    def reshard(self) -> None: ...


class Kept(Protocol):
    """Tensors kept until they are requested."""

    def take(self) -> Sequence[Tensor]: ...


class OnDevice:
    """Tensors that stay on the device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def take(self) -> Sequence[Tensor]:
        return self.tensors


class SavedByAutograd:
    """Tensors `rows` among those that an autograd node saved, which detects changes to them. Keeps no node alive."""

    def __init__(self, ctx: Any, rows: slice) -> None:
        self.ctx, self.rows = ref(ctx), rows

    def take(self) -> Sequence[Tensor]:
        return self.ctx().saved_tensors[self.rows]  # pyright: ignore[reportOptionalMemberAccess]


class Checkpoint:
    """One run of a block.

    Args:
        work: the run, to be repeated.
        keep: the tensors to keep.
        autocast: a context that restores forward's autocast.
        below: the checkpoint of the block before this one.
    """

    def __init__(
        self, work: Computes, keep: Keep, autocast: Callable[[], AbstractContextManager[Any]], below: Checkpoint | None
    ) -> None:
        self.work, self.keep, self.autocast, self.below = work, keep, autocast, below
        self.kept: dict[tuple[What, ...], Kept] = {}
        self.recomputed: dict[tuple[What, ...], Kept] = {}
        self._result: tuple[ref[torch.UntypedStorage], int] | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def gave(self, y: Tensor) -> None:
        """Records the block's result by reference, without keeping it."""
        self._result = ref(y.untyped_storage()), y._version

    def is_result(self, x: Tensor) -> bool:
        """True if x is this block's unchanged result, and not one that a hook replaced."""
        if self._result is None:
            return False
        storage, version = self._result
        return storage() is x.untyped_storage() and version == x._version

    def store(self, ctx: Any, parameters: Sequence[Tensor], x: Tensor, attended: Sequence[Tensor]) -> None:
        """Keeps the chosen tensors; on the device through autograd, which detects changes to them and to parameters."""
        names: tuple[What, ...] = (*(("x",) if self.keep.x else ()), *(("attended",) if self.keep.attended else ()))
        tensors = [*((x,) if self.keep.x else ()), *(attended if self.keep.attended else ())]
        settle(x.device)
        if names and self.keep.host:
            self.kept[names] = OffloadedTensors(tensors)
        elif names:
            self.kept[names] = SavedByAutograd(ctx, slice(len(parameters), None))
        ctx.save_for_backward(*parameters, *([] if self.keep.host else tensors))

    # -- backward -----------------------------------------------------------------------------------------------------

    def recall(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, out and lse: kept or recomputed."""
        x = None if self._has("x") else self._from_below(stays=True)
        tensors = self._take()
        x = tensors["x"][0] if x is None else x
        out, lse = tensors.get("attended") or self.work.again().attend(x)
        return x, out, lse

    def result(self, stays: bool) -> Tensor:
        """Recomputes the block's result. Tensors recomputed on the way are kept until the block is differentiated.

        Args:
            stays: its parameters, gathered by FSDP2, are needed next.
        """
        computed: dict[What, Sequence[Tensor]] = {} if self._has("x") else {"x": (self._from_below(stays=False),)}
        recalled = {**self._take(), **computed}
        (x,) = recalled["x"]
        with gathered(self.work.block, stays), self.autocast():
            if "attended" not in recalled:
                computed["attended"] = recalled["attended"] = self.work.again().attend(x)
            if computed:
                tensors = [tensor for each in computed.values() for tensor in each]
                self.recomputed[tuple(computed)] = OffloadedTensors(tensors) if self.keep.host else OnDevice(tensors)
            y = self.work.again().rest(x, recalled["attended"][0], None)
        for kept in self.recomputed.values():
            if isinstance(kept, OffloadedTensors):
                kept.settle()  # the block above is differentiated next, which holds most
        return y

    def fetch(self) -> None:
        """Starts to copy offloaded tensors back, unless that was done."""
        for kept in (*self.kept.values(), *self.recomputed.values()):
            if isinstance(kept, OffloadedTensors):
                kept.fetch()

    def fetch_below(self) -> None:
        """Starts to copy back the tensors of the block below."""
        if self.below is not None:
            self.below.fetch()

    def finish(self) -> None:
        """Releases everything after the block's backward."""
        self.fetch_below()
        self.recomputed.clear()
        if not compat.keeps_graph():
            self.kept.clear()
            self.below = None

    def _from_below(self, stays: bool) -> Tensor:
        assert self.below is not None  # or x would have been kept
        return self.below.result(stays)

    def _has(self, what: What) -> bool:
        return any(what in several for several in (*self.kept, *self.recomputed))

    def _take(self) -> dict[What, Sequence[Tensor]]:
        """Returns all kept tensors, on the device."""
        found: dict[What, Sequence[Tensor]] = {}
        for several, kept in (self.kept | self.recomputed).items():
            tensors = kept.take()
            found |= {what: tensors[:1] if what == "x" else tensors[-2:] for what in several}
        return found


@contextmanager
def gathered(block: Any, stays: bool) -> Generator[None]:
    """Gathers a block's parameters under FSDP2, outside of its own forward and backward.

    Args:
        stays: keeps them gathered; the block's backward, which comes next, releases them.
    """
    if not isinstance(block, Gathers):
        yield
        return
    block.unshard()
    yield
    if not stays:
        block.reshard()
