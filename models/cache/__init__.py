"""Keys, values and states of earlier tokens: caches of prompts, views of them, and masks."""
