"""Batches of rows packed from stores, of which each rank reads its own shard."""
