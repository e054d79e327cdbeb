"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """As the package's metadata has it; "0.0.0" when it runs without being installed."""
    try:
        return version("tercet")
    except PackageNotFoundError:
        return "0.0.0"
