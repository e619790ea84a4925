"""What a store holds and what packings cost: figures, a table, a picture."""
