"""Balanced layouts: equal attention work on every shard, few spans, and short ways around a ring."""
