"""`ContextParallel` in a training loop: losses and gradients equal one rank's, under each wrapper."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

from armillary.attention import AttentionMask, ContextParallel, Local, Ring, Ulysses, build_attention, sdpa_parallel
from armillary.core import CommLedger, sum_gradients
from armillary.core.internal import compat
from armillary.core.testing import mesh, relative_error

VOCABULARY, EMBED, HEADS = 32, 16, 4
RANKS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)

    def forward(self, x, attention):
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(attention(q, k, v).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, EMBED), nn.Embedding(128, EMBED)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(EMBED, VOCABULARY)
        self.recompute = False

    def forward(self, ids, position_ids, attention):
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = checkpoint(block, x, attention, use_reentrant=False) if self.recompute else block(x, attention)
        return self.head(x)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


@dataclass(frozen=True)
class Setup:
    """Arrangement of rows, labels and ranks. Each of the `data` groups of ranks has other rows."""

    wrapper: str
    data: int = 1
    length: int = 41
    documents: bool = False
    labels_from: int = 0
    """Positions below have no label, so some ranks may have none."""
    micro_batches: int = 1
    recompute: bool = False
    window: int | None = None


def rows_of(setup: Setup, group: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor, list[int] | None]:
    generator = torch.Generator().manual_seed(10 * micro_batch + group)
    ids = torch.randint(VOCABULARY, (2, setup.length), generator=generator)
    labels = ids.clone()
    labels[:, : setup.labels_from + 7 * group] = -100  # each group has another number of labels
    labels[1, micro_batch : micro_batch + 3] = -100
    documents = [0, 5 + group + micro_batch, 24, setup.length] if setup.documents else None
    return ids, labels, documents


def label_count(labels: torch.Tensor, documents: list[int] | None) -> int:
    """Counts labels after shifting: all but the first token of each document."""
    counted = labels.clone()
    counted[:, (documents or [0, 0])[:-1]] = -100
    return int((counted != -100).sum())


def expected_step(setup: Setup) -> tuple[float, list[torch.Tensor]]:
    """Returns loss and gradients of one rank with the rows of all groups."""
    model, total, count = new_model(), torch.zeros(()).double(), 0
    for micro_batch in range(setup.micro_batches):
        for group in range(setup.data):
            ids, labels, documents = rows_of(setup, group, micro_batch)
            ends = documents or [0, setup.length]
            positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
            window = None if setup.window is None else (setup.window, 0)
            mask = AttentionMask(causal=True, window=window, documents=documents)
            logits = model(ids, positions, lambda q, k, v, mask=mask: Local()(q, k, v, mask=mask))
            shifted = labels.roll(-1, 1)
            shifted[:, [end - 1 for end in ends[1:]]] = -100
            total = total + F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
            count += label_count(labels, documents)
    loss = total / count
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


def wrapped(setup: Setup, model: Model) -> nn.Module:
    if setup.wrapper == "ddp":
        return DistributedDataParallel(model)
    if setup.wrapper == "none":
        return model
    ranks = init_device_mesh("cpu", (RANKS,))
    if setup.wrapper == "hsdp":
        ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=ranks)
    return model


def sharded_step(setup: Setup) -> tuple[float, float]:
    """Returns relative errors of the loss and of the worst gradient."""
    axes = mesh(shard=setup.data, ring=RANKS // setup.data)
    cp = ContextParallel("ring", axes, data="shard" if setup.data > 1 else ())
    group = axes["shard"].get_local_rank() if setup.data > 1 else 0
    plain = new_model()
    plain.recompute = setup.recompute
    model = wrapped(setup, plain)
    labelled = None
    if setup.micro_batches > 1:
        batches = [rows_of(setup, g, m) for g in range(setup.data) for m in range(setup.micro_batches)]
        labelled = sum(label_count(labels, documents) for _, labels, documents in batches)
    window = None if setup.window is None else AttentionMask(causal=True, window=(setup.window, 0))
    value = 0.0
    for micro_batch in range(setup.micro_batches):
        ids, labels, documents = rows_of(setup, group, micro_batch)
        batch = cp.shard(ids, labels, documents=documents, mask=window, labelled=labelled)
        logits = model(batch.ids, batch.position_ids, batch.attend)
        loss = cp.loss(logits, batch)
        if setup.recompute:  # the next batch, with other documents, is sharded before backward
            cp.shard(ids.flip(1), documents=[0, 3, setup.length])
        loss.backward()
        value += float(loss.detach())
    if setup.wrapper == "none":
        cp.reduce_gradients(model)
    expected_loss, expected = expected_step(setup)
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in plain.parameters()]
    errors = [relative_error(a, b) for a, b in zip(gradients, expected, strict=True)]
    return abs(value - expected_loss) / expected_loss, max(errors)


SETUPS = [
    Setup("ddp", data=2),
    Setup("none"),
    Setup("fsdp2", documents=True, recompute=True),
    Setup("fsdp2", data=2, documents=True, labels_from=31),  # most ranks have no label
    Setup("hsdp", data=2, documents=True, micro_batches=3, recompute=True, length=47),
    Setup("ddp", documents=True, labels_from=38),
    Setup("none", data=2, documents=True, micro_batches=2, window=6),
]


def each_sharded_step() -> list[tuple[float, float]]:
    return [sharded_step(setup) for setup in SETUPS]


def test_loss_and_gradients_equal_one_rank(worlds):
    for rank in worlds(RANKS).run(each_sharded_step):
        for setup, (loss_error, gradient_error) in zip(SETUPS, rank, strict=True):
            assert loss_error < 1e-12 and gradient_error < 1e-10, setup


def batches_and_tensors() -> float:
    """Returns the loss of a batch without labels; compares documents of masks and batches, and gathered tensors."""
    cp, ids, model = ContextParallel("ring", mesh(ring=RANKS)), torch.arange(12)[None], new_model()
    by_name = cp.shard(ids, documents=[0, 5, 12])
    by_mask = cp.shard(ids, mask=AttentionMask(causal=True, documents=[0, 5, 12]))
    assert by_mask.mask == by_name.mask
    assert torch.equal(by_mask.position_ids, by_name.position_ids) and torch.equal(by_mask.labels, by_name.labels)
    x, of_heads = torch.arange(2 * 41 * 3.0).view(2, 41, 3), ContextParallel("usp", mesh(ring=2, ulysses=2))
    batch = of_heads.shard(torch.zeros((2, 41), dtype=torch.long))
    shard = batch.take(x)
    assert torch.equal(batch.gather(shard), x) and shard.shape[:2] == batch.ids.shape
    batch = cp.shard(ids, torch.full_like(ids, -100))
    loss = cp.loss(model(batch.ids, batch.position_ids, batch.attend), batch)
    loss.backward()
    cp.reduce_gradients(model)
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    return float(loss.detach())


def test_documents_gathered_tensors_and_a_batch_without_labels(worlds):
    assert worlds(RANKS).run(batches_and_tensors) == [0.0] * RANKS


class SdpaModel(Model):
    def forward(self, ids, position_ids):
        def attention(q, k, v):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

        return super().forward(ids, position_ids, attention)


def sdpa_loss() -> float:
    axes = mesh(ring=2, ulysses=2)
    cp = ContextParallel(Ulysses(axes["ulysses"], inner=Ring(axes["ring"])), axes)
    torch.manual_seed(0)
    model, setup = SdpaModel().double(), Setup("none", documents=True)
    ids, labels, documents = rows_of(setup, 0, 0)
    with cp.shard(ids, labels, documents=documents) as batch, sdpa_parallel(cp.method):
        loss = cp.loss(model(batch.ids, batch.position_ids), batch)
    return abs(float(loss.detach()) - expected_step(setup)[0])


def test_batch_is_a_context_manager_for_sdpa(worlds):
    assert max(worlds(RANKS).run(sdpa_loss)) < 1e-12


def losses_of_own_shares() -> list[float]:
    """Relative errors of losses that a script computes itself, as shares; checks when a scalar is refused."""
    cp, model, setup = ContextParallel("ring", mesh(ring=RANKS)), new_model(), Setup("none", documents=True)
    ids, labels, documents = rows_of(setup, 0, 0)
    expected, gradients = expected_step(setup)
    batch = cp.shard(ids, labels, documents=documents)
    logits = model(batch.ids, batch.position_ids, batch.attend)
    total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    cp.loss(logits.detach(), batch)  # reads no number of labels for the script
    with pytest.raises(ValueError, match=r"batch\.labelled.*batch\.inputs"):
        cp.loss(total / label_count(labels, documents), batch)
    loss = cp.loss(total / batch.labelled, batch)
    loss.backward()
    cp.reduce_gradients(model)
    pairs = zip(model.parameters(), gradients, strict=True)
    return [abs(float(loss.detach()) / expected - 1), *(relative_error(p.grad, gradient) for p, gradient in pairs)]


def test_a_script_may_compute_this_ranks_share_itself(worlds):
    assert all(max(errors) < 1e-10 for errors in worlds(RANKS).run(losses_of_own_shares))


def recomputed_with_other_batches() -> str:
    """Recomputes with a batch that no forward has used, and two forwards with the batch of the last one."""
    cp, model, ids = ContextParallel("ring", mesh(ring=RANKS)), new_model(), torch.arange(20)[None]
    model.recompute, losses, attends = True, [], []
    for documents in ([0, 20], [0, 7, 20]):
        batch = cp.shard(ids, documents=documents)
        attends.append(batch.attend)
        logits = model(batch.ids, batch.position_ids, lambda q, k, v: attends[-1](q, k, v))
        losses.append(cp.loss(logits, batch))
    with pytest.raises(CheckpointError) as raised:
        losses[0].backward()
    attends.append(cp.shard(ids.flip(1)).attend)
    with pytest.raises(ValueError, match="no forward has used"):
        losses[1].backward()
    return str(raised.value)


def test_a_recompute_with_the_batch_of_another_forward_raises(worlds):
    assert all("metadata" in message for message in worlds(RANKS).run(recomputed_with_other_batches))


def loss_traffic() -> dict[str, int]:
    """Returns the bytes that a loss sends in each phase; checks those of reduced gradients."""
    cp, model = ContextParallel("ring", mesh(shard=2, ring=2), data="shard"), new_model()
    batch = cp.shard(torch.arange(20)[None])
    logits = model(batch.ids, batch.position_ids, batch.attend).detach().requires_grad_()
    with CommLedger() as ledger:
        loss = cp.loss(logits, batch)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss_bytes = {phase: ledger.bytes(kind="all_reduce", phase=phase) for phase in ("forward", "backward")}
        cp.reduce_gradients(model)
    sizes = [p.nbytes for p in model.parameters()]
    gradient_bytes = sum(sizes) + 8 * len(sizes)  # and one integer per parameter
    assert ledger.bytes("ring") == ledger.bytes("shard") == gradient_bytes + 16
    assert ledger.bytes() == ledger.bytes(kind="all_reduce")
    return loss_bytes


def test_loss_sends_one_number_per_phase_and_gradients_their_own_bytes(worlds):
    # An all-reduce over 2 ranks sends 2 x 1/2 of a tensor; over two axes twice.
    assert worlds(RANKS).run(loss_traffic) == [{"forward": 16, "backward": 16}] * RANKS


# -- averages over other ranks -----------------------------------------------------------------------------------------


class GatheredHead(nn.Linear):
    """A head sharded over the ring. Its gradient is summed over the tokens of the ring, as that of experts is."""

    def __init__(self, ring: DeviceMesh, head: nn.Linear):
        super().__init__(EMBED, VOCABULARY)
        for name, parameter in head.named_parameters():
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), ring, [Shard(0)])))

    def forward(self, x):
        return F.linear(x, *(p.full_tensor(grad_placements=[Partial()]) for p in (self.weight, self.bias)))


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if compat.is_dtensor(x) else x


def shard_units(model: Model, ranks: DeviceMesh, root: bool = True) -> None:
    for part in (*model.blocks, *([model] if root else [])):
        fully_shard(part, mesh=ranks)


def freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


class Averaging:
    """Functions that put a model under FSDP2 or DDP, each in another way; they return a wrapper or None."""

    def __init__(self, axes: DeviceMesh):
        self.axes, self.shard, self.ring, self.every = axes, axes["shard"], axes["ring"], axes._flatten("every")

    def fsdp(self, model):
        shard_units(model, self.every)

    def hsdp(self, model):
        shard_units(model, self.axes["shard", "ring"])

    def ddp(self, model):
        return DistributedDataParallel(model)

    def fsdp_without_root(self, model):
        shard_units(model, self.every, root=False)

    def fsdp_without_ring(self, model):
        shard_units(model, self.shard)

    def fsdp_of_a_block_without_ring(self, model):
        fully_shard(model.blocks[1], mesh=self.shard)
        fully_shard(model, mesh=self.every)

    def fsdp_without_the_gathered_head(self, model):
        model.head = GatheredHead(self.ring, model.head)
        shard_units(model, self.every, root=False)
        freeze(model.tokens, model.positions)

    def ddp_without_ring(self, model):
        return DistributedDataParallel(model, process_group=self.shard.get_group())

    # The caller's own reductions, and parameters without gradients.

    def fsdp_of_the_gathered_head_with_a_divide_factor(self, model):
        model.head = GatheredHead(self.ring, model.head)
        fully_shard(model.head, mesh=self.shard)
        model.head.set_gradient_divide_factor(float(RANKS))
        model.head.set_force_sum_reduction_for_comms(True)  # gloo cannot divide
        shard_units(model, self.every)

    def ddp_without_ring_with_a_hook(self, model):
        ddp = self.ddp_without_ring(model)
        sum_gradients(ddp)
        return ddp

    def fsdp_without_root_with_hooks(self, model):
        shard_units(model, self.every, root=False)
        for p in nn.ModuleList([model.tokens, model.positions, model.head]).parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(RANKS)))

    def fsdp_without_root_which_is_frozen(self, model):
        shard_units(model, self.every, root=False)
        freeze(model.tokens, model.positions, model.head)

    def frozen_fsdp_without_ring_and_without_root(self, model):
        freeze(model.blocks)
        shard_units(model, self.shard, root=False)


# The axes that a `ContextParallel` knows.
EVERY, RING, METHOD = "ring and data", "ring of the mesh", "ring without a mesh"
WRONG = [
    # Words of the error. A parameter outside of FSDP2 has no known name.
    ("fsdp_without_root", EVERY, ["(32, 16)", "FSDP2", "[0, 1, 2, 3]", "ring, shard"]),
    ("fsdp_without_ring", EVERY, ["blocks.0.qkv.weight", "FSDP2", "[0, 1, 2, 3]", "ring, shard"]),
    ("fsdp_of_a_block_without_ring", EVERY, ["blocks.1.qkv.weight", "FSDP2"]),
    ("fsdp_without_the_gathered_head", EVERY, ["(32, 16)", "FSDP2"]),
    ("ddp_without_ring", EVERY, ["tokens.weight", "DistributedDataParallel", "[0, 1, 2, 3]"]),
    ("fsdp_without_ring", RING, ["blocks.0.qkv.weight", "FSDP2"]),
    ("fsdp", RING, ["blocks.0.qkv.weight", "FSDP2", "[0, 1, 2, 3]", "data="]),
    ("hsdp", RING, ["blocks.0.qkv.weight", "FSDP2", "[0, 1, 2, 3]", "data="]),
    ("ddp", RING, ["tokens.weight", "DistributedDataParallel", "data="]),
    ("fsdp_without_ring", METHOD, ["blocks.0.qkv.weight", "FSDP2"]),
]
RIGHT = [
    ("fsdp", EVERY, True),  # True: the gradients are those of one rank
    ("fsdp_of_the_gathered_head_with_a_divide_factor", EVERY, True),
    ("fsdp_without_root_with_hooks", EVERY, True),
    ("fsdp_without_root_which_is_frozen", EVERY, True),
    ("ddp_without_ring_with_a_hook", EVERY, False),
    ("frozen_fsdp_without_ring_and_without_root", EVERY, False),
    ("fsdp", METHOD, False),  # an average over groups of ranks that the loss does not know, as in a Trainer
    ("ddp", METHOD, False),
]


def averaging_errors() -> tuple[list[float], list[str]]:
    """Returns the largest error of a gradient for each line of `RIGHT`, and the refusal of each line of `WRONG`."""
    axes, setup = mesh(shard=2, ring=2), Setup("", data=2)
    averaging, ring = Averaging(axes), Ring(axes["ring"])
    # Each of these has losses of many models, one after another.
    knowing = {EVERY: ContextParallel(ring, axes, data="shard"), RING: ContextParallel(ring, axes)}
    knowing[METHOD] = ContextParallel(ring)
    ids, labels, _ = rows_of(setup, axes["shard"].get_local_rank(), 0)
    _, expected = expected_step(setup)

    def step(way, knowledge):
        model, cp = new_model(), knowing[knowledge]
        wrapper = getattr(averaging, way)(model) or model
        batch = cp.shard(ids, labels)
        return model, cp, batch, wrapper(batch.ids, batch.position_ids, batch.attend)

    gradient_errors, refusals = [], []
    for way, knowledge, complete in RIGHT:
        model, cp, batch, logits = step(way, knowledge)
        cp.loss(logits, batch).backward()
        pairs = [(p.grad, gradient) for p, gradient in zip(model.parameters(), expected, strict=True) if complete]
        errors = [relative_error(full(a), b) for a, b in pairs if a is not None]
        gradient_errors.append(max(errors, default=0.0))
    for way, knowledge, _ in WRONG:
        _, cp, batch, logits = step(way, knowledge)
        with CommLedger() as ledger, pytest.raises(ValueError) as raised:
            cp.loss(logits, batch)
        assert ledger.bytes() == 0  # no rank waits for another
        cp.loss(logits.detach(), batch)  # without gradients, their average does not matter
        refusals.append(str(raised.value))
    return gradient_errors, refusals


def test_averages_over_other_ranks_raise_before_the_loss_is_summed(worlds):
    for gradient_errors, refusals in worlds(RANKS).run(averaging_errors):
        for (way, *_), error in zip(RIGHT, gradient_errors, strict=True):
            assert error < 1e-10, way
        for (way, knowledge, words), refusal in zip(WRONG, refusals, strict=True):
            assert all(word in refusal for word in words), (way, knowledge, refusal)


def errors_under_tensor_parallelism() -> tuple[float, int]:
    """Returns the largest error of a gradient in the second step, and how often that step looked parameters up."""
    axes, setup = mesh(ring=2, tp=2), Setup("")
    cp, model = ContextParallel("ring", axes), new_model()
    parallelize_module(model.head, axes["tp"], ColwiseParallel(output_layouts=Replicate()))
    shard_units(model, axes["ring"])
    ids, labels, _ = rows_of(setup, 0, 0)
    for _ in range(2):
        model.zero_grad()
        batch = cp.shard(ids, labels)
        logits = model(batch.ids, batch.position_ids, batch.attend)
        with patch.object(compat, "fsdp_parameters", wraps=compat.fsdp_parameters) as lookup:
            cp.loss(logits, batch).backward()
    pairs = zip(model.parameters(), expected_step(setup)[1], strict=True)
    return max(relative_error(p.grad.full_tensor(), gradient) for p, gradient in pairs), lookup.call_count


def test_tensor_parallelism_beside_fsdp2_is_right_and_checked_once(worlds):
    for error, later_lookups in worlds(RANKS).run(errors_under_tensor_parallelism):
        assert error < 1e-10
        assert later_lookups == 0


# -- conventions of other trainers -------------------------------------------------------------------------------------


def step_on_one_axis(name: str, options: dict, gradients: str) -> tuple[float, list[torch.Tensor]]:
    """A step on the axis "cp" beside "dp", with a loss of logits that were gathered, or of the script's own count."""
    outer = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(build_attention(name, outer["cp"], **options), outer)
    model, (ids, labels, _) = new_model(), rows_of(Setup("none"), 0, 0)
    batch = cp.shard(ids, labels, labelled=False)
    logits = model(batch.ids, batch.position_ids, batch.attend)
    count = label_count(labels, None)
    if gradients == "own count":
        share = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / count
        loss = cp.loss(share, batch)
        with pytest.raises(ValueError, match="labelled=False"):
            cp.loss(logits, batch)
    else:
        whole, next_labels = batch.gather(logits, gradients=gradients), F.pad(labels[:, 1:], (0, 1), value=-100)
        losses = F.cross_entropy(whole.flatten(0, 1), next_labels.flatten(), reduction="none") / count
        mine = slice(cp.method.shard, None, RANKS) if gradients == "shares" else slice(None)
        loss = losses[mine].sum()
        loss = cp.loss(loss, batch) if gradients == "shares" else loss
    loss.backward()
    cp.reduce_gradients(model)
    return float(loss.detach()), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "options", "gradients"),
    [
        ("ring", {}, "own count"),
        ("usp", {"ulysses": 2}, "replicated"),
        ("upipe+token_ring", {"ulysses": 2}, "shares"),
        ("ulysses", {}, "own count"),
    ],
)
def test_one_axis_own_counts_and_gathered_logits_equal_one_rank(worlds, name, options, gradients):
    expected, expected_gradients = expected_step(Setup("none"))
    for loss, ranks_gradients in worlds(RANKS).run(step_on_one_axis, name, options, gradients):
        assert abs(loss - expected) < 1e-12
        for gradient, other in zip(ranks_gradients, expected_gradients, strict=True):
            assert relative_error(gradient, other) < 1e-10


