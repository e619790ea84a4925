"""What differs between the torch releases that are supported (>= 2.11), or is still private there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

F = TypeVar("F", bound=Callable[..., Any])


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """How long an operation on `group` may wait. Public from torch 2.15 on."""
    public: Any = getattr(dist, "set_timeout", None)
    private: Any = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    (public or private)(timeout, group)


def host_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """How long the host may wait for an operation on `group`; None where the device waits instead.

    gloo forgets the group's timeout in sends and receives, so whoever waits for those must say it again.
    """
    if device_type != "cpu":
        return None
    options: Any = getattr(cast(Any, group)._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name, `group.group_name`."""
    return cast(Any, dist.distributed_c10d)._resolve_process_group(name)


def high_priority(timeout: timedelta, max_ctas: int | None = None) -> Any:
    """Options of a group whose NCCL communicators run on streams of high priority.

    Args:
        max_ctas: thread blocks, at most, of one NCCL kernel, each on a multiprocessor of its own; None: NCCL decides.
    """
    options: Any = cast(Any, dist).ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def priority_options(group: dist.ProcessGroup, device_type: str) -> Any | None:
    """The options of a group that `high_priority` made them for; None of any other group."""
    if device_type != "cuda":
        return None
    options: Any = getattr(cast(Any, group)._get_backend(torch.device("cuda")), "options", None)
    return options if getattr(options, "is_high_priority_stream", False) else None


def nccl_binds_devices() -> bool:
    """Whether "nccl" binds each group to a device, the one of LOCAL_RANK unless `init_process_group` names another.

    True of the implementation that torch 2.15 calls nccl2, and uses for "nccl" unless TORCH_DIST_USE_NCCL2=0.
    """
    c10d: Any = dist.distributed_c10d
    nccl2 = getattr(c10d, "_create_nccl2_process_group", None)
    if nccl2 is None:
        return False
    c10d.Backend._ensure_backend_registered("nccl")
    plugin = c10d.Backend._plugins.get("NCCL")
    return plugin is not None and plugin.creator_fn is nccl2


def has_several_backends() -> bool:
    """Whether the default process group has one backend for the host's tensors and another for the device's."""
    c10d: Any = dist.distributed_c10d
    backend, _ = c10d._world.pg_map[c10d._get_default_group()]
    return "," in str(backend)


