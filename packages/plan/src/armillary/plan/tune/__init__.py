"""Measuring which mesh and which attention method train a model fastest on the machines at hand (`armillary-tune`).

command.py     the command line
question.py    all settings that measurements depend on
file.py        the file of measurements
prune.py       candidates, without those predicted to be slow or not to fit
bench.py       a block of the model on a candidate's mesh, and its seconds
tuner.py       measures candidate after candidate, and the fastest again in turns
groups.py      a process group for each candidate
screen.py      progress on the terminal
"""
