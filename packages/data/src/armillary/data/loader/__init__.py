"""Batches of rows packed from stores; each rank reads its own shard."""
