"""`armillary-generate`: text from a run's checkpoint or a Hugging Face folder. Several ranks shard the weights.

command.py     the command's options
source.py      the folder of weights and tokenizer
loading.py     the model on its mesh, with its weights
cli.py         the command
"""
