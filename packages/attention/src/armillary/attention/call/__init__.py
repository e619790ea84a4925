"""One attention call, from its arguments to the method's forward and backward. Each file imports only those below it.

    dtensors            DTensors: placements are checked, local tensors computed, DTensors returned
    attend              local tensors: checked, then run eagerly or traced into a graph
    project             hidden states, outside of graphs (`eager_only`: with a graph break)
    autograd            the op pair that autograd, selective checkpointing and torch.compile see
    graph_calls         rebuilds a call inside a compiled graph
    graph_key           a call as the numbers and text that an op may take
    validation          arguments -> `AttentionSpec`, before any communication
    calls               a checked call: plain forward and backward over tensors
    interface           the methods of a method: forward, backward, and optional ones
    registered          objects by number, because an op takes tensors, numbers and text only
    spec                options of the caller, spec for the method, tensors saved for backward
    sources             q, k and v a few heads at a time: finished tensors, or projections run stage by stage
    projections         the seam between a model and `Method.projected`

`methods/base.py` stands on top: `Method.__call__` hands its arguments to `attend` or `dtensors`.
"""
