"""The console of every verb: what it prints is text, never markup or an escape sequence.

Differs from rich's console: square brackets and colons of file names, settings and prompts are not
markup or emoji, credentials are masked, and control characters are escaped (`shown_text`). Styles
are given as `Text` or `style=`.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from outrider.conf.shown_text import for_terminal


class Console(RichConsole):
    """A rich console without markup, whose text is escaped; arguments are those of rich."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **arguments})

    def render_str(self, text: str, **arguments: Any) -> Text:
        """Escape before a table or a line is laid out."""
        return super().render_str(for_terminal(text), **arguments)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape text that reaches the terminal by any other way, such as `Text`."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else for_terminal(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)
