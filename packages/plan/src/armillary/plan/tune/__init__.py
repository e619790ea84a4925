"""`armillary-tune`: measures which mesh and attention method train a model fastest on the machine that it runs on.

cli.py            entry point
command.py        options of the command line
measurements.py   the JSON file of measurements, and the settings for which they are valid
prune.py          the candidates, without those that are predicted to be slow or not to fit
bench.py          times one block of the model on a candidate's mesh
tuner.py          measures all candidates, then the fastest ones again, alternately
groups.py         a new process group for each candidate
screen.py         progress on the terminal
"""
