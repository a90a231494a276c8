"""Garbage collection in the process of a command.

A full collection of Python reads the objects of all libraries. It takes 0.1 to 0.5 s, and would
start in the middle of an answer.
"""

import gc

_is_command = False


def begin_command() -> None:
    """State that this process runs one command, and no code of others."""
    global _is_command
    _is_command = True


def exempt_objects() -> None:
    """Exempt the objects that exist now from collection, in the process of a command."""
    if _is_command:
        gc.collect()
        gc.freeze()