def new_group(ranks: Sequence[int], name: str, timeout: timedelta | None, like: Any | None = None) -> dist.ProcessGroup:
    """A process group of some ranks of the world, this one among them, which only these make, under this name.

    With the `priority_options` of another group, `like`, its NCCL communicators have that group's priority and limit.

    `dist.new_group(use_local_synchronization=True)` names a group by how many this rank has made: ranks that have made
    different numbers of groups would wait for each other for ever. Where a device is bound to the default group, torch
    would split NCCL's communicator, and wait for all ranks of the world.
    """
    c10d: Any = dist.distributed_c10d
    default: Any = c10d._get_default_group()
    backend, store = c10d._world.pg_map[default]
    waiting = c10d._get_default_timeout(c10d.Backend(backend)) if timeout is None else timeout
    members = len(ranks), list(ranks).index(dist.get_rank()), list(ranks)
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        options = None if like is None else high_priority(waiting, like.config.max_ctas)
        given = {"backend_options": options, "timeout": waiting}
        made, _ = c10d._new_process_group_helper(*members, c10d.Backend(backend), store, name, **given)
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def set_allocator(settings: str) -> None:
    """Gives the device's allocator settings as in PYTORCH_ALLOC_CONF, in place of all that it had."""
    cast(Any, torch)._C._accelerator_setAllocatorSettings(settings)


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group found each other."""
    return cast(Any, dist.distributed_c10d)._get_default_store()


def recorded_collectives() -> list[dict[str, Any]]:
    """Returns the latest collectives, sends and receives of this process from torch's flight recorders.

    Operations of one process group and backend are in the order of their calls. Keys of an entry, among others:
    process_group (name, description), profiling_name ("nccl2:all_reduce"), collective_seq_id and p2p_seq_id (counts of
    the group), is_p2p, retired (whether the operation has completed).
    """
    private: Any = cast(Any, torch)._C._distributed_c10d
    options = {"includeCollectives": True, "onlyActive": False}
    dumps: list[bytes] = []
    if (dump := getattr(private, "_dump_fr_trace_json", None)) is not None:
        try:
            dumps = [dump(**options, backend=backend) for backend in backend_names()]
        except TypeError:  # before torch 2.15 there is one recorder, of gloo
            dumps = [dump(**options)]
    if (dump := getattr(private, "_dump_nccl_trace_json", None)) is not None:
        dumps.append(dump(**options))  # ProcessGroupNCCL has a recorder of its own
    return [entry for dump in dumps for entry in json.loads(dump).get("entries", [])]


def backend_names() -> list[str]:
    """Returns the names of the backends of all process groups, under which torch 2.15 keeps their flight recorders.

    A name is that of the backend's class: "nccl2" where the group was made with "nccl".
    """
    groups: list[Any] = list(cast(Any, dist.distributed_c10d)._world.pg_map)
    return sorted({group._get_backend(device).name() for group in groups for device in group._device_types})


def unboxed(group: Any) -> dist.ProcessGroup:
    """The process group that an op of torch.distributed got as an argument."""
    return cast(Any, dist.ProcessGroup).unbox(group)


def define_op(
    schema: str,
    run: Callable[..., Any],
    run_like: Callable[..., Any],
    differentiable: Callable[..., Any] | None = None,
) -> OpOverload:
    """An op of the namespace "armillary", which allocates what it returns and writes to nothing else.

    What `torch.library.custom_op` makes costs the host some 0.1 ms more, forward and backward: it takes lists apart as
    trees, and looks for shared memory among what comes in and goes out. That an op here shares none, tests see to.

    Args:
        schema: with the op's name.
        run: what it runs; never traced, not even where torch.compile gave a caller up and traces what that calls.
        run_like: gives empty tensors shaped as its results.
        differentiable: called in its place where there is autograd; calls the op again, `below_autograd`.
    """
    name, library = schema.partition("(")[0], torch.library.Library("armillary", "FRAGMENT")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _disable_dynamo(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"armillary::{name}", run_like, lib=library)
    if differentiable is not None:
        library.impl(name, differentiable, "Autograd")
    op: OpOverload = getattr(torch.ops.armillary, name).default
    _defined[op] = library, run  # the op goes when its library does
    return op


_defined: dict[OpOverload, tuple[torch.library.Library, Callable[..., Any]]] = {}


def function_of(op: OpOverload) -> Callable[..., Any]:
    """The Python function that an op of `define_op` runs."""
    return _defined[op][1]


def below_autograd() -> AbstractContextManager[Any]:
    """Where what is called is not recorded, as in the implementation of an op."""
    return cast(Any, torch)._C._AutoDispatchBelowAutograd()


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies all, on one device, in place and at once: what torch's optimizers and clipping call is private."""
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateUsage]


