"""`armillary-plan search`: ranks meshes, methods and checkpoint policies by predicted time.

candidates.py     meshes and methods, and checkpoint policies with as many checkpoints as fit
documents.py      packed documents in the rows of a step
search.py         time and memory of all candidates
report.py         output, as tables, JSON or a plot
command_line.py   the trainer's configuration of a choice, as a file or as a `torchrun` command
"""
