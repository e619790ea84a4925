"""Private interfaces of torch, and public ones that differ between the supported releases (>= 2.11).

This is the first place to change for a new release of torch. `imported_at_first_use` postpones imports of slow parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

F = TypeVar("F", bound=Callable[..., Any])


# -- process groups ---------------------------------------------------------------------------------------------------


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    # Public from torch 2.15 on.
    public: Any = getattr(dist, "set_timeout", None)
    private: Any = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    (public or private)(timeout, group)


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    # The backends of fake groups have no options.
    options: Any = getattr(cast(Any, group)._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def host_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """Returns the time that the host may wait for an operation on `group`; None on CUDA, where the stream waits."""
    # gloo ignores a group's time-out in sends and receives. So callers pass the returned time to `Work.wait`.
    return group_timeout(group, device_type) if device_type == "cpu" else None


def find_group(name: str) -> dist.ProcessGroup:
    return cast(Any, dist.distributed_c10d)._resolve_process_group(name)


def unbox_group(group: Any) -> dist.ProcessGroup:
    return cast(Any, dist.ProcessGroup).unbox(group)


def default_store() -> dist.Store:
    return cast(Any, dist.distributed_c10d)._get_default_store()


def new_group(ranks: Sequence[int], name: str, timeout: timedelta | None, like: Any | None = None) -> dist.ProcessGroup:
    """Creates a process group of some ranks of the world. Exactly these ranks must call it.

    Args:
        ranks: global ranks of the group, in its order.
        name: the same on all ranks of the group. No other group of these ranks may have it.
        like: `priority_options` of another group, whose priority and CTA limit the new group gets.
    """
    # `dist.new_group(use_local_synchronization=True)` derives the name from the number of groups that this rank has
    # created. Ranks that have created different numbers of groups would wait for each other forever.
    c10d: Any = dist.distributed_c10d
    default: Any = c10d._get_default_group()
    backend, store = c10d._world.pg_map[default]
    duration: timedelta = c10d._get_default_timeout(c10d.Backend(backend)) if timeout is None else timeout
    members = len(ranks), list(ranks).index(dist.get_rank()), list(ranks)
    # With a bound device torch would split the default group's NCCL communicator, which waits for all of its ranks.
    # The new group is bound to the same device. Without one, torch 2.15 would take the GPU with the number LOCAL_RANK.
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        options = None if like is None else high_priority(duration, like.config.max_ctas)
        settings = {"backend_options": options, "timeout": duration, "device_id": bound}
        group, _ = c10d._new_process_group_helper(*members, c10d.Backend(backend), store, name, **settings)
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def high_priority(timeout: timedelta, max_ctas: int | None = None) -> Any:
    """Returns options for a process group whose NCCL kernels run on streams of high priority, in few thread blocks."""
    options: Any = cast(Any, dist).ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def priority_options(group: dist.ProcessGroup, device_type: str) -> Any | None:
    if device_type != "cuda":
        return None
    options: Any = getattr(cast(Any, group)._get_backend(torch.device("cuda")), "options", None)
    return options if getattr(options, "is_high_priority_stream", False) else None


def nccl_binds_devices() -> bool:
    """Returns True if backend "nccl" binds each group to a device unasked: by default that with number LOCAL_RANK."""
    # The implementation nccl2 does that. torch 2.15 uses it for "nccl" unless TORCH_DIST_USE_NCCL2=0.
    c10d: Any = dist.distributed_c10d
    nccl2 = getattr(c10d, "_create_nccl2_process_group", None)
    if nccl2 is None:
        return False
    c10d.Backend._ensure_backend_registered("nccl")
    plugin = c10d.Backend._plugins.get("NCCL")
    return plugin is not None and plugin.creator_fn is nccl2


def has_several_backends() -> bool:
    c10d: Any = dist.distributed_c10d
    backend, _ = c10d._world.pg_map[c10d._get_default_group()]
    return "," in str(backend)  # such as "cpu:gloo,cuda:nccl"


# -- messages ---------------------------------------------------------------------------------------------------------


def all_gather_single(into: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    # torch 2.13 renames the function and deprecates the old name.
    current: Any = getattr(dist, "all_gather_single", None)
    return cast(dist.Work, (current or dist.all_gather_into_tensor)(into, x, group=group, async_op=True))


def all_to_all_single(
    into: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> dist.Work:
    if not sum(send) and dist.get_backend(group) == "fake":
        # The fake group of torch 2.13 fills `into` with copies of `x`, and raises if `x` is empty.
        into, receive = into[:0], [0] * len(receive)
    work: Any = dist.all_to_all_single(into, x, list(receive), list(send), group=group, async_op=True)
    return cast(dist.Work, work)


def start_batch(group: dist.ProcessGroup, receive: Mapping[int, Tensor], send: Mapping[int, Tensor]) -> list[dist.Work]:
    """Starts receives and sends of contiguous tensors, given by rank of the group. Returns the works to wait for."""
    # Backends with batches (NCCL) start all messages as one batch and return a single work, whose event is recorded
    # after all of them and which keeps their tensors alive. Others return one work for each message.
    # Like `dist.batch_isend_irecv`, whose objects and checks for each message take longer than a small message.
    tensors = receive or send
    if not tensors:
        return []
    private, device = cast(Any, group), next(iter(tensors.values())).device
    batched = getattr(private._get_backend(device), "supports_coalescing", False)
    if batched:
        private._start_coalescing(device)
    works = [private.recv([x], peer, 0) for peer, x in receive.items()]
    works += [private.send([x], peer, 0) for peer, x in send.items()]
    return [private._end_coalescing(device)] if batched else works


# -- meshes -----------------------------------------------------------------------------------------------------------


def flatten(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    flat = cast(DeviceMesh, cast(Any, mesh[tuple(axes)])._flatten(name))
    # torch gives the new group its backend's default: 10 minutes with NCCL, 30 with gloo.
    timeout = group_timeout(mesh.get_group(axes[0]), mesh.device_type)
    if timeout is not None:
        set_timeout(timeout, flat.get_group())
    return flat


def flatten_axes(axes: Sequence[DeviceMesh]) -> DeviceMesh:
    # The axes are 1-D slices of one mesh, whose order the result has.
    root = cast(DeviceMesh, cast(Any, axes[0])._get_root_mesh())
    sliced = {name for axis in axes for name in axis.mesh_dim_names or ()}
    names = [name for name in root.mesh_dim_names or () if name in sliced]
    return flatten(root, names, "_".join(names))


def parallel_ranks(mesh: DeviceMesh) -> list[list[int]]:
    """Returns the global ranks of each 1-D slice of the root mesh along the axes of `mesh`; one of them is `mesh`."""
    private = cast(Any, mesh)
    ranks: Tensor = private._layout.remap_to_tensor(private._rank_map)
    return ranks.reshape(-1, mesh.size()).tolist()


def join(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    return cast(Any, DeviceMesh)._concatenate([outer, inner])


# -- DTensors ---------------------------------------------------------------------------------------------------------


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    # The import of DTensor takes seconds: plain tensors are answered without it.
    if type(x) is Tensor or type(x) is Parameter:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local_part(x: Tensor) -> Tensor:
    return x.to_local() if is_dtensor(x) else x


def to_local(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> Tensor:
    if torch.compiler.is_compiling() or torch.__version__ >= "2.15":
        return x.to_local(grad_placements=grad_placements)
    return cast(Tensor, _ToLocal.apply(x, grad_placements))


class _ToLocal(torch.autograd.Function):
    # Before torch 2.15 the gradient has the stride of a tensor whose shards all have the size of this rank's shard. If
    # another rank's shard is larger or smaller, torch 2.11 gathers the gradient when it is accumulated.
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
        from torch.distributed.tensor import Replicate

        local = x.to_local()
        if grad_placements is None:
            grad_placements = [Replicate() if placement.is_partial() else placement for placement in x.placements]
        ctx.spec, ctx.local_stride = (x.device_mesh, grad_placements, x.shape, x.stride()), local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from torch.distributed.tensor import DTensor

        (grad,), (mesh, placements, shape, stride) = grads, ctx.spec
        if grad.stride() != ctx.local_stride:
            grad, stride = grad.contiguous(), torch.empty(shape, device="meta").stride()
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride), None


class OpRefused(NotImplementedError, ValueError):
    """An op that DTensors of some placement do not support. DTensor rewrites the messages of other types."""


def guard_dtensors(
    op: Callable[[object, Sequence[Placement]], None], redistribution: Callable[[DTensor, Sequence[Placement]], None]
) -> None:
    """Installs checks in DTensor, for placements with which some ops or gradients would be silently wrong.

    Args:
        op: check of an op and the placements of its tensors. Its result must depend on these alone.
        redistribution: check of a DTensor and its target placements, called before each explicit `redistribute`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import _redistribute as redistributing
    from torch.utils._pytree import tree_leaves

    propagator, function = cast(Any, DTensor)._op_dispatcher.sharding_propagator, cast(Any, redistributing).Redistribute
    propagate, forward = propagator.propagate_op_sharding_non_cached, function.forward

    def propagate_checked(schema: Any) -> Any:
        specs = tree_leaves((schema.args_schema, schema.kwargs_schema))
        op(schema.op, [placement for spec in specs for placement in getattr(spec, "placements", ())])
        return propagate(schema)

    def forward_checked(ctx: Any, x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], *options: Any) -> Any:
        redistribution(x, placements)
        return forward(ctx, x, mesh, placements, *options)

    # DTensor caches the propagation: `op` is called once for each schema, before it.
    # `propagate_op_sharding` is a cache around the non-cached function. It is replaced by an empty one, because its
    # entries were computed without the check.
    propagator.propagate_op_sharding_non_cached = propagate_checked
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(propagate_checked)
    function.forward = staticmethod(forward_checked)


