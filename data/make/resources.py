r"""Reader of the text resources beside the generators (`*.yaml`).

fruit: [apple, pear]        a sequence is a tuple
questions: |                a block that ends with a line break is a tuple of its lines,
  What is {topic}?          one sentence each; "\n" in it is a line break
text: >-                    any other text is a string
"""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def load(path: Path) -> dict[str, Any]:
    """Return the content of a resource file; `${` is text, not an interpolation."""
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return {str(key): _frozen(value) for key, value in content.items()}  # type: ignore[union-attr]


def _frozen(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _frozen(value) for key, value in node.items()}
    if isinstance(node, list):
        return tuple(map(_frozen, node))
    if isinstance(node, str) and node.endswith("\n"):
        return tuple(line.replace("\\n", "\n") for line in node.splitlines())
    return node
