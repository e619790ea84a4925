from recovery import undisturbed

__all__ = ["undisturbed"]
