"""What one run of a block has for its backward: what it kept, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from armillary.core import compat
from armillary.models.activation_checkpoint.keeping import Keep
from armillary.models.activation_checkpoint.offload import OffloadedTensors

What = Literal["x", "attended"]
"""A block's input; or what its attention gave, out and lse."""


class Computes(Protocol):
    """A run of a block, to be done again."""

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
    """Tensors that are there when asked for."""

    def take(self) -> Sequence[Tensor]: ...


class OnDevice:
    """Tensors that stay where they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def take(self) -> Sequence[Tensor]:
        return self.tensors


class SavedByAutograd:
    """Tensors `rows` of what a node of autograd's has saved, which notices if they are changed. Keeps no node alive."""

    def __init__(self, ctx: Any, rows: slice) -> None:
        self.ctx, self.rows = ref(ctx), rows

    def take(self) -> Sequence[Tensor]:
        return self.ctx().saved_tensors[self.rows]  # pyright: ignore[reportOptionalMemberAccess]


class Checkpoint:
    """One run of a block.

    Args:
        work: what it computes.
        keep: what of it is kept.
        autocast: a context in which autocast is as it was in forward.
        below: of the block before this one.
    """

    def __init__(
        self, work: Computes, keep: Keep, autocast: Callable[[], AbstractContextManager[Any]], below: Checkpoint | None
    ) -> None:
        self.work, self.keep, self.autocast, self.below = work, keep, autocast, below
        self.kept: dict[What, Kept] = {}
        self.made_again: dict[What, Kept] = {}
        self._result: tuple[ref[torch.UntypedStorage], int] | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def gave(self, y: Tensor) -> None:
        """Takes down the block's result, without keeping it."""
        self._result = ref(y.untyped_storage()), y._version

    def is_result(self, x: Tensor) -> bool:
        """Whether x is this block's result, as it was given: not what a hook has made of it."""
        if self._result is None:
            return False
        storage, version = self._result
        return storage() is x.untyped_storage() and version == x._version

    def store(self, ctx: Any, parameters: Sequence[Tensor], x: Tensor, attended: Sequence[Tensor]) -> None:
        """Keeps what is to be kept, on the device by autograd, which notices if that or a parameter is changed."""
        wanted: list[tuple[What, Sequence[Tensor]]] = [
            *([("x", (x,))] if self.keep.x else []),
            *([("attended", attended)] if self.keep.attended else []),
        ]
        saved = list(parameters)
        for what, tensors in wanted:
            if self.keep.host:
                self.kept[what] = OffloadedTensors(tensors)
                continue
            self.kept[what] = SavedByAutograd(ctx, slice(len(saved), len(saved) + len(tensors)))
            saved += tensors
        ctx.save_for_backward(*saved)

    # -- backward -----------------------------------------------------------------------------------------------------

    def x(self) -> Tensor:
        """The block's input [B, T, E]: kept, or computed again."""
        kept = self._find("x")
        if kept is not None:
            return kept.take()[0]
        assert self.below is not None
        return self.below.result(stays=True)

    def attended(self, x: Tensor) -> Sequence[Tensor]:
        """out and lse: kept, or computed again."""
        kept = self._find("attended")
        return self.work.again().attend(x) if kept is None else kept.take()

    def result(self, stays: bool) -> Tensor:
        """The block's result, computed again. What that took is kept until the block is differentiated.

        Args:
            stays: its parameters, which FSDP2 gathers, are needed next.
        """
        kept = self._find("x")
        if kept is None:
            assert self.below is not None
            x = self.below.result(stays=False)
            self.made_again["x"] = self._hold([x])
        else:
            x = kept.take()[0]
        with gathered(self.work.block, stays), self.autocast():
            out, lse = self.attended(x)
            if self._find("attended") is None:
                self.made_again["attended"] = self._hold([out, lse])
            return self.work.again().rest(x, out, None)

    def fetch(self) -> None:
        """Starts bringing back what is on the host, if nobody has."""
        for kept in (*self.kept.values(), *self.made_again.values()):
            if isinstance(kept, OffloadedTensors):
                kept.fetch()

    def fetch_below(self) -> None:
        """Likewise, what the block before has there."""
        if self.below is not None:
            self.below.fetch()

    def finish(self) -> None:
        """The block has been differentiated."""
        self.fetch_below()
        self.made_again.clear()
        if not compat.keeps_graph():
            self.kept.clear()
            self.below = None

    def _find(self, what: What) -> Kept | None:
        return self.made_again.get(what) or self.kept.get(what)

    def _hold(self, tensors: Sequence[Tensor]) -> Kept:
        return OffloadedTensors(tensors) if self.keep.host else OnDevice(tensors)


@contextmanager
def gathered(block: Any, stays: bool) -> Generator[None]:
    """Around work with a block's parameters, outside of its own forward and backward; under FSDP2 they are gathered.

    Args:
        stays: they remain so; the block's backward, which comes next, gives them back.
    """
    if not isinstance(block, Gathers):
        yield
        return
    block.unshard()
    yield
    if not stays:
        block.reshard()
