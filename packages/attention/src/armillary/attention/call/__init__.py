"""One attention call, from its arguments to forward and backward. Its main files import only files below them:

    dtensors            DTensors: placements are checked, local tensors computed, DTensors returned
    attend              local tensors: checked, then run in eager mode or traced into a graph
    project             hidden states in eager mode (`eager_only`: in a graph, with a graph break)
    autograd            the op pair that autograd, selective checkpointing and torch.compile see
    graph_calls         a call in a compiled graph: the objects that its op takes
    validation          arguments -> `AttentionSpec`, before any communication
    calls               a checked call: plain forward and backward over tensors
    interface           the functions that an attention method defines
    spec                the caller's options, the method's spec, the tensors saved for backward
    sources             q, k and v a few heads at a time: from finished tensors, or projected stage by stage
    projections         the interface between a model and `Method.projected`

`Method.__call__` in `methods/base.py` is above all of these, and passes its arguments to `attend` or `dtensors`.
"""
