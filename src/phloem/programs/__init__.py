"""Programs over a model in plain Python: gen, select, fork, join and chat turns, on an engine or on a server.

Owns the names that a program's author imports. See docs/programs.md.
"""

from phloem.programs.async_program import AsyncProgram, AsyncState
from phloem.programs.program import Branches, Program, State

__all__ = ["AsyncProgram", "AsyncState", "Branches", "Program", "State"]