# -- FSDP2 and DDP ----------------------------------------------------------------------------------------------------


class FsdpParameter(NamedTuple):
    """A parameter under FSDP2.

    Attributes:
        name: its name in the outermost FSDP2 module around it; "" before the first forward.
        parameter: the DTensor that is the module's parameter between steps.
        forms: ids of `parameter` and of the gathered tensor, which replaces it in forward and is autograd's leaf.
        mesh: the mesh over which FSDP2 averages its gradient.
        custom_reduction: True if `set_gradient_divide_factor` or `set_all_reduce_hook` has changed this average.
        tree: id that is the same for all parameters in the outermost FSDP2 module.
    """

    name: str
    parameter: Tensor
    forms: frozenset[int]
    mesh: DeviceMesh
    custom_reduction: bool
    tree: int


def fsdp_parameters() -> list[FsdpParameter]:
    states_of_modules: Any = import_module("torch.distributed._composable_state")._module_state_mapping
    # One state can belong to several modules. `dict` keeps the order of `fully_shard`, which is equal on all ranks.
    states: dict[int, Any] = {id(state): state for ref in states_of_modules.values() if (state := ref()) is not None}
    parameters: list[FsdpParameter] = []
    for state in states.values():
        # Older releases have one group, or None, for each state.
        groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            hook: Any = getattr(group, "_all_reduce_hook", None)
            custom_reduction = group.gradient_divide_factor is not None or hook is not None
            for entry in group.fsdp_params:
                gathered: Tensor | None = getattr(entry, "_unsharded_param", None)  # from the first forward on
                parameter = FsdpParameter(
                    name=getattr(entry, "_param_fqn", None) or "",
                    parameter=entry.sharded_param,
                    forms=frozenset(id(form) for form in (entry.sharded_param, gathered) if form is not None),
                    mesh=group.mesh_info.mesh,
                    custom_reduction=custom_reduction,
                    tree=id(state._state_ctx),
                )
                parameters.append(parameter)
    return parameters


