"""The kernels of CUDA, emulated on the CPU: real signatures, shapes and mask rules, sums by the dense kernel."""

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

from armillary.attention.kernels import Dense, Scores, cudnn, flash, top_left
from armillary.attention.kernels.inputs import module_exists

calls: list[str] = []


def rewritten(behind: int, ahead: int, queries: int, keys: int, version: int = 2) -> tuple[int, int]:
    """(behind, ahead) after FlashAttention's host code (mha_fwd and set_params_fprop of its flash_api.cpp)."""
    if version == 3:
        behind, ahead = -1 if behind >= keys - 1 else behind, -1 if ahead >= queries - 1 else ahead
        return (keys - 1 if behind < 0 else behind), (queries - 1 if ahead < 0 else ahead)
    behind, ahead = -1 if behind >= keys else behind, -1 if ahead >= keys else ahead
    if behind < 0 and ahead >= 0:
        return keys, ahead
    return (behind, keys) if behind >= 0 and ahead < 0 else (behind, ahead)


def band(window, queries: int, keys: int, max_queries: int, max_keys: int, version: int = 2):
    """The kernel's band of one sequence: row a sees a + S - T - behind .. a + S - T + ahead."""
    behind, ahead = rewritten(*window, max_queries, max_keys, version)
    corner = keys - queries
    return None if behind < 0 else corner - behind, None if ahead < 0 else corner + ahead


def _sequences(q, k, ends_q, ends_k):
    """Yields (slice of q, slice of k) of each sequence, and its batched form."""
    if ends_q is None:
        return [(slice(None), slice(None))]
    assert ends_q.dtype == ends_k.dtype == torch.int32 and ends_q[-1] == len(q) and ends_k[-1] == len(k)
    pairs = [zip(ends.tolist(), ends.tolist()[1:], strict=False) for ends in (ends_q, ends_k)]
    return [(slice(*a), slice(*b)) for a, b in zip(*pairs, strict=True)]


def readable(*tensors):
    """Asserts that the head dim is contiguous, as all kernels do."""
    assert all(x.stride(-1) == 1 for x in tensors)


def attend(q, k, v, ends_q, ends_k, max_q, max_k, window, scale, softcap, version):
    readable(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    full = ends_q is None
    max_q, max_k = (q.shape[1], k.shape[1]) if full else (max_q, max_k)
    outs, lses = [], []
    for a, b in _sequences(q, k, ends_q, ends_k):
        one = [x[part] if full else x[part][None] for x, part in ((q, a), (k, b), (v, b))]
        visible_band = band(window, one[0].shape[1], one[1].shape[1], max_q, max_k, version)
        out, lse = Dense().forward(*one, visible_band, Scores(scale, softcap or None))
        outs.append(out if full else out[0])
        lses.append(lse.mT if full else lse[0].mT)
    return (outs[0], lses[0].contiguous()) if full else (torch.cat(outs), torch.cat(lses, 1))


def attend_backward(tensors, into, ends_q, ends_k, max_q, max_k, window, scale, softcap, version):
    dout, q, k, v, out, lse = tensors
    readable(dout, q, k, v, out, *into)
    assert len({x.shape[-1] for x in (dout, q, k, v, out)}) == 1
    full = ends_q is None
    max_q, max_k = (q.shape[1], k.shape[1]) if full else (max_q, max_k)
    assert lse.is_contiguous() and [x.shape for x in into] == [x.shape for x in (q, k, v)]
    for x in into:
        x.fill_(torch.nan)
    for a, b in _sequences(q, k, ends_q, ends_k):
        parts = ((dout, a), (q, a), (k, b), (v, b), (out, a), (lse.mT, a))
        one = [x[part] if full else x[part][None] for x, part in parts]
        visible_band = band(window, one[1].shape[1], one[2].shape[1], max_q, max_k, version)
        grads = Dense().backward(*one, visible_band, Scores(scale, softcap or None))
        for x, part, grad in zip(into, (a, b, b), grads, strict=True):
            x[part] = grad if full else grad[0]


# -- flash-attn 2.8: flash_attn/flash_attn_interface.py ---------------------------------------------------------------

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


# -- flash-attn 3: hopper/flash_attn_interface.py ---------------------------------------------------------------------

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


# The signatures until November 2025: a window is one argument, and many unused arguments have no default.

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


# -- torch: aten._flash_attention_forward and _backward ---------------------------------------------------------------

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


# -- flash-attn 4: flash_attn/cute/interface.py -----------------------------------------------------------------------

def fa4_forward(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
                causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
                tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None,
                _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None,
                lse=None):
    calls.append("forward" if cu_seqlens_q is None else "forward packed")
    assert return_lse and qv is softcap is seqused_q is seqused_k is page_table is None
    lengths, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    return *attend(q, k, v, *lengths, fa4_window(causal, *window), softmax_scale, None, 3), None, None


def fa4_backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                 window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
                 num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2,
                 AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None,
                 seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None,
                 dk=None, dv=None):
    calls.append("backward" if cu_seqlens_q is None else "backward packed")
    assert softcap == 0 and isinstance(deterministic, bool) and seqused_q is seqused_k is dq is dk is dv is None
    lengths, window = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (window_size_left, window_size_right)
    into, window = tuple(torch.empty_like(x) for x in (q, k, v)), fa4_window(causal, *window)
    attend_backward((dout, q, k, v, out, lse), into, *lengths, window, softmax_scale, None, 3)
    return into


