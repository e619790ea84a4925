"""`armillary-generate`: text from a run's checkpoint or a Hugging Face folder, on one rank or sharded over several.

command.py     what is asked for
source.py      where weights and tokenizer come from
loading.py     the model on its mesh, with its weights
cli.py         all of it
"""
