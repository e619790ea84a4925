"""Machines, the links between them, and how long sends take that are under way together."""
