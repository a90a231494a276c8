"""Short school mathematics beside the word problems, and the choice between the two."""

from outrider.data.prompts.stories import STORIES, Story, story
from outrider.data.prompts.writer import Writer

# fmt: off
SCHOOL: tuple[Story, ...] = (
    story("[Solve for x|Find x]: {a}x + {b} = {c}.", a=(2, 9), b=(3, 30), c=(31, 95)),
    story("Solve the system x + y = {a} and x - y = {b}.", a=(10, 60, 2), b=(2, 8, 2)),
    story("What are the solutions of x^2 - {a}x + {b} = 0?", a=(5, 13), b=(4, 6)),
    story("What is the area of a circle with a diameter of {a} cm (two digits)?", a=(4, 40, 2)),
    story("If f(x) = {a}x^2 - {b}x + {c}, what is f({d})?", a=(2, 7), b=(2, 9), c=(1, 9), d=(2, 6)),
    story(
        """A fair die is rolled {n} times. What is the probability that [no six appears|at least one
        six appears|every roll is even]?""",
        n=(2, 5),
    ),
    story(
        """The vertices of a rectangle are (0, 0), ({a}, 0), ({a}, {b}) and (0, {b}). How long is
        its diagonal?""",
        a=(3, 12), b=(4, 16),
    ),
    story(
        "Compute {p} percent of {a}, and then add {q} percent of {b}.",
        p=(5, 60, 5), a=(80, 900, 20), q=(10, 40, 10), b=(50, 400, 50),
    ),
    story(
        """The first terms of a sequence are {a}, {a} + {d}, {a} + 2*{d}, ... What is the sum of its
        first {n} terms?""",
        a=(2, 15), d=(3, 9), n=(10, 40, 5),
    ),
    story(
        "Find the greatest common divisor and the least common multiple of {a} and {b}.",
        a=(12, 60, 6), b=(20, 90, 5),
    ),
    story(
        """A bag holds {a} {color} and {b} {color2} marbles. Two are drawn without replacement. How
        likely is it that both are {color}?""",
        a=(3, 9), b=(3, 9),
    ),
    story(
        "A right triangle has legs of {a} cm and {b} cm. Find the hypotenuse and the area.",
        a=(3, 15), b=(4, 20),
    ),
    story(
        "In how many ways can {n} people stand in a line if {woman} and {man} must be neighbors?",
        n=(4, 8),
    ),
    story(
        "What is the remainder when {a} is divided by {b}? Explain how you found it.",
        a=(200, 2000, 7), b=(11, 29),
    ),
    story(
        "Differentiate f(x) = {a}x^{n} + {b}x - {c} and find the slope at x = {d}.",
        a=(2, 9), n=(2, 4), b=(2, 12), c=(1, 30), d=(1, 3),
    ),
    story(
        "Write {a}/{b} as a decimal number and as a percentage, rounded to one digit.",
        a=(2, 11), b=(12, 40),
    ),
)
# fmt: on

FOLLOW_UPS = (
    "Check your answer in a different way.",
    "Explain the solution again so that a ten-year-old understands it.",
    "What would the answer be if every number in the problem were doubled?",
    "Write the whole calculation as a single expression.",
    "Which step is the easiest to get wrong, and why?",
    "Make up a similar problem with different numbers and solve it.",
)


def math(writer: Writer) -> list[str]:
    """A word problem (four times in five) or a school exercise; one in twelve has a second turn."""
    text, ranges = writer.one(STORIES if writer.chance(0.8) else SCHOOL)
    problem = writer.fill(text, **writer.numbers(dict(ranges)))
    return [problem, writer.one(FOLLOW_UPS)] if writer.chance(1 / 12) else [problem]
