"""Tokens of other positions on any layout: new layouts, shifts, halos and short convolutions."""
