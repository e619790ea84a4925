"""The memory simulation, compared with counts by hand, real tensors and the allocator."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.attention import AttentionMask, Local, UPipe, build_attention
from armillary.attention.kernels import CpuFlash, CudaFlash
from armillary.attention.parts import Inputs
from armillary.core import label
from armillary.core.parts import current_label
from armillary.core.testing import fake_world
from armillary.models import Checkpointing, GPTConfig, Llama, LlamaConfig, StateConfig
from armillary.models.parts import simulated_stream
from armillary.plan.memory import Account, Job, LiveBytes, SimulatedFlash, SimulatedStep, measured_peak, simulate

MiB = 2**20
SMALL = LlamaConfig(vocab_size=300, dim=64, layers=2, heads=8, kv_heads=4, hidden_dim=160)
JOB = Job(model=SMALL, axes={}, attention=lambda mesh: Local(), length=300)


def in_stages(mesh):
    return UPipe(mesh["ulysses"], heads_per_stage=4)


@pytest.fixture(params=[nullcontext, FakeTensorMode], ids=["real", "fake"])
def tensors(request):
    with request.param():
        yield


# -- accounts ---------------------------------------------------------------------------------------------------------


def test_relabelling_corrects_the_peak_only_for_allocations_live_at_the_peak():
    account = Account()
    early = account.allocate(100, "other")
    account.allocate(50, "other")
    account.resize(early, 0)
    late = account.allocate(60, "other")
    account.relabel(early, "freed")
    account.relabel(late, "gradients")
    assert (account.peak, account.breakdown()) == (150, {"other": 150})
    assert {name: size for name, size in account.current.items() if size} == {"other": 50, "gradients": 60}
    account.allocate(1000, "mlp", "mlp")
    account.relabel(late, "parameters")
    assert account.breakdown() == {"mlp": 1000, "parameters": 60, "other": 50}
    assert account.label_at_peak == "mlp"


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


def test_earlier_tensors_count_only_if_pinned(tensors):
    before, also = torch.zeros(1024), torch.zeros(1024)
    with LiveBytes(round_to=1) as live:
        assert before.view(32, 32).sum(0).shape == (32,)
        assert live.device.total == 0
        live.pin("parameters", [also, also.view(2, 512)])
        assert live.device.breakdown() == {"parameters": 4096}
        del also
        assert live.device.total == 0


def test_the_innermost_label_and_the_hosts_account(tensors):
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


def test_labels_appear_in_a_profile():
    assert current_label() is None
    with torch.profiler.profile() as profiler, label("mlp"):
        assert current_label() == ("mlp", False)
        torch.ones(3)
    assert "mlp" in {event.key for event in profiler.key_averages()}


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


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_accumulate_in_place_as_in_autograd(keep):
    h = torch.ones(1000, 1000, requires_grad=True) * 2
    y = (KeepGradient.apply(h) if keep else h * 3) + h * 4

    def work():
        y.backward(torch.ones_like(y), retain_graph=True)

    work()
    with LiveBytes(round_to=1) as live:
        work()
    assert live.device.peak == pytest.approx(measured_peak(work), abs=100)  # scalars that become tensors in C++


def test_composite_ops_are_counted_by_their_parts():
    x = torch.ones(100, 1000, dtype=torch.bfloat16)

    def work():
        with torch.inference_mode():  # or autograd would decompose it before the dispatch mode
            torch.nn.functional.rms_norm(x, (1000,))

    with LiveBytes(round_to=1) as live:
        work()
    assert live.device.peak == pytest.approx(measured_peak(work), abs=100)


def test_in_place_accumulation_is_correct():
    x, y = (torch.rand(100, requires_grad=True) for _ in range(2))
    (x.sin() + x * 2 + x.exp()).sum().backward()
    with LiveBytes():
        y.data.copy_(x.data)
        (y.sin() + y * 2 + y.exp()).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_measured_peak_ignores_earlier_garbage():
    def leave():
        ring = [torch.zeros(MiB)]
        ring.append(ring)

    def work():
        gc.collect()
        torch.zeros(MiB)

    measured_peak(leave)
    assert measured_peak(work) == 4 * MiB


def test_allocations_inside_an_attention_op_are_counted():
    mask = AttentionMask(causal=True, documents=(0, 100, 180, 256))  # boundaries stay on the host

    def work():
        q, k, v = (torch.zeros(2, 256, h, 16, dtype=torch.bfloat16, requires_grad=True) for h in (8, 4, 4))
        Local()(q, k, v, mask=mask, kernel=SimulatedFlash()).sum().backward()

    work()  # caches the lengths of packed documents
    with LiveBytes(round_to=1) as live:
        work()
    assert live.device.peak == measured_peak(work)


# -- fake worlds ------------------------------------------------------------------------------------------------------


def test_a_fake_world_of_any_size_leaves_no_process_group():
    with fake_world(shard=2, ring=4, ulysses=8) as mesh:
        assert (dist.get_world_size(), mesh["ring"].size(), mesh["ulysses"].get_local_rank()) == (64, 4, 0)
        for name in ("usp", "ulysses+wallfacer", "ulysses+token_ring", "ulysses+all_gather", "upipe+ring"):
            build_attention(name, mesh)
        with pytest.raises(ValueError, match="64 ranks"), fake_world():
            pass
    assert not dist.is_initialized()


def test_a_fake_world_leaves_no_process_group_after_an_error():
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


def test_simulated_flash_refuses_the_same_inputs_as_cuda_flash():
    for dtype in (torch.bfloat16, torch.float32):
        for dims in ((64, 64), (64, 128), (512, 512), (20, 20)):
            on_cpu, on_cuda = (Inputs(device, dtype, *dims) for device in ("cpu", "cuda"))
            assert SimulatedFlash().refuses(on_cpu) == CudaFlash().refuses(on_cuda)


# -- steps ------------------------------------------------------------------------------------------------------------


def real(job: Job):
    with fake_world(job.rank, **job.axes) as mesh:
        return SimulatedStep.of(job, mesh).run()


def measured(job: Job) -> int:
    """Returns the allocator's peak, device and host together."""
    with fake_world(job.rank, **job.axes) as mesh:
        step = SimulatedStep.of(job, mesh)
        return measured_peak(lambda: step.train_step(step.allocate_state()))


