"""The memory simulation, compared with counts by hand, real tensors and the allocator."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, Local, UPipe, build_attention
from armillary.attention.internal import Inputs
from armillary.attention.kernels import CpuFlash, CudaFlash, Cudnn
from armillary.core import label
from armillary.core.testing import fake_world
from armillary.models import Checkpointing, GPTConfig, Llama, LlamaConfig, StateConfig
from armillary.models.internal import simulated_stream
from armillary.plan.memory import Job, LiveBytes, SimulatedFlash, SimulatedStep, measured_peak, simulate

MiB = 2**20
SMALL = LlamaConfig(vocab_size=300, dim=64, layers=2, heads=8, kv_heads=4, hidden_dim=160)
JOB = Job(model=SMALL, axes={}, attention=lambda mesh: Local(), length=300)


def in_stages(mesh):
    return UPipe(mesh["ulysses"], heads_per_stage=4)


@pytest.fixture(params=[nullcontext, FakeTensorMode], ids=["real", "fake"])
def tensors(request):
    with request.param():
        yield


# -- live bytes -------------------------------------------------------------------------------------------------------


def test_live_bytes_of_views_copies_and_resizes(tensors):
    with LiveBytes() as live:
        a = torch.zeros(MiB)  # 4 MiB
        view = a.view(1024, 1024)[:, ::2].T
        a.add_(1).mul_(2)
        assert live.device.total == 4 * MiB
        b = view.contiguous()  # 2 MiB
        assert live.device.total == 6 * MiB
        del a
        assert live.device.total == 6 * MiB  # the view keeps it alive
        del view
        assert live.device.total == 2 * MiB
        b.untyped_storage().resize_(0)
        assert live.device.total == 0
        b.untyped_storage().resize_(3 * MiB)
        assert live.device.total == 3 * MiB
        pair = torch.empty(3), torch.empty(200, dtype=torch.float64)
        assert live.device.total == 3 * MiB + 512 + 2048
        del b, pair
    assert (live.device.total, live.device.peak) == (0, 6 * MiB)


def test_labels_pinned_tensors_and_the_hosts_account(tensors):
    before, also = torch.zeros(1024), torch.zeros(1024)
    with LiveBytes(round_to=1) as live:
        assert before.view(32, 32).sum(0).shape == (32,)
        assert live.device.total == 0  # earlier tensors count only if pinned
        live.pin("parameters", [also, also.view(2, 512)])
        assert live.device.breakdown() == {"parameters": 4096}
        del also
        assert live.device.total == 0
    with LiveBytes(round_to=1) as live:
        plain = torch.zeros(10)
        with label("attention"):
            first = torch.zeros(20)
            with label("checkpoints", host=True):
                tensor = torch.zeros(30)
            with label("mlp"):
                second = first + 1
        live.pin("gradients", [plain])
    assert live.device.breakdown() == {"attention": 80, "mlp": 80, "gradients": 40}
    assert live.host.breakdown() == {"checkpoints": 120}
    assert live.device.label_at_peak == "mlp"
    live.pin("checkpoints", [tensor])
    assert (live.host.total, live.device.total) == (0, 320)
    del plain, second


class KeepGradient(torch.autograd.Function):
    """The identity, with a doubled gradient that stays alive."""

    kept_gradients: list[torch.Tensor]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        KeepGradient.kept_gradients = [grad * 2]
        return KeepGradient.kept_gradients[0]


def accumulate_gradients(keep: bool) -> None:
    """Gradients accumulate in place, unless something else refers to the first of them."""
    h = torch.ones(1000, 1000, requires_grad=True) * 2
    y = (KeepGradient.apply(h) if keep else h * 3) + h * 4
    y.backward(torch.ones_like(y))


def composite_op() -> None:
    """Calls an op that autograd would decompose before the dispatch mode."""
    with torch.inference_mode():
        torch.nn.functional.rms_norm(torch.ones(100, 1000, dtype=torch.bfloat16), (1000,))


def attention_op() -> None:
    """Calls an op that allocates inside."""
    mask = AttentionMask(causal=True, documents=(0, 100, 180, 256))  # boundaries stay on the host
    q, k, v = (torch.zeros(2, 256, h, 16, dtype=torch.bfloat16, requires_grad=True) for h in (8, 4, 4))
    Local()(q, k, v, mask=mask, kernel=SimulatedFlash()).sum().backward()


@pytest.mark.parametrize(
    "work",
    [partial(accumulate_gradients, keep=False), partial(accumulate_gradients, keep=True), composite_op, attention_op],
    ids=["gradients", "kept gradients", "composite", "attention"],
)
def test_live_bytes_are_those_of_the_allocator(work):
    work()  # caches the lengths of packed documents
    with LiveBytes(round_to=1) as live:
        work()
    assert live.device.peak == pytest.approx(measured_peak(work), abs=100)  # scalars that become tensors in C++


def test_in_place_accumulation_is_correct():
    x, y = (torch.rand(100, requires_grad=True) for _ in range(2))
    (x.sin() + x * 2 + x.exp()).sum().backward()
    with LiveBytes():
        y.data.copy_(x.data)
        (y.sin() + y * 2 + y.exp()).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_fake_world_of_any_size_leaves_no_process_group():
    with fake_world(shard=2, ring=4, ulysses=8) as mesh:
        assert (dist.get_world_size(), mesh["ring"].size(), mesh["ulysses"].get_local_rank()) == (64, 4, 0)
        for name in ("usp", "ulysses+wallfacer", "ulysses+token_ring", "ulysses+all_gather", "upipe+ring"):
            build_attention(name, mesh)
        with pytest.raises(ValueError, match="64 ranks"), fake_world():
            pass
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="1 rank"), fake_world(ring=0):
        pass
    assert not dist.is_initialized()


# -- the simulated kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_allocations_of_simulated_flash(version):
    q, out, dout = (torch.zeros(2, 200, 8, 80, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(2, 300, 4, 80, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(2, 200, 8)
    with LiveBytes(round_to=1) as live:
        grads = SimulatedFlash(version=version).backward(dout, q, k, v, out, lse, (None, None), None)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    results, rows = q.nbytes + 2 * k.nbytes, 2 * 256
    accumulator, sums = rows * 8 * 96 * 4, rows * 8 * 4
    on_keys = 2 * (2 * 300 * 8 * 80 * 2) if version == 2 else 2 * (2 * 384 * 4 * 96 * 4)
    assert live.device.peak == lse.nbytes + results + accumulator + (sums if version == 2 else 2 * sums) + on_keys
    assert live.device.total == results


def test_simulated_flash_refuses_the_inputs_that_cuda_flash_and_cudnn_refuse():
    for dtype in (torch.bfloat16, torch.float32):
        for dims in ((64, 64), (64, 128), (192, 128), (256, 128), (256, 256), (512, 512), (20, 20)):
            on_cpu, on_cuda = (Inputs(device, dtype, *dims) for device in ("cpu", "cuda"))
            refused, by_cudnn = CudaFlash().refuses(on_cuda), Cudnn().refuses(replace(on_cuda, capability=(9, 0)))
            assert SimulatedFlash(version=3).refuses(on_cpu) == refused
            assert SimulatedFlash().refuses(on_cpu) == (by_cudnn and refused)


# -- steps ------------------------------------------------------------------------------------------------------------


def real(job: Job):
    with fake_world(job.rank, **job.axes) as mesh:
        return SimulatedStep.of(job, mesh).run()


def measured(job: Job) -> int:
    """Returns the allocator's peak, device and host together."""
    with fake_world(job.rank, **job.axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        return measured_peak(lambda: step.train_step(step.allocate_state()))


GROUPED = replace(SMALL, dim=96, heads=6, kv_heads=2, head_dim=16, layers=3)
TIED = replace(SMALL, qk_norm=True, qkv_bias=True, tied_embeddings=True)
GPT = GPTConfig(vocab_size=300, dim=64, layers=2, heads=8, max_positions=300)
HYBRID = replace(
    SMALL,
    layers=3,
    mixers=("delta_rule", "mamba2", "attention"),
    states=StateConfig(heads=8, key_heads=4, key_dim=8, value_dim=16),
)
MESHES = [({"replicate": 2, "ulysses": 4}, "upipe"), ({"ring": 2, "ulysses": 2}, "usp")]
REPLICAS, USP = ({"axes": axes, "attention": partial(build_attention, name), "length": 600} for axes, name in MESHES)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        # The CPU kernel's workspace is not a tensor, and is 13% of such a small step.
        (Checkpointing(), {"model": GROUPED, "kernel": CpuFlash()}),
        (Checkpointing(tiled=True, chunk=80), {"model": TIED, "attention": in_stages}),
        (Checkpointing("layer", chunk=80), {"model": GPT, "attention": in_stages}),
        (Checkpointing("attention_output", chunk=80), REPLICAS),
        (Checkpointing("layer", offload=True, prefetch=False, chunk=80), {}),
        (Checkpointing("layer"), USP | {"model": HYBRID}),
    ],
    ids=["none", "tiled", "layer", "attention_output", "offload", "hybrid"],
)
def test_simulated_and_real_step_agree_to_the_byte(policy, options):
    job = replace(JOB, checkpointing=policy, **options)
    simulated, true = simulate(job), real(job)
    assert replace(simulated, seconds=0, ops=0) == replace(true, seconds=0, ops=0)
    assert sum(simulated.device_breakdown.values()) == simulated.device
    if not policy.offload:  # offloading peaks at different times on device and host
        assert simulated.device == pytest.approx(measured(job), rel=0.15 if job.kernel == CpuFlash() else 0.05)


