"""DeepSpeed's Ulysses around torch's attention, which sees full sequences, so the caller may apply any mask."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contender import BASE, Contender, sees
from setting import Setting
from torch import Tensor


@cache
def started() -> Any:
    """The group of all ranks, registered with DeepSpeed like in `deepspeed.initialize(mesh_param=...)`."""
    import deepspeed
    from deepspeed.utils import groups

    # On CPUs DeepSpeed would compile a shared-memory all-reduce, which Ulysses does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    axes = ("data_parallel", "sequence_parallel")
    groups.mesh_device = deepspeed.comm.initialize_mesh_device((1, dist.get_world_size()), axes)
    return groups.mesh_device.get_group(mesh_dim="sequence_parallel")


class Ulysses(Contender):
    name = "DeepSpeed, DistributedAttention"
    requirements = (*BASE, "deepspeed==0.19.8", "setuptools==80.9.0")
    modules = ("deepspeed.sequence.layer",)
    dtypes = ("float64", "float32", "bfloat16")
    note = "`DistributedAttention` around `F.scaled_dot_product_attention` with a dense mask, batch first"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from deepspeed.sequence.layer import DistributedAttention

        module = DistributedAttention(FullSequenceAttention(self.setting), started(), scatter_idx=2, gather_idx=1)
        return module(q, k, v, 0)


class FullSequenceAttention(torch.nn.Module):
    """Attention over full sequences for some heads."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = sees(self.setting, q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


class UlyssesHF(Ulysses):
    name = "DeepSpeed, UlyssesSPAttentionHF"
    requirements = (*BASE, "deepspeed==0.19.8", "setuptools==80.9.0", "transformers==5.23.0")
    modules = ("deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers.integrations.sdpa_attention")
    masks = ("full", "causal")
    note = "`UlyssesSPAttentionHF` around transformers' own sdpa, as accelerate and transformers use it"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        sizes = {"batch_size": q.shape[0], "attn_head_count": q.shape[2], "attn_head_size": q.shape[3]}
        lengths = {"local_seq_length": q.shape[1], "global_seq_length": self.setting.length}
        module = UlyssesSPAttentionHF(
            sdpa_attention_forward,
            kv_head_count=k.shape[2],
            num_hidden_layers=1,
            process_group=started(),
            **sizes,
            **lengths,
        )
        layer = torch.nn.Module()
        layer.is_causal, layer.num_key_value_groups = self.setting.causal, q.shape[2] // k.shape[2]
        positions = torch.arange(q.shape[1])[None].expand(q.shape[0], -1) + q.shape[1] * dist.get_rank()
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = module(layer, *heads, None, position_ids=positions.contiguous())
        return out.unflatten(2, q.shape[2:])
