"""Moves of tokens to other positions and ranks, on any layout: new layouts, shifts, halos and short convolutions."""
