"""The checkpoint of one run of a block: stores some tensors for backward, and recomputes the others from them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from armillary.core.parts import compat
from armillary.models.activation_checkpoint.offload import OffloadedTensors, finish_latest_copy
from armillary.models.activation_checkpoint.runs import BlockRun

TensorName = Literal["x", "attention_output"]
"""A block's input x, or its attention's output: the two tensors out and lse."""


@runtime_checkable
class Gathers(Protocol):
    """A block whose parameters FSDP2 gathers."""

    def unshard(self) -> Any: ...

    def reshard(self) -> None: ...


class StoredTensors(Protocol):
    """Tensors stored on the device, on the host, or by autograd."""

    def take(self) -> Sequence[Tensor]:
        """Returns the tensors on the device."""
        ...


class OnDevice:
    """Tensors that stay on the device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def take(self) -> Sequence[Tensor]:
        return self.tensors


class SavedByAutograd:
    """A slice of an autograd node's saved tensors. Autograd raises if they were changed in place.

    Refers to the node weakly: the node refers to the `Checkpoint`, which would keep it alive in a cycle.
    """

    def __init__(self, ctx: Any, indices: slice) -> None:
        self.ctx, self.indices = ref(ctx), indices

    def take(self) -> Sequence[Tensor]:
        return self.ctx().saved_tensors[self.indices]  # pyright: ignore[reportOptionalMemberAccess]


