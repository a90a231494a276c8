"""The ledger of `decode=auto`: what speculation has cost so far beyond plain decoding.

With T_real the seconds spent, pauses of the machine left out, and T_plain those of plain decoding
for the same tokens, a round that drafts is allowed only if, even with nothing accepted,

    L + (T_round - C_plain) <= 0.95 (eps * T_plain + c0)      where L = T_real - T_plain

A plain round leaves L and raises T_plain; a round that drafts raises L by at most the bracket and
never lowers T_plain. So at every time

    T_real <= (1 + eps) * T_plain + c0

for every text and any acceptance, up to the errors of C_plain and of the planned T_round, for which
5 % are left. L is never less than -c0. So later drafts spend at most c0 of the savings, of those by
an outdated C_plain as well; this only tightens the bound. In a batch the bound is that of the
throughput of the batch, at its own composition: tokens are worth what plain decoding of the
requests that are left would take. Requests whose drafts are accepted end earlier, and the others go
on in a smaller batch than plain decoding has at that time.

Seconds that a plain decoder does not spend, such as reading missed rows or deciding what to draft,
are part of T_real. Reading the prompt is part of both. Deciding takes time in plain rounds too: if
it takes more than eps of a step, L grows without a draft.
"""

from dataclasses import asdict, dataclass

SLACK = 10.0  # c0, in plain steps: the first drafts, before anything is known of a text
PLANNED = 0.95  # share of the bound that rounds are planned with; errors of C_plain have the rest


@dataclass
class Ledger:
    """Seconds of one request, or of a batch.

    Attributes:
        eps: the share of T_plain that speculation may cost.
        step: seconds of a plain step, in which c0 is counted.
        real, plain: T_real and T_plain.
        debt: L.
        worst: the largest L - eps * T_plain so far, which c0 bounds.
        refused: rounds that the ledger did not allow to draft.
        paused: seconds of pauses of the machine, which are in none of the others.
    """

    eps: float
    step: float = 0.0
    real: float = 0.0
    plain: float = 0.0
    debt: float = 0.0
    worst: float = 0.0
    refused: int = 0
    paused: float = 0.0

    @property
    def slack(self) -> float:
        """c0 in seconds."""
        return SLACK * self.step

    @property
    def bound(self) -> float:
        """(1 + eps) * T_plain + c0, which T_real does not exceed."""
        return (1 + self.eps) * self.plain + self.slack

    @property
    def kept(self) -> bool:
        """Whether T_real has stayed within the bound."""
        return self.worst <= self.slack

    def missing(self, extra: float) -> float:
        """Return the seconds by which a round is too dear; at most 0: it is allowed.

        Args:
            extra: seconds that the round may cost more than its tokens are worth.
        """
        return self.debt + extra - PLANNED * (self.eps * self.plain + self.slack)

    def add(self, real: float, plain: float) -> None:
        """Add the seconds of a round, and those of plain decoding for its tokens."""
        self.real += real
        self.plain += plain
        self.debt = max(self.debt + real - plain, -self.slack)
        self.worst = max(self.worst, self.debt - self.eps * self.plain)

    def fields(self) -> dict[str, float]:
        """Return the numbers for a report, in seconds."""
        return {**asdict(self), "slack": self.slack, "bound": self.bound}
