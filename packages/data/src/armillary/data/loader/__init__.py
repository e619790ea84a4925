"""Batches of rows packed from stores: which rows a step has, and what of them this rank reads."""
