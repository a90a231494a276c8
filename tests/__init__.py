"""Outrider's tests."""

from tests.shapes import first_checks as first_checks  # by this name the import hook finds it
