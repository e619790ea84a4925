"""The training loop, and what is built before it: from a configuration to a checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from armillary.attention import AttentionMask, build_attention
from armillary.core import Axis, build_mesh, start_process_group
from armillary.core.mesh import world_size
from armillary.data import Batch, PackedSequences
from armillary.models import GPT, Llama, LlamaConfig, initialize, linear_token_loss
from armillary.models.parallel import parallelize
from armillary.train.checkpoint import save_checkpoint, write_config
from armillary.train.config import Config, ModelConfig, OptimizerConfig, check
from armillary.train.metrics import Screen, StepMetrics, Stopwatch, peak_flops, peak_memory
from armillary.train.parallel import choose_axes, choose_device, data_mesh
from armillary.train.rows import load_rows, open_stores, vocabulary_size
from armillary.train.schedule import learning_rate


@dataclass
class Run:
    """Everything that a run needs, built and sharded. `data` is the axis of all ranks that hold tokens of a step."""

    config: Config
    device: torch.device
    data: Axis
    model: Llama
    optimizer: AdamW
    training: PackedSequences
    validation: PackedSequences


@dataclass
class Summary:
    """How a run ended. Losses are means over all tokens; the rate is over all ranks."""

    losses: list[float] = field(default_factory=list[float])
    validation_loss: float = float("nan")
    tokens: int = 0
    seconds: float = 0.0
    memory: int = 0
    checkpoint: Path | None = None

    def text(self, ranks: int) -> str:
        rate = self.tokens / self.seconds
        noun = "rank" if ranks == 1 else "ranks"
        return "\n".join(
            [
                f"trained {len(self.losses)} steps, {self.tokens:,} tokens in {self.seconds:.0f} s on {ranks} {noun}",
                f"  loss         {self.losses[0]:.4f} -> {self.losses[-1]:.4f}",
                f"  validation   {self.validation_loss:.4f}",
                f"  tokens/s     {rate:,.0f} ({rate / ranks:,.0f} a rank)",
                f"  peak memory  {self.memory / 2**30:.2f} GiB a rank",
                f"  checkpoint   {self.checkpoint}",
            ]
        )


@contextmanager
def process_group(config: Config) -> Generator[torch.device]:
    """This rank's device, with a process group around it: the caller's if there is one, else one of its own."""
    check(config)
    device = choose_device(config.train)
    mine = not dist.is_initialized()
    if mine:
        start_process_group(
            device.type, timedelta(minutes=config.train.timeout_minutes), host_too=config.optimizer.on_host
        )
    yield device
    if mine:  # not after an error: taking a group down can wait for ranks that are in a collective
        dist.destroy_process_group()


def prepare(config: Config, device: torch.device) -> Run:
    """Builds mesh, data, model and optimizer. Every rank must call it.

    Raises:
        ValueError: something in the configuration does not fit; raised before the first step.
    """
    timeout = timedelta(minutes=config.train.timeout_minutes)
    mesh = build_mesh(device.type, **choose_axes(config.parallel, world_size()), timeout=timeout)
    attention = build_attention(config.parallel.attention, mesh, config.parallel.heads_per_stage)
    stores = open_stores(config.data)
    model_config = llama_config(config.model, vocabulary_size(stores, config.model.vocab_size))
    with torch.device("meta"):
        model = Llama(model_config)
    parallelize(
        model,
        mesh,
        attention=attention,
        checkpointing=config.checkpointing,
        precision=precision(config, device),
        on_host=config.optimizer.on_host,
        compiler=config.parallel.compiler,
    )
    write_config(config)
    replica = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()
    replicas = mesh["replicate"].size() * mesh["shard"].size()
    training, validation = load_rows(config, stores, attention, replica, replicas)
    model.to_empty(device="cpu" if config.optimizer.on_host else device)
    initialize(model, config.train.seed)
    optimizer = build_optimizer(model, config.optimizer)
    return Run(config, device, Axis.of(data_mesh(mesh)), model, optimizer, training, validation)


def llama_config(config: ModelConfig, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        hidden_dim=config.hidden_dim,
        rope_theta=config.rope_theta,
    )


def precision(config: Config, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward; master weights, gradients and the optimizer are float32 always."""
    chosen = config.train.precision
    if chosen == "auto":
        chosen = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if chosen == "bfloat16" else torch.float32