def active_ddp() -> DistributedDataParallel | None:
    return cast(Any, DistributedDataParallel)._get_active_ddp_module()


def has_comm_hook(module: DistributedDataParallel) -> bool:
    return bool(cast(Any, module)._comm_hooks)


def has_gradient_hook(x: Tensor) -> bool:
    """Returns True if a leaf has a hook that gets, and may reduce, its gradient."""
    private: Any = x
    return bool(private._backward_hooks) or bool(private._post_accumulate_grad_hooks)


# -- ops and autograd -------------------------------------------------------------------------------------------------


def define_op(
    schema: str,
    run: Callable[..., Any],
    run_like: Callable[..., Any],
    differentiable: Callable[..., Any] | None = None,
) -> OpOverload:
    """Defines an op in namespace "armillary" that returns new tensors and mutates none.

    Args:
        run: the implementation. torch.compile never traces it, not even after a graph break in its caller.
        run_like: the fake implementation, which returns uninitialized tensors in the shapes of the results.
        differentiable: the implementation under autograd, which calls the op again in the context `below_autograd`.
    """
    # `torch.library.custom_op` takes about 0.1 ms more of the host's time per call of forward and backward: it flattens
    # lists as pytrees, and searches inputs and outputs for shared memory. Tests check that the ops defined here share
    # none.
    name, library = schema.partition("(")[0], torch.library.Library("armillary", "FRAGMENT")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _disable_dynamo(run), "CompositeExplicitAutograd")  # all devices, below autograd
    torch.library.register_fake(f"armillary::{name}", run_like, lib=library)
    if differentiable is not None:
        library.impl(name, differentiable, "Autograd")
    op: OpOverload = getattr(torch.ops.armillary, name).default
    _defined[op] = library, run  # torch removes the op when its library is garbage-collected
    return op


