"""spmd compiles a plain single-device PyTorch train step into the program that every rank of a device mesh runs."""

from importlib.metadata import version

from spmd import debug, errors
from spmd.api import CompiledStep, compile
from spmd.runtime.gathered import gathered

__version__ = version("spmd")
__all__ = ["CompiledStep", "compile", "debug", "errors", "gathered"]
