"""Communication plans and memory formulas of attention methods: pure values, for planners and tests. No tensors."""