def build_optimizer(model: Llama | GPT, config: OptimizerConfig) -> AdamW:
    """AdamW; weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def train(run: Run) -> Summary:
    """Trains for the configured steps, validates, writes a checkpoint. Every rank must call it."""
    config, summary = run.config.train, Summary()
    screen = Screen(config.steps, visible=dist.get_rank() == 0)
    watch = Stopwatch()
    with screen:
        for step in range(1, config.steps + 1):
            batch = next(run.training)
            loss, grad_norm = train_step(run, step, batch)
            summary.losses.append(loss)
            watch.count(run.training.tokens_per_batch)
            screen.advance()
            if step == 1 or step % config.log_every == 0 or step == config.steps:
                screen.print(measure(run, step, batch, loss, grad_norm, watch.rate()).line())
            if step % config.validate_every == 0 or step == config.steps:
                with watch.paused():
                    summary.validation_loss = validate(run)
                screen.print(f"validation: step: {step} loss: {summary.validation_loss:.4f}")
    summary.tokens, summary.seconds = watch.all_tokens, watch.all_seconds
    summary.memory = peak_memory(run.device)
    summary.checkpoint = save_checkpoint(config.output, config.steps, run.model, run.optimizer)
    screen.print(summary.text(dist.get_world_size()))
    return summary


def train_step(run: Run, step: int, batch: Batch) -> tuple[float, float]:
    """One optimizer step on one global batch: (loss, gradient norm before clipping), both over all ranks."""
    config = run.config.optimizer
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(step, run.config.train.steps, config)
    loss = global_loss(run, batch)
    loss.backward()
    norm = clip_gradients(run.model, config.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return summed(run, loss.detach()).item(), norm.item()


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients down to a global norm of `limit`; returns the norm that they had, over all ranks."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def global_loss(run: Run, batch: Batch) -> Tensor:
    """This rank's share of the mean loss over all labelled tokens of the global batch: the shares add up to it."""
    tokens, labels = batch.tokens.to(run.device), batch.labels.to(run.device)
    # Counted from the start of the row they are the same in each.
    positions = (batch.positions if run.config.data.reset_positions else batch.positions[0]).to(run.device)
    head = partial(linear_token_loss, labels=labels)
    mask = mask_of(run, batch)
    total, count = run.model(tokens, positions=positions, mask=mask, layout=batch.layout, head=head)
    return total / summed(run, count.to(total.dtype)).clamp(min=1)  # a batch of padding alone has no loss


def mask_of(run: Run, batch: Batch) -> AttentionMask:
    return AttentionMask(documents=batch.documents if run.config.data.document_mask else None)


@torch.no_grad()
def validate(run: Run) -> float:
    """Mean loss over the first batches of the validation rows, the same at every call."""
    batches = range(run.config.train.validation_batches)
    losses = [summed(run, global_loss(run, run.validation.batch(i))) for i in batches]
    return torch.stack(losses).mean().item()


def summed(run: Run, value: Tensor) -> Tensor:
    """`value` summed over all ranks that hold tokens; a fresh tensor."""
    total = value.detach().clone()
    dist.all_reduce(total, group=run.data.group)
    return total


def measure(run: Run, step: int, batch: Batch, loss: float, grad_norm: float, rate: float) -> StepMetrics:
    """The log line of a step; `rate` in tokens/s over all ranks."""
    rate /= dist.get_world_size()
    flops = run.model.config.flops_per_token(batch.layout.length, mask_of(run, batch)) * rate
    peak = peak_flops(run.device)
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=run.optimizer.param_groups[0]["lr"],
        memory=peak_memory(run.device),
        tokens_per_second=rate,
        tflops=flops / 1e12,
        utilisation=None if peak is None else flops / peak,
    )