def test_masks_of_positions_have_the_documents_of_packed_rows():
    rows = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    mask = AttentionMask.from_positions(rows, window=(3, 0))
    assert mask == AttentionMask(causal=True, window=(3, 0), documents=((0, 3, 5, 6), (0, 6)))
    assert AttentionMask.from_positions(rows[0]).documents == (0, 3, 5, 6)
    with pytest.raises(ValueError, match="position_ids"):
        AttentionMask.from_positions(rows[0].float())


def compiled_blocks(sizes: dict[str, int], recompute: bool) -> tuple[int, list[float]]:
    """Graphs of a block compiled with fullgraph, over five steps with other documents, and errors against eager."""
    cp, length, errors = ContextParallel("ring" if "ulysses" not in sizes else "usp", mesh(**sizes)), 26, list[float]()
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    block, compiled = (Block().double() for _ in range(2))
    compiled.load_state_dict(block.state_dict())
    compiled.compile(backend=graphs, fullgraph=True)
    for step, cuts in enumerate(([], [20], [5, 9, 17], [7], [1, 2, 3, 24])):
        ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(step))
        with cp.shard(ids, documents=[0, *cuts, length]) as batch:
            hidden, gradients = torch.randn(*batch.ids.shape, EMBED).double(), list[list[torch.Tensor]]()
            for module in (compiled, block):
                x = hidden.clone().requires_grad_()
                call = partial(checkpoint, module, use_reentrant=False) if recompute else module
                loss = call(x, batch.attend).square().sum()
                gradients.append([loss.detach(), *torch.autograd.grad(loss, [x, *module.parameters()])])
            errors += [relative_error(*pair) for pair in zip(*gradients, strict=True)]
    return graphs.frame_count, errors


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [{"ring": 2}, {"ulysses": 2}])
def test_attend_in_compiled_blocks_is_as_in_eager_mode_with_one_recompile(worlds, sizes, recompute):
    for graphs, errors in worlds(2).run(compiled_blocks, sizes, recompute):
        assert graphs <= 2
        assert max(errors) < 1e-12
