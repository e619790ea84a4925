"""One attention call, from its arguments to forward and backward. Each file imports only files below it:

    dtensors            DTensors: placements are checked, local tensors computed, DTensors returned
    autograd            local tensors: checked and run under autograd, or traced into a graph
    calls               a checked call: plain forward and backward over tensors, and the call that a graph makes
    validation          arguments -> `AttentionSpec`, before any communication
    spec                options, spec and saved tensors of a call, and the functions that a method defines
    qkv_sources         q, k and v a few heads at a time: finished, or projected stage by stage by a model's projections
    recompute           chunks of tokens, autocast and random numbers of a recomputation, sums of gradients

`Method.__call__` in `methods/base.py` is above all of these, and passes its arguments to `autograd` or `dtensors`.
"""
