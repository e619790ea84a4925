"""The trainer's step of a LLaMA on one rank: FSDP2, the fused loss, clipping and AdamW."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from armillary.attention import AttentionMask, Local
from armillary.core import clip_gradients
from armillary.core.placements import local_of
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


def cut(setting: Setting, layers: int) -> LlamaConfig:
    """LLaMA-3-8B with fewer layers."""
    return setting.size(replace(LlamaConfig.llama3_8b(), layers=layers), TINY)


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and one row of tokens."""

    model: Llama
    optimizer: AdamW
    tokens: Tensor
    labels: Tensor

    @classmethod
    def on(
        cls,
        mesh: DeviceMesh,
        config: LlamaConfig,
        length: int,
        checkpointing: Checkpointing,
        precision: torch.dtype = torch.bfloat16,
        compiler: str | None = None,
    ) -> Training:
        """Draws weights and tokens from one seed; weights drawn on the device differ between device types."""
        with torch.device("meta"):
            model = Llama(config, Local())
        parallelize(model, mesh, checkpointing=checkpointing, precision=precision, compiler=compiler)
        model.to_empty(device=mesh.device_type)
        initialize(model, seed=0)
        row = torch.randint(config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        return cls(model, optimizer, *(x.to(mesh.device_type) for x in (row[:, :-1], row[:, 1:].contiguous())))

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Copies the weights of another model, from any device."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                local_of(parameter).copy_(weights[name])

    def weights(self) -> dict[str, Tensor]:
        return {name: local_of(p).detach().clone() for name, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last `backward`, on the host."""
        result = {name: p.grad for name, p in self.model.named_parameters()}
        return {name: local_of(grad).cpu() for name, grad in result.items() if grad is not None}

    def loss(self) -> Tensor:
        def head(hidden: Tensor, weight: Tensor) -> Any:
            return linear_token_loss(hidden, weight, self.labels)

        total, count = self.model(self.tokens, mask=AttentionMask(), head=head)
        return total / count

    def backward(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.backward()
        clip_gradients(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
