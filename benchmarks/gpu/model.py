"""The trainer's step of a LLaMA on one rank: FSDP2, the fused loss, clipping and AdamW."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from armillary.attention import AttentionMask, Local, Method
from armillary.core import SequenceLayout, clip_gradients
from armillary.core.internal import dtensor
from armillary.models import Checkpointing, Llama, LlamaConfig, initialize, linear_token_loss, parallelize
from gpu.check import Setting

TINY = LlamaConfig(vocab_size=300, dim=64, layers=2, heads=8, kv_heads=4, hidden_dim=160)
SMALL = LlamaConfig(vocab_size=1000, dim=512, layers=2, heads=8, kv_heads=2, hidden_dim=1408)

POLICIES = {
    "none": Checkpointing(),
    "none, tiled": Checkpointing(tiled=True),
    "layer": Checkpointing("layer"),
    "layer, offloaded": Checkpointing("layer", offload=True),
    "attention_output": Checkpointing("attention_output"),
    "attention_output, offloaded": Checkpointing("attention_output", offload=True),
}


def cut(setting: Setting, layers: int = 4) -> LlamaConfig:
    """LLaMA-3-8B with fewer layers; `TINY` in a rehearsal."""
    return setting.size(replace(LlamaConfig.llama3_8b(), layers=layers), TINY)


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and this rank's tokens of one row.

    Args:
        layout: the row's layout over ranks.
        positions: global positions of this rank's tokens.
    """

    model: Llama
    optimizer: AdamW
    layout: SequenceLayout
    tokens: Tensor
    labels: Tensor
    positions: Tensor

    @classmethod
    def on(
        cls,
        mesh: DeviceMesh,
        config: LlamaConfig,
        length: int,
        checkpointing: Checkpointing,
        precision: torch.dtype | None = torch.bfloat16,
        attention: Method | None = None,
        **options: Any,
    ) -> Training:
        """Draws weights and tokens from one seed; weights drawn on the device differ between device types.

        Args:
            attention: method over axes of the mesh; by default attention on one rank.
            options: of `parallelize`.
        """
        method = Local() if attention is None else attention
        with torch.device("meta"):
            model = Llama(config, method)
        parallelize(model, mesh, checkpointing=checkpointing, precision=precision, **options)
        model.to_empty(device=mesh.device_type)
        initialize(model, seed=0)
        row = torch.randint(config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
        layout = method.layout(length)
        shards = (layout.take(x, method.shard) for x in (row[:, :-1], row[:, 1:]))
        tensors = (x.to(mesh.device_type) for x in (*shards, layout.positions(method.shard)))
        return cls(model, AdamW(model.parameters(), lr=1e-4, fused=True), layout, *tensors)

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Copies the weights of another model, from any device."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                dtensor.local_of(parameter).copy_(weights[name])

    def weights(self) -> dict[str, Tensor]:
        return {name: dtensor.local_of(p).detach().clone() for name, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """All gradients of the last `backward`, on the host. Every rank must call it, since FSDP2 shards them."""
        result = {name: p.grad for name, p in self.model.named_parameters()}
        return {name: full(grad).cpu() for name, grad in result.items() if grad is not None}

    def loss(self) -> Tensor:
        """This rank's share of the loss: the sum over its tokens, divided by the tokens of all ranks."""

        def head(hidden: Tensor, weight: Tensor) -> Any:
            return linear_token_loss(hidden, weight, self.labels)

        total, _ = self.model(
            self.tokens, positions=self.positions, mask=AttentionMask(), layout=self.layout, head=head
        )
        return total / self.layout.length

    def backward(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.backward()
        clip_gradients(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def full(x: Tensor) -> Tensor:
    """All shards of a DTensor, as a local tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x
