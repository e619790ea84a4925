"""The command `armillary-check`: tiny random copies of Hugging Face architectures, on CPU ranks against one."""
