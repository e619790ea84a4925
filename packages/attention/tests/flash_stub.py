"""The flash kernels of CUDA, emulated on the CPU: real signatures, real window rules, sums by the dense kernel."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from armillary.attention.kernels import Dense, Scores, cuda_flash
from armillary.attention.kernels.flash import found

calls: list[str] = []


def rewritten(left: int, right: int, queries: int, keys: int, version: int = 2) -> tuple[int, int]:
    """(left, right) as FlashAttention's host code hands them on (mha_fwd and set_params_fprop of its flash_api.cpp)."""
    if version == 3:
        left, right = -1 if left >= keys - 1 else left, -1 if right >= queries - 1 else right
        return (keys - 1 if left < 0 else left), (queries - 1 if right < 0 else right)
    left, right = -1 if left >= keys else left, -1 if right >= keys else right
    if left < 0 and right >= 0:
        return keys, right
    return (left, keys) if left >= 0 and right < 0 else (left, right)


def band(window, queries: int, keys: int, most_queries: int, most_keys: int, version: int = 2):
    """The band that the kernel sees of one sequence: row a sees a + S - T - left .. a + S - T + right."""
    left, right = rewritten(*window, most_queries, most_keys, version)
    corner = keys - queries
    return None if left < 0 else corner - left, None if right < 0 else corner + right


def _sequences(q, k, ends_q, ends_k):
    """(part of q, part of k) of each sequence, and its batched form."""
    if ends_q is None:
        return [(slice(None), slice(None))]
    assert ends_q.dtype == ends_k.dtype == torch.int32 and ends_q[-1] == len(q) and ends_k[-1] == len(k)
    pairs = [zip(ends.tolist(), ends.tolist()[1:], strict=False) for ends in (ends_q, ends_k)]
    return [(slice(*a), slice(*b)) for a, b in zip(*pairs, strict=True)]


def readable(*tensors):
    """What all of the kernels check: the head dim is contiguous."""
    assert all(x.stride(-1) == 1 for x in tensors)


def attend(q, k, v, ends_q, ends_k, most_q, most_k, window, scale, softcap, version):
    readable(q, k, v)
    whole = ends_q is None
    most_q, most_k = (q.shape[1], k.shape[1]) if whole else (most_q, most_k)
    outs, lses = [], []
    for a, b in _sequences(q, k, ends_q, ends_k):
        one = [x[part] if whole else x[part][None] for x, part in ((q, a), (k, b), (v, b))]
        seen = band(window, one[0].shape[1], one[1].shape[1], most_q, most_k, version)
        out, lse = Dense().forward(*one, seen, Scores(scale, softcap or None))
        outs.append(out if whole else out[0])
        lses.append(lse.mT if whole else lse[0].mT)
    return (outs[0], lses[0].contiguous()) if whole else (torch.cat(outs), torch.cat(lses, 1))


def attend_backward(tensors, into, ends_q, ends_k, most_q, most_k, window, scale, softcap, version):
    dout, q, k, v, out, lse = tensors
    readable(dout, q, k, v, out, *into)
    whole = ends_q is None
    most_q, most_k = (q.shape[1], k.shape[1]) if whole else (most_q, most_k)
    assert lse.is_contiguous() and [x.shape for x in into] == [x.shape for x in (q, k, v)]
    for x in into:
        x.fill_(torch.nan)
    for a, b in _sequences(q, k, ends_q, ends_k):
        parts = ((dout, a), (q, a), (k, b), (v, b), (out, a), (lse.mT, a))
        one = [x[part] if whole else x[part][None] for x, part in parts]
        seen = band(window, one[1].shape[1], one[2].shape[1], most_q, most_k, version)
        grads = Dense().backward(*one, seen, Scores(scale, softcap or None))
        for x, part, grad in zip(into, (a, b, b), grads, strict=True):
            x[part] = grad if whole else grad[0]


# -- flash-attn 2.8: flash_attn/flash_attn_interface.py ----------------------------------------------------------------

# fmt: off

def fa2_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                return_softmax):
    calls.append("forward")
    assert not (dropout_p or causal or return_softmax) and alibi_slopes is None
    window = window_size_left, window_size_right
    return *attend(q, k, v, None, None, None, None, window, softmax_scale, softcap, 2), None, None


def fa2_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                       causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                       return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
                       num_splits=0):
    calls.append("forward packed")
    assert not (dropout_p or causal or return_softmax) and alibi_slopes is None
    lengths, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    return *attend(q, k, v, *lengths, window, softmax_scale, softcap, 2), None, None


def fa2_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                 window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
    calls.append("backward")
    assert not (dropout_p or causal) and alibi_slopes is None and isinstance(deterministic, bool)
    tensors, none = (dout, q, k, v, out, softmax_lse), (None, None, None, None)
    window = window_size_left, window_size_right
    attend_backward(tensors, (dq, dk, dv), *none, window, softmax_scale, softcap, 2)


def fa2_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                        alibi_slopes, deterministic, rng_state=None, zero_tensors=False):
    calls.append("backward packed")
    assert not (dropout_p or causal) and alibi_slopes is None and isinstance(deterministic, bool)
    lengths, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    attend_backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), *lengths, window, softmax_scale, softcap, 2)


# -- flash-attn 3: hopper/flash_attn_interface.py ----------------------------------------------------------------------