_defined: dict[OpOverload, tuple[torch.library.Library, Callable[..., Any]]] = {}


def function_of(op: OpOverload) -> Callable[..., Any]:
    return _defined[op][1]


def below_autograd() -> AbstractContextManager[Any]:
    """Returns a context in which autograd records nothing, as inside the implementation of an op."""
    return cast(Any, torch)._C._AutoDispatchBelowAutograd()


def above_autograd() -> AbstractContextManager[Any]:
    """Returns a context in which autograd records operations again, inside the implementation of an op."""
    private: Any = cast(Any, torch)._C
    # Before it runs the implementation, the dispatcher excludes the keys of autograd. Include them again.
    keys = private._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        keys = keys.remove(getattr(private.DispatchKey, name))
    return private._ForceDispatchKeyGuard(private._dispatch_tls_local_include_set(), keys)


def transforms_on() -> bool:
    # Transforms of torch.func (grad, vjp, jvp, vmap), and forward-mode AD.
    return cast(Any, torch)._C._functorch.maybe_current_level() is not None or cast(Any, forward_ad)._current_level >= 0


def is_transformed(x: Tensor) -> bool:
    if cast(Any, torch)._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return cast(Any, forward_ad)._current_level >= 0 and cast(Any, forward_ad.unpack_dual(x)).tangent is not None


def keeps_graph() -> bool:
    return cast(Any, torch)._C._autograd._get_current_graph_task_keep_graph()


def after_backward(action: Callable[[], None]) -> None:
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(action)


# -- tensors, devices and the profiler --------------------------------------------------------------------------------


def no_view(x: Tensor) -> Tensor:
    private: Any = cast(Any, torch)._C
    # The kernels of this dispatch key record that the result is a view of x. Without them it is a new tensor.
    view_tracking = private.DispatchKeySet(private.DispatchKey.ADInplaceOrView)
    with private._ExcludeDispatchKeyGuard(view_tracking):
        return torch.ops.aten.alias.default(x)