@pytest.mark.parametrize(
    ("policy", "attention"),
    [
        (Checkpointing(), JOB.attention),
        (Checkpointing(tiled=True, chunk=80), in_stages),
        (Checkpointing("layer", chunk=80), in_stages),
        (Checkpointing("attention_output", chunk=80), JOB.attention),
        (Checkpointing("layer", offload=True, prefetch=False, chunk=80), JOB.attention),
    ],
    ids=["none", "tiled", "layer", "attention_output", "offload"],
)
def test_simulated_and_real_step_agree_to_the_byte(policy, attention):
    job = replace(JOB, checkpointing=policy, attention=attention)
    simulated, true = simulate(job), real(job)
    assert replace(simulated, seconds=0, ops=0) == replace(true, seconds=0, ops=0)
    assert sum(simulated.device_breakdown.values()) == simulated.device
    if not policy.offload:  # offloading peaks at different times on device and host
        assert simulated.device == pytest.approx(measured(job), rel=0.05)


HYBRID = replace(
    SMALL,
    layers=3,
    mixers=("delta_rule", "mamba2", "attention"),
    states=StateConfig(heads=8, key_heads=4, key_dim=8, value_dim=16),
)


@pytest.mark.parametrize("policy", ["none", "layer"])
def test_simulated_and_real_step_of_a_hybrid_agree_to_the_byte(policy):
    axes, attention = {"ring": 2, "ulysses": 2}, partial(build_attention, "usp")
    job = replace(JOB, model=HYBRID, axes=axes, attention=attention, length=600, checkpointing=Checkpointing(policy))
    simulated, true = simulate(job), real(job)
    assert replace(simulated, seconds=0, ops=0) == replace(true, seconds=0, ops=0)
    assert simulated.device == pytest.approx(measured(job), rel=0.05)


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


@pytest.mark.parametrize(
    ("axes", "method"),
    [pytest.param({"ring": 2, "ulysses": 2}, "usp", marks=pytest.mark.long), ({"replicate": 2, "ulysses": 4}, "upipe")],
    ids=str,
)
def test_simulated_and_real_step_of_several_ranks_agree_to_the_byte(axes, method):
    job = replace(JOB, axes=axes, attention=partial(build_attention, method), length=600)
    simulated, true = simulate(job), real(job)
    assert replace(simulated, seconds=0, ops=0) == replace(true, seconds=0, ops=0)
    assert simulated.device == pytest.approx(measured(job), rel=0.05)


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


MODELS = {
    "grouped heads": replace(SMALL, dim=96, heads=6, kv_heads=2, head_dim=16, layers=3),
    "norms, biases, tied": replace(SMALL, qk_norm=True, qkv_bias=True, tied_embeddings=True),
    "gpt": GPTConfig(vocab_size=300, dim=64, layers=2, heads=4, max_positions=300),
}


@pytest.mark.parametrize(("name", "policy"), list(zip(MODELS, ("none", "layer", "layer"), strict=True)))
def test_small_models_with_the_cpu_kernel(name, policy):
    """Tensors agree to the byte. The CPU kernel's workspace is not a tensor, and is 13% of such a small step."""
    job = replace(JOB, model=MODELS[name], kernel=CpuFlash(), checkpointing=Checkpointing(policy, chunk=100))
    simulated, true = simulate(job), real(job)
    assert replace(simulated, seconds=0, ops=0) == replace(true, seconds=0, ops=0)
    assert simulated.device == pytest.approx(measured(job), rel=0.15)


def test_a_block_of_a_large_model_on_many_ranks():
    model = replace(LlamaConfig.llama3_8b(), layers=1)
    job = Job(model=model, axes={"ulysses": 8}, attention=partial(build_attention, "usp"), length=2**20)
    memory = simulate(replace(job, checkpointing=Checkpointing("layer")))
    assert memory.device > 2**32 and memory.label == "attention"
