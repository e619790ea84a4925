from armillary.check.plugin import context_parallel_check

__all__ = ["context_parallel_check"]