def references(x: Tensor) -> tuple[int, int]:
    storage: Any = x.untyped_storage()
    return cast(Any, x)._use_count(), cast(Any, torch)._C._storage_Use_Count(storage._cdata)


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Returns True if two tensors have the same storage, even if they use different ranges of it."""
    return cast(Any, torch)._C._is_alias_of(x, y)


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    # Private, but torch's optimizers use it too.
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateUsage]


def fakes_tensors() -> bool:
    private: Any = cast(Any, torch)._C
    return private._get_dispatch_mode(private._TorchDispatchModeKey.FAKE) is not None


def device_error() -> Exception | None:
    """Returns the error of the current accelerator, such as a kernel's illegal memory access; None if it has none."""
    # Queries the stream and does not synchronize: after the loss of a rank, kernels of collectives may never end.
    try:
        torch.accelerator.current_stream().query()
    except torch.AcceleratorError as error:
        return error
    return None


def profiling() -> bool:
    return cast(Any, torch.autograd)._profiler_enabled()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def stager_is_reusable() -> bool:
    # torch 2.11 and 2.12 close the stager after each copy; the next one raises KeyError.
    return torch.__version__ >= "2.13"


# -- torch.compile ----------------------------------------------------------------------------------------------------


def constant_when_traced(function: F) -> F:
    """Decorator `torch.compiler.assume_constant_result`: a graph takes the function's result as a constant."""
    # Sets the mark by hand, because the import of torch.compiler's implementation takes seconds.
    cast(Any, function)._dynamo_marked_constant = True
    return function


def with_dynamic_results(function: F) -> F:
    # By default dynamo traces such ops only with `fullgraph=True`, and otherwise breaks the graph at them.
    import torch._dynamo

    return cast(F, cast(Any, torch._dynamo.config).patch(capture_dynamic_output_shape_ops=True)(function))


def never_traced(function: F) -> F:
    """Decorator of functions that torch.compile never traces, not even after a graph break in their caller."""
    # The first call imports dynamo, which takes seconds: for functions that only users of transformers need.
    return cast(F, _disable_dynamo(function))


def outside_graphs(function: F) -> F:
    """Decorator of functions that torch.compile runs eagerly: a compiled caller breaks its graph at the call."""
    disabled = _disable_dynamo(function)

    # `disabled` imports dynamo at its first call, which takes seconds. So eager callers call `function` itself.
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return cast(F, call)


def dtensors_outside_graphs(function: F) -> F:
    """Decorator of functions that torch.compile runs eagerly if their first argument is a DTensor."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        leaves_graph = torch.compiler.is_compiling() and is_dtensor(x)
        return (disabled if leaves_graph else function)(x, *args, **kwargs)

    return cast(F, call)


def outside_modes(function: F) -> F:
    """Decorator of functions that compute real tensors even under FakeTensorMode, as functions with a cache must."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

        with _disable_current_modes():
            return function(*args, **kwargs)

    return cast(F, call)


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that torch.compile can trace, for one that a torch function mode has received."""
    # Under a mode dynamo inlines the methods of Tensor that are written in Python. Before torch 2.15 it cannot trace
    # the one that calls `super()`. The function of the same name is not written in Python.
    return torch.unflatten if function is Tensor.unflatten else function


def assert_later(condition: Tensor, message: str) -> None:
    """Raises RuntimeError unless `condition` is true; on CUDA without synchronizing the host. Works inside graphs."""
    cast(Any, torch)._assert_async(condition, message)


def traced_object(value: Any) -> Any:
    """Returns the mesh or group in the wrapper that torch.compile passes while it traces; other values unchanged."""
    return getattr(value, "real_obj", value)


# -- imports that take seconds ----------------------------------------------------------------------------------------


def imported_at_first_use(face: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """Returns a module's `__getattr__`, which imports a slow name, of a module in `modules`, at its first use."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def getattr_(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[face], name, value)  # the next use does not come here
        return value

    return getattr_