class Checkpoint:
    """The tensors that one run of a block stores for its backward, and their recomputation.

    A block that does not store its input x recomputes it from the previous block, whose result is x.

    Args:
        block_run: the run, which recomputation repeats.
        autocast: returns a context manager that restores the autocast state of forward.
        previous: the checkpoint of the previous block.
    """

    def __init__(
        self,
        block_run: BlockRun,
        autocast: Callable[[], AbstractContextManager[Any]],
        previous: Checkpoint | None,
    ) -> None:
        self.block_run, self.keep, self.autocast, self.previous = block_run, block_run.keep, autocast, previous
        self.stored_tensors: dict[tuple[TensorName, ...], StoredTensors] = {}
        self.recomputed_tensors: dict[tuple[TensorName, ...], StoredTensors] = {}
        # A weak reference to the result, which is thus freed as soon as nothing else uses it, and its version, which
        # changes when the result is changed in place.
        self._result: tuple[ref[torch.UntypedStorage], int] | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def record_result(self, y: Tensor) -> None:
        """Records which tensor is the block's result, by a weak reference."""
        self._result = ref(y.untyped_storage()), y._version

    def is_result(self, x: Tensor) -> bool:
        """Returns True if x is this block's result, unchanged. False if a hook replaced or changed it."""
        if self._result is None:
            return False
        storage, version = self._result
        return storage() is x.untyped_storage() and version == x._version

    def store(self, ctx: Any, parameters: Sequence[Tensor], x: Tensor, attention_output: Sequence[Tensor]) -> None:
        """Stores the tensors that `keep` selects: on the host, or on the device as saved tensors of the node `ctx`."""
        names: list[TensorName] = []
        tensors: list[Tensor] = []
        if self.keep.x:
            names.append("x")
            tensors.append(x)
        if self.keep.attention_output:
            names.append("attention_output")
            tensors += attention_output
        finish_latest_copy(x.device)  # the previous block's copies overlapped with this block's forward
        if names and self.keep.host:
            self.stored_tensors[tuple(names)] = OffloadedTensors(tensors)
        elif names:
            self.stored_tensors[tuple(names)] = SavedByAutograd(ctx, slice(len(parameters), None))
        ctx.save_for_backward(*parameters, *([] if self.keep.host else tensors))

    # -- backward -----------------------------------------------------------------------------------------------------

    def recall(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns (x, (out, lse)), stored or recomputed. Without out and lse if backward does not need them."""
        # If the previous block is recomputed for x, its parameters stay gathered: its backward comes next.
        x = None if self._has("x") else self._previous_result(keep_gathered=True)
        tensors = self._take()
        x = tensors["x"][0] if x is None else x
        if not self.block_run.needs_output:
            return x, ()
        return x, tensors.get("attention_output") or self.block_run.replay().attend(x)

    def result(self, keep_gathered: bool) -> Tensor:
        """Recomputes the block's result. Stores recomputed inputs and attention outputs for the block's own backward.

        Args:
            keep_gathered: True leaves the block's parameters gathered under FSDP2, because its backward comes next.
        """
        # 1. x: stored, or the previous block's result. This recurses to the first block of the segment, which stored x.
        new_tensors: dict[TensorName, Sequence[Tensor]] = (
            {} if self._has("x") else {"x": (self._previous_result(keep_gathered=False),)}
        )
        tensors_by_name = {**self._take(), **new_tensors}
        (x,) = tensors_by_name["x"]
        with unsharded_parameters(self.block_run.block, keep_gathered), self.autocast():
            # 2. Attention. Its output is stored if backward needs it, so that attention is recomputed only once.
            if "attention_output" not in tensors_by_name:
                tensors_by_name["attention_output"] = self.block_run.replay().attend(x)
                if self.block_run.needs_output:
                    new_tensors["attention_output"] = tensors_by_name["attention_output"]
            if new_tensors:
                tensors = [tensor for group in new_tensors.values() for tensor in group]
                self.recomputed_tensors[tuple(new_tensors)] = (
                    OffloadedTensors(tensors) if self.keep.host else OnDevice(tensors)
                )
            # 3. The token-wise part.
            y = self.block_run.replay().after_attention(x, tensors_by_name["attention_output"][0], None)
        for group in self.recomputed_tensors.values():
            if isinstance(group, OffloadedTensors):
                group.finish_copy()  # frees the device's tensors before the next block's backward, where memory peaks
        return y

    def fetch(self) -> None:
        """Starts to copy offloaded tensors back, unless their copies are in flight or they are still on the device."""
        for group in (*self.stored_tensors.values(), *self.recomputed_tensors.values()):
            if isinstance(group, OffloadedTensors):
                group.fetch()

    def fetch_previous(self) -> None:
        """Starts to copy the previous block's offloaded tensors back to the device."""
        if self.previous is not None:
            self.previous.fetch()

    def finish(self) -> None:
        """Called after the block's backward: prefetches the previous block's tensors, and releases this block's."""
        self.fetch_previous()
        self.recomputed_tensors.clear()
        if not compat.keeps_graph():  # under retain_graph the next backward needs them again
            self.stored_tensors.clear()
            self.previous = None

    def _previous_result(self, keep_gathered: bool) -> Tensor:
        assert self.previous is not None  # a block without a previous checkpoint stores x
        return self.previous.result(keep_gathered)

    def _has(self, name: TensorName) -> bool:
        return any(name in names for names in (*self.stored_tensors, *self.recomputed_tensors))

    def _take(self) -> dict[TensorName, Sequence[Tensor]]:
        """Returns all stored and recomputed tensors, on the device: (x,) and (out, lse) by name."""
        # A group of names has the tensors (x,), (out, lse) or (x, out, lse).
        tensors_by_name: dict[TensorName, Sequence[Tensor]] = {}
        for names, group in (self.stored_tensors | self.recomputed_tensors).items():
            tensors = group.take()
            tensors_by_name |= {name: tensors[:1] if name == "x" else tensors[-2:] for name in names}
        return tensors_by_name


@contextmanager
def unsharded_parameters(block: Any, keep_gathered: bool) -> Generator[None]:
    """Context manager that gathers a block's parameters under FSDP2, to recompute the block outside of FSDP's hooks.

    Args:
        keep_gathered: True leaves them gathered at the end. The block's backward, which comes next, reshards them.
    """
    if not isinstance(block, Gathers):
        yield
        return
    block.unshard()
    yield
    if not keep_gathered:
        block.reshard()
