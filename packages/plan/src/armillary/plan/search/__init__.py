"""Search over meshes, methods and checkpoints by predicted time, and the command that starts the best."""
