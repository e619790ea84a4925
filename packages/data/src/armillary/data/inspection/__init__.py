"""Statistics of stores and packings, as figures, tables and a plot."""