def forward_bytes(job: Job, stream) -> list[int]:
    """Bytes on the device at the start of each block and after the loss."""
    actual: list[int] = []
    with fake_world() as mesh, LiveBytes(round_to=1) as live, stream:
        step = SimulatedStep.of(job, mesh)
        step.allocate_state()
        for block in step.model.model.layers:
            block.register_forward_pre_hook(lambda *_: actual.append(live.device.total))
        loss = step.loss()
        actual.append(live.device.total)
        del loss
    return actual


@pytest.mark.parametrize("on_device", [0, 1])
def test_offloaded_checkpoints_stay_on_the_device_until_the_next_block_ends(on_device):
    """On a GPU, a block runs beside the checkpoints of the block below, and the loss beside those of the last block."""
    model, options = replace(SMALL, layers=3), Checkpointing("attention_output", offload=True, on_device=on_device)
    job = replace(JOB, model=model, checkpointing=options)
    x, out, lse = 300 * 64 * 2, 300 * 8 * 8 * 2, 300 * 8 * 4
    longer, shorter = forward_bytes(job, simulated_stream()), forward_bytes(job, nullcontext())
    growth = [a - b for a, b in zip(longer, shorter, strict=True)]
    assert growth == [0, x + out + lse, x + out + lse, 0 if on_device else x + out + lse]


def test_places_of_parameters_gradients_and_optimizer():
    job = replace(JOB, axes={"ulysses": 4}, attention=partial(build_attention, "ulysses"))
    shards = [-(-p.shape[0] // 4) * 4 * p.numel() // p.shape[0] for p in parameters(SMALL)]
    rounded = sum(-(-shard // 512) * 512 for shard in shards)
    on_device = simulate(job)
    assert on_device.device_breakdown["optimizer"] == 2 * rounded + 512 * len(shards)  # each has a step counter
    assert on_device.device_breakdown["parameters"] > rounded
    assert on_device.host_breakdown == {}
    on_host = simulate(replace(job, on_host=True))
    assert on_host.host_breakdown["optimizer"] >= on_device.device_breakdown["optimizer"]
    assert on_host.host_breakdown["parameters"] == rounded
    assert "optimizer" not in on_host.device_breakdown


def parameters(config: LlamaConfig) -> list[nn.Parameter]:
    with torch.device("meta"):
        return list(Llama(config).parameters())
