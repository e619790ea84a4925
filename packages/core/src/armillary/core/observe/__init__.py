"""Observation of ranks: the byte ledger, traces, labels of computations."""
