"""`armillary-plan search`: ranks meshes, methods and checkpoint policies by predicted time.

candidates.py     meshes and methods
documents.py      packed documents in the rows of a step
fit_policy.py     checkpoint policies, with as many checkpoints as fit
search.py         time and memory of all candidates
report.py         output, as tables, JSON or a plot
command_line.py   the trainer's configuration of a choice, and its `torchrun` command
"""
