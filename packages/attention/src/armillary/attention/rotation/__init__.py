"""Tensors going round a ring of ranks: who holds what when, the exchanges, and how results return."""
