"""Generators of committed files; not part of the wheel."""
