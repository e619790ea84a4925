"""Balanced layouts: equal attention work on every shard, few spans, and short ways around a ring.

`cost` measures layouts: work, evenness, and token-hops. `chunks` makes the most even layout, whatever it sends.
`search` cuts long documents over few neighbouring ranks, and chooses among all of these layouts.
"""
