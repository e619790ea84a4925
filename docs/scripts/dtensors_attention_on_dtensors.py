import torch
from torch.distributed.tensor import Shard, distribute_tensor

from armillary.attention import AttentionMask, Ring, reference_attention
from armillary.core import build_mesh, distribute_sequence, gather_sequence

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = build_mesh(device, ring=4)
attend, mask = Ring(mesh["ring"]), AttentionMask(causal=True)
torch.manual_seed(0)  # whole tensors, the same on every rank
q, k, v = (torch.randn(2, 1000, 4, 16, device=device) for _ in range(3))  # [B, N, H, D]
expected = reference_attention(q, k, v, mask=mask)

parts = [distribute_tensor(x, mesh["ring"], [Shard(1)]) for x in (q, k, v)]
out = attend(*parts, mask=mask)
torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-4)
layout = attend.layout(1000)  # zigzag
parts = [distribute_sequence(x, layout, mesh["ring"]) for x in (q, k, v)]
out = attend(*parts, mask=mask, layout=layout)
torch.testing.assert_close(gather_sequence(out, layout), expected, rtol=1e-4, atol=1e-4)
torch.distributed.destroy_process_group()
