"""Building blocks of commands: numbers with units, tables, pictures, and errors as one line with an exit code."""
