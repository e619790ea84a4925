"""Parts of commands: numbers with units, tables, pictures, and errors that end with one line and an exit code."""