def fa4_window(causal, behind, ahead):
    """flash-attn 4's `_resolve_causal_local_window`, in which -1 would be a bound."""
    assert (behind is None or behind >= 0) and (ahead is None or ahead >= 0) and not (causal and ahead)
    ahead = 0 if causal else ahead
    return -1 if behind is None else behind, -1 if ahead is None else ahead


# -- cuDNN: aten._scaled_dot_product_cudnn_attention and aten._cudnn_attention_forward, and their backward ------------

def cudnn_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
                  return_debug_mask=False, *, scale=None):
    calls.append("forward")
    assert attn_bias is None and compute_log_sumexp and not (dropout_p or return_debug_mask)
    assert 1 not in (query.shape[2], key.shape[2]), "cuDNN supports neither one query nor one key"
    readable(query, key, value)
    out, lse = Dense().forward(*(x.transpose(1, 2) for x in (query, key, value)), causal_band(is_causal), Scores(scale))
    state = torch.empty((), dtype=torch.long)
    lse = lse.transpose(1, 2).contiguous().unsqueeze(-1)
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], state, state, None


def cudnn_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
                   cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None):
    calls.append("backward")
    assert attn_bias is cum_seq_q is cum_seq_k is None and not dropout_p and philox_seed.device == query.device
    assert (max_q, max_k) == (query.shape[2], key.shape[2]) and 1 not in (max_q, max_k)
    readable(grad_out, query, key, value, out)
    assert logsumexp.shape == (*query.shape[:3], 1) and logsumexp.is_contiguous() and philox_offset.dtype == torch.long
    assert grad_out.transpose(1, 2).is_contiguous() and out.transpose(1, 2).is_contiguous()
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out, logsumexp.squeeze(-1)))
    grads = Dense().backward(*tensors, causal_band(is_causal), Scores(scale))
    return tuple(x.transpose(1, 2).to(query.dtype) for x in grads)


def cudnn_packed_forward(query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
                         dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, seqused_k=None,
                         block_table=None):
    calls.append("forward packed")
    assert attn_bias is seqused_k is block_table is None and compute_log_sumexp
    assert not (dropout_p or return_debug_mask) and 1 not in (max_q, max_k)
    readable(query, key, value)
    outs, lses = [], []
    for a, b in _sequences(query, key, cum_seq_q, cum_seq_k):
        out, lse = Dense().forward(query[a][None], key[b][None], value[b][None], causal_band(is_causal), Scores(scale))
        outs.append(out[0])
        lses.append(lse[0].mT)
    state = torch.empty((), dtype=torch.long)
    return torch.cat(outs), torch.cat(lses, 1), cum_seq_q, cum_seq_k, max_q, max_k, state, state, None


def cudnn_packed_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
                          cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None):
    calls.append("backward packed")
    assert attn_bias is None and not dropout_p and logsumexp.is_contiguous()
    assert logsumexp.shape == (query.shape[1], len(query)) and philox_seed.dtype == philox_offset.dtype == torch.long
    into = tuple(torch.full_like(x, torch.nan) for x in (query, key, value))
    for a, b in _sequences(query, key, cum_seq_q, cum_seq_k):
        parts = ((grad_out, a), (query, a), (key, b), (value, b), (out, a), (logsumexp.mT, a))
        grads = Dense().backward(*(x[part][None] for x, part in parts), causal_band(is_causal), Scores(scale))
        for x, part, grad in zip(into, (a, b, b), grads, strict=True):
            x[part] = grad[0]
    return into


# -- xFormers' kernels: aten._efficient_attention_forward and _backward -----------------------------------------------

