"""Communication plans and memory formulas of attention methods: pure values, for planners and tests. No tensors.

comm_plan       the sends and the computation of a call, step by step, and their building blocks
method_plan     base classes of a method's plan, and the terms that formulas of peak memory share
rings           plans of the methods on one sequence axis
nodes           plans of rings between nodes
heads           plans of the methods on the head axis

`armillary.attention.plans` exports them together with the registry, which needs them.
"""
