"""Releases of other libraries with which this package is tested: those that its extras require."""

from __future__ import annotations

from importlib.metadata import requires, version

PACKAGE = "armillary-integrations"


def check_version(library: str) -> None:
    """Raises an error unless the installed release of a library is one that an extra of this package requires.

    Called where a library enters this package, before ranks communicate: an untested release may fail on one rank,
    for which the others would wait.

    Raises:
        ImportError: the library is not installed.
        ValueError: another release is installed.
    """
    from packaging.requirements import Requirement  # transformers, accelerate, TRL and diffusers require it

    installed = version(library)
    extras = [requirement for line in requires(PACKAGE) or () if (requirement := Requirement(line)).name == library]
    for requirement in extras:
        if not requirement.specifier.contains(installed, prereleases=True):
            raise ValueError(
                f"{library} {installed} is installed, but {PACKAGE} is tested with {library} {requirement.specifier} "
                f"alone: pip install '{library}{requirement.specifier}'"
            )