def efficient_forward(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                      custom_mask_type, compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None):
    calls.append("forward")
    assert bias is cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is seqlen_k is window_size is None
    assert compute_log_sumexp and not dropout_p and custom_mask_type in (0, 1)
    assert query.shape[2] == key.shape[2] == value.shape[2], "heads are not shared"
    readable(query, key, value)
    out, lse = Dense().forward(query, key, value, causal_band(custom_mask_type == 1), Scores(scale))
    rows = -(-query.shape[1] // 32) * 32
    padded = torch.full((len(query), query.shape[2], rows), torch.inf, dtype=lse.dtype)
    padded[..., : query.shape[1]] = lse.transpose(1, 2)
    state = torch.empty((), dtype=torch.long)
    return out, padded, state, state, query.shape[1], key.shape[1]


def efficient_backward(grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                       logsumexp, dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *,
                       scale=None, num_splits_key=None, window_size=None, shared_storage_dqdkdv=False):
    calls.append("backward")
    assert bias is cu_seqlens_q is cu_seqlens_k is num_splits_key is window_size is None
    assert not (dropout_p or bias_requires_grad or shared_storage_dqdkdv) and custom_mask_type in (0, 1)
    assert (max_seqlen_q, max_seqlen_k) == (query.shape[1], key.shape[1])
    assert query.shape[2] == key.shape[2] == value.shape[2] == grad_out_.shape[2]
    readable(grad_out_, query, key, value, out)
    rows = -(-query.shape[1] // 32) * 32
    assert logsumexp.shape == (len(query), query.shape[2], rows) and logsumexp.is_contiguous()
    assert logsumexp[..., query.shape[1] :].isposinf().all() and out.is_contiguous()
    lse = logsumexp[..., : query.shape[1]].transpose(1, 2)
    band, tensors = causal_band(custom_mask_type == 1), (grad_out_, query, key, value, out, lse)
    return *(x.to(query.dtype) for x in Dense().backward(*tensors, band, Scores(scale))), None


def causal_band(causal):
    return None, 0 if causal else None
# fmt: on


FA2 = SimpleNamespace(
    _flash_attn_forward=fa2_forward,
    _flash_attn_backward=fa2_backward,
    _flash_attn_varlen_forward=fa2_varlen_forward,
    _flash_attn_varlen_backward=fa2_varlen_backward,
)
FA3 = SimpleNamespace(_flash_attn_forward=fa3_forward, _flash_attn_backward=fa3_backward)
FA4 = SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)


@dataclass(frozen=True)
class Op:
    """A function wrapped like `torch.library.custom_op`'s result, as in new FA3: without its own signature."""

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
        "flash_attn/cute/__init__.py": "from .interface import _flash_attn_fwd",
        "flash_attn/cute/interface.py": """
            from flash_stub import fa4_backward as _flash_attn_bwd, fa4_forward as _flash_attn_fwd""",
    },
}
"""The relevant files of each release's wheel. That of 4 has no flash_attn/__init__.py."""


def unpack(folder: Path, wheel: str) -> None:
    """Installs a release in a folder."""
    for name, text in WHEELS[wheel].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text))


MODULES = {
    "flash_attn": FA2,
    "flash_attn.flash_attn_interface": FA2,
    "flash_attn_interface": FA3,
    "flash_attn.cute": FA4,
    "flash_attn.cute.interface": FA4,
}
VERSION = {id(FA2): 2, id(FA3): 3, id(FA4): 4}


def none_loaded(patch: pytest.MonkeyPatch) -> None:
    """Removes flash-attn from the imported modules, and restores them after the test."""
    for name in MODULES:
        patch.setitem(sys.modules, name, None)
        patch.delitem(sys.modules, name)
    module_exists.cache_clear()


OPS = {
    flash: {"_torch_forward": aten_forward, "_torch_backward": aten_backward},
    top_left: {"_efficient_forward": efficient_forward, "_efficient_backward": efficient_backward},
    cudnn: {
        "_forward": cudnn_forward,
        "_backward": cudnn_backward,
        "_packed_forward": cudnn_packed_forward,
        "_packed_backward": cudnn_packed_backward,
        "_can_pack": lambda: True,
    },
}
"""Emulations of torch's ops, by the module that calls them."""


def install(patch: pytest.MonkeyPatch, *versions: int) -> None:
    """Makes exactly these versions of flash-attn importable, and emulates torch's ops."""
    for name, functions in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name in ("flash_attn", "flash_attn.cute"))
        module.__dict__.update(vars(functions))
        patch.setitem(sys.modules, name, module if VERSION[id(functions)] in versions else None)
    for kernel, functions in OPS.items():
        for name, function in functions.items():
            patch.setattr(kernel, name, function)
    module_exists.cache_clear()
    calls.clear()