def fa3_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):
    calls.append("forward" if cu_seqlens_q is None else "forward packed")
    assert not causal and k_new is v_new is qv is out_ is seqused_q is seqused_k is None
    lengths, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    return *attend(q, k, v, *lengths, window, softmax_scale, softcap, 3), None, None


def fa3_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                 max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                 window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):
    calls.append("backward" if cu_seqlens_q is None else "backward packed")
    assert is_causal is False and isinstance(deterministic, bool) and sequed_q is sequed_k is None
    lengths, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    attend_backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), *lengths, window, softmax_scale, softcap, 3)


# The same until November 2025: a window is one argument, and much of what is not used has no default.

def old_fa3_forward(q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
                    max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
                    seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
                    attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
                    pack_gqa=None, sm_margin=0):
    assert causal is False and page_table is kv_batch_idx is leftpad_k is rotary_cos is rotary_sin is None
    assert cu_seqlens_k_new is seqlens_rotary is q_descale is k_descale is v_descale is None
    return fa3_forward(q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q,
                       seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                       softmax_scale=softmax_scale, window_size_left=window_size[0], window_size_right=window_size[1],
                       softcap=softcap)


def old_fa3_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
                     max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
                     deterministic=False, sm_margin=0):
    fa3_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
                 max_seqlen_k, dq, dk, dv, softmax_scale, causal, *window_size, softcap, deterministic)


# -- torch: aten._flash_attention_forward and _backward ----------------------------------------------------------------

def aten_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                 scale=None, window_size_left=None, window_size_right=None):
    calls.append("forward" if cum_seq_q is None else "forward packed")
    assert not (dropout_p or is_causal or return_debug_mask)
    lengths, window = (cum_seq_q, cum_seq_k, max_q, max_k), (window_size_left, window_size_right)
    return *attend(query, key, value, *lengths, window, scale, None, 2), None, None, None


def aten_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                  rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    calls.append("backward" if cum_seq_q is None else "backward packed")
    assert not (dropout_p or is_causal)
    into = tuple(torch.empty_like(x) for x in (query, key, value))
    lengths, window = (cum_seq_q, cum_seq_k, max_q, max_k), (window_size_left, window_size_right)
    attend_backward((grad_out, query, key, value, out, logsumexp), into, *lengths, window, scale, None, 2)
    return into
# fmt: on


FA2 = SimpleNamespace(
    _flash_attn_forward=fa2_forward,
    _flash_attn_backward=fa2_backward,
    _flash_attn_varlen_forward=fa2_varlen_forward,
    _flash_attn_varlen_backward=fa2_varlen_backward,
)
FA3 = SimpleNamespace(_flash_attn_forward=fa3_forward, _flash_attn_backward=fa3_backward)


@dataclass(frozen=True)
class Op:
    """A function as `torch.library.custom_op` makes it, which FA3 does now: of its own signature it says nothing."""

    _init_fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)


WHEELS = {
    "2": {
        "flash_attn/__init__.py": """
            from pkgutil import extend_path
            __path__ = extend_path(__path__, __name__)
            from flash_attn.flash_attn_interface import _flash_attn_forward""",
        "flash_attn/flash_attn_interface.py": """
            from flash_stub import fa2_forward as _flash_attn_forward, fa2_backward as _flash_attn_backward
            from flash_stub import fa2_varlen_forward as _flash_attn_varlen_forward
            from flash_stub import fa2_varlen_backward as _flash_attn_varlen_backward""",
    },
    "3": {
        "flash_attn_3/__init__.py": "",
        "flash_attn_interface.py": """
            from flash_stub import Op, fa3_backward, fa3_forward
            _flash_attn_forward, _flash_attn_backward = Op(fa3_forward), Op(fa3_backward)""",
    },
    "3 of 2025": {
        "flash_attn_3/__init__.py": "",
        "flash_attn_interface.py": """
            from flash_stub import old_fa3_forward as _flash_attn_forward, old_fa3_backward as _flash_attn_backward""",
    },
    "4": {
        "flash_attn/cute/__init__.py": "from .interface import flash_attn_func",
        "flash_attn/cute/interface.py": "raise AssertionError('imported')",
    },
}
"""The files that matter of each release's wheel. That of 4 has no flash_attn/__init__.py."""


def unpack(folder: Path, wheel: str) -> None:
    """Installs a release in a folder."""
    for name, text in WHEELS[wheel].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text))


def none_loaded(patch: pytest.MonkeyPatch) -> None:
    """Nothing of flash-attn has been imported; what is imported from now on is forgotten again."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.cute", "flash_attn_interface"):
        patch.setitem(sys.modules, name, None)
        patch.delitem(sys.modules, name)
    found.cache_clear()


def install(patch: pytest.MonkeyPatch, *versions: int) -> None:
    """These versions of flash-attn, and no others, are importable; torch's own ops are emulated too."""
    for version, name in ((2, "flash_attn"), (2, "flash_attn.flash_attn_interface"), (3, "flash_attn_interface")):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(vars(FA2 if version == 2 else FA3))
        patch.setitem(sys.modules, name, module if version in versions else None)
    patch.setattr(cuda_flash, "_forward", aten_forward)
    patch.setattr(cuda_flash, "_backward", aten_backward)
    found.cache_clear()
    calls.clear()
