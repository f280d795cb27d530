"""The command line by its ``main``, as in the tests of the command line."""

from tests.cli.conftest import script

__all__ = ["script"]
