"""Console programs: numbers with units, plain-text tables, and errors that end with one line and an exit code."""
