"""The prompts for self-generation, the grammars that write them, and the held-out suite."""
