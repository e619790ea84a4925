"""Communication of tokens between positions, on any layout: new layouts, shifts, halos and short convolutions."""