def flatten(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """The 1-D mesh over neighbouring `axes` of `mesh`."""
    return cast(DeviceMesh, cast(Any, mesh[tuple(axes)])._flatten(name))


def rows_of(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of a 1-D mesh, and of all those that are cut from the same mesh along with it."""
    private = cast(Any, mesh)
    found: Tensor = private._layout.remap_to_tensor(private._rank_map)
    return found.reshape(-1, mesh.size()).tolist()


def join(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The 2-D mesh of two 1-D meshes cut from one."""
    return cast(Any, DeviceMesh)._concatenate([outer, inner])


def all_gather_single(into: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts an all-gather of flat tensors. torch 2.13 renames it, and warns of the old name from then on."""
    current: Any = getattr(dist, "all_gather_single", None)
    return cast(dist.Work, (current or dist.all_gather_into_tensor)(into, x, group=group, async_op=True))


def start_batch(group: dist.ProcessGroup, receive: Mapping[int, Tensor], send: Mapping[int, Tensor]) -> list[dist.Work]:
    """Starts receiving and sending contiguous tensors, by rank of the group, in one batch where the backend has those.

    What `dist.batch_isend_irecv` does, without the objects that it wants made and checked for every message, which take
    the host longer than the messages. Of NCCL's batch only what ends it is to be waited for (`ProcessGroupNCCL`): it
    records its event behind all messages and holds their tensors. It is None for a batch of none, never begun here.
    """
    tensors = receive or send
    if not tensors:
        return []
    private, device = cast(Any, group), next(iter(tensors.values())).device
    together = getattr(private._get_backend(device), "supports_coalescing", False)
    if together:
        private._start_coalescing(device)
    works = [private.recv([x], peer, 0) for peer, x in receive.items()]
    works += [private.send([x], peer, 0) for peer, x in send.items()]
    return [private._end_coalescing(device)] if together else works


def above_autograd() -> AbstractContextManager[Any]:
    """Inside the implementation of an op, where autograd sees nothing: meanwhile it does."""
    private: Any = cast(Any, torch)._C
    keys = private._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        keys = keys.remove(getattr(private.DispatchKey, name))
    return private._ForceDispatchKeyGuard(private._dispatch_tls_local_include_set(), keys)


def transforms_on() -> bool:
    """Whether a transform of torch.func (grad, vjp, jvp, vmap) is on, or forward-mode AD."""
    return cast(Any, torch)._C._functorch.maybe_current_level() is not None or cast(Any, forward_ad)._current_level >= 0


def transformed(x: Tensor) -> bool:
    """Whether a transform of torch.func, or forward-mode AD, follows `x`."""
    if cast(Any, torch)._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return cast(Any, forward_ad)._current_level >= 0 and cast(Any, forward_ad.unpack_dual(x)).tangent is not None


def fakes_tensors() -> bool:
    """Whether new tensors are fake ones."""
    private: Any = cast(Any, torch)._C
    return private._get_dispatch_mode(private._TorchDispatchModeKey.FAKE) is not None


def no_view(x: Tensor) -> Tensor:
    """`x` as a tensor that autograd does not take for a view, of the same memory."""
    private: Any = cast(Any, torch)._C
    without = private.DispatchKeySet(private.DispatchKey.ADInplaceOrView)
    with private._ExcludeDispatchKeyGuard(without):
        return torch.ops.aten.alias.default(x)


def references(x: Tensor) -> tuple[int, int]:
    """How many of torch's own refer to a tensor, and to its storage."""
    storage: Any = x.untyped_storage()
    return cast(Any, x)._use_count(), cast(Any, torch)._C._storage_Use_Count(storage._cdata)


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one storage, of which each may have another part."""
    return cast(Any, torch)._C._is_alias_of(x, y)


def profiling() -> bool:
    """Whether a torch profiler is running."""
    return cast(Any, torch.autograd)._profiler_enabled()


def keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to keep its graph, for another one."""
    return cast(Any, torch)._C._autograd._get_current_graph_task_keep_graph()


def after_backward(action: Callable[[], None]) -> None:
    """Has the backward pass that is running call `action` at its end."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(action)


class OpRefused(NotImplementedError, ValueError):
    """An op that DTensors of some placement do not have. DTensor passes NotImplementedErrors on, and rewords others."""


def guard_dtensors(
    op: Callable[[object, Sequence[Placement]], None], redistribution: Callable[[DTensor, Sequence[Placement]], None]
) -> None:
    """From now on DTensor asks before it works: a placement is told neither of ops nor of gradients.

    Args:
        op: called with each op and its tensors' placements, before DTensor finds how to run it. What it has found, it
            remembers, so `op` must always say the same of the same.
        redistribution: called with a DTensor and the placements that it is to have, before an explicit `redistribute`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import _redistribute as redistributing

    propagator, function = cast(Any, DTensor)._op_dispatcher.sharding_propagator, cast(Any, redistributing).Redistribute
    propagate, forward = propagator.propagate_op_sharding_non_cached, function.forward

    def propagate_checked(schema: Any) -> Any:
        op(schema.op, placements_in((schema.args_schema, schema.kwargs_schema)))
        return propagate(schema)

    def forward_checked(ctx: Any, x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], *rest: Any) -> Any:
        redistribution(x, placements)
        return forward(ctx, x, mesh, placements, *rest)

    propagator.propagate_op_sharding_non_cached = propagate_checked
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(propagate_checked)  # with a fresh cache
    function.forward = staticmethod(forward_checked)


def placements_in(arguments: object) -> list[Placement]:
    """Those of all specs of DTensors among an op's arguments."""
    from torch.utils._pytree import tree_leaves

    return [placement for leaf in tree_leaves(arguments) for placement in getattr(leaf, "placements", ())]


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; of plain tensors without importing those, which takes seconds."""
    if type(x) is Tensor or type(x) is Parameter:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def constant_when_traced(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which imports the compiler, and that takes seconds."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def assert_later(condition: Tensor, message: str) -> None:
    """Raises a RuntimeError unless it is true: without waiting for it on a GPU, and inside of graphs too."""
    cast(Any, torch)._assert_async(condition, message)


def traced_object(found: Any) -> Any:
    """What a mesh or group stands for that a function which is constant while tracing was given. Itself elsewhere."""
    return getattr(found, "real_obj", found)


def shard(placement: Placement) -> tuple[int | None, int]:
    """The dim that a placement cuts, None for none, and the parts into which that dim is cut before it.

    FSDP2's strided shard, which says so, is private, and in some releases no `Shard`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

    if isinstance(placement, (Shard, _StridedShard)):
        return placement.dim, getattr(placement, "split_factor", 1)
    if not isinstance(placement, Replicate):
        raise ValueError(f"{placement}: a parameter must be sharded or replicated")
    return None, 1
