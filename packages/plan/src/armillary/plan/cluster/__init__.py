"""Machines, the links between them, and transfer times of concurrent sends."""
