"""Planning a run before there is a machine for it."""
