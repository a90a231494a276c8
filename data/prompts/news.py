"""Invented news-like articles to summarise.

An article is a lead, some of its kind's details in order, one or two quotes and an outlook; each
sentence has alternatives (grammar: `writer.py`). People, places and figures are made up.
"""

import re
from typing import NamedTuple

from outrider.data.prompts.writer import Writer, lines


class Kind(NamedTuple):
    """One kind of event: sentences that can stand in an article about it."""

    leads: tuple[str, ...]
    details: tuple[str, ...]
    outlooks: tuple[str, ...]


def kind(leads: str, details: str, outlooks: str) -> Kind:
    """A kind from three texts with one sentence, or a few, per line."""
    return Kind(lines(leads), lines(details), lines(outlooks))


KINDS = (
    kind(
        """
    A [burst water main|broken pipe|collapsed sewer] flooded the center of {town} on {weekday}[
        morning| night], closing {few} shops and cutting off {hundreds} households.
    Hundreds of residents of {town} were [left without tap water|asked to leave their homes] after a
        main pipe from {year} gave way early on {weekday}.
        """,
        """
    The water stood [knee-deep|up to a meter high] in the market square, and parked cars were
        [pushed against walls|swept down the hill].
    Fire crews from {few} neighboring towns pumped out cellars [for eleven hours|until late in the
        evening].
    An inspection in {month} had [warned of rust|rated the pipe as "sound"], according to documents
        seen by this newspaper.
    The town had planned to replace the pipe [in two years|last spring], but the work was delayed
        [for lack of money|when the contractor went bankrupt].
    {Person2}, who runs a [bookshop|bakery|hardware store] on the square, lost stock worth about
        {thousands} dollars.
    Nobody was hurt, though [two people were taken out of a stuck elevator|a dog had to be rescued
        from a roof].
        """,
        """
    The mayor promised [quick help for shop owners|an independent report] by the end of {month2}.
    Drinking water is handed out at the [school|fire station] until further notice.
        """,
    ),
    kind(
        """
    A team from the University of {town} has found that [crows|bees|river otters|octopuses] can
        [remember human faces|count to four|plan for the next day] better than was thought.
    Researchers in {town} say that they have [watched|filmed] wild [foxes|ravens|seals] using
        [tools|simple signals] in a way never described before.
        """,
        """
    The group observed {tens} animals over {few} years and recorded more than {thousands} hours of
        video.
    In the key experiment the animals had to choose between [two|three] boxes, one of which held
        food only if [a light had been shown|another animal was absent].
    They chose correctly in {percent} percent of the trials, far more often than chance would allow.
    Younger animals [learned faster|did worse at first], but the difference vanished after {few2}
        weeks.
    The work was paid for by [a private foundation|the national science fund] and appeared on
        {weekday} in a [biology|zoology] journal.
    Others advise caution, as [the sample is small|all the animals came from one valley].
        """,
        """
    Next, the scientists want to [repeat the study in {region}|test whether parents teach the skill
        to their young].
    The data are public, and a second group has already begun to check them.
        """,
    ),
    kind(
        """
    The council of {town} voted [by a single vote|by a wide margin] on {weekday} to [close the main
        street to cars|build a new tram line|turn the old airfield into a park].
    After {few} years of debate, {town} will get [a new swimming pool|its first bicycle highway|a
        bridge for pedestrians].
        """,
        """
    The project will cost about {few2} million dollars, of which the [state|region] pays {percent}
        percent.
    Supporters argue that it will [bring visitors to the shops|make the air cleaner|save commuters
        time].
    Opponents collected {thousands} signatures and say that [the money is needed for schools|traffic
        will only move elsewhere|parking is already scarce].
    An earlier plan failed in {year} because [the costs had doubled|a rare orchid was found on the
        site].
    During the meeting, which lasted until midnight, {tens} citizens asked to speak.
    Work is to start in {month} and to take {few} years.
        """,
        """
    A group of residents has announced that it will [go to court|demand a referendum].
    The first plans will be shown in the town hall from {month2} on.
        """,
    ),
    kind(
        """
    {Town} celebrated [late into the night|in the rain] after its {sport} team [won the cup of
        {region}|reached the first division] for the first time in {tens} years.
    Captain {person2} scored [in the final seconds|twice] as {town} beat {town2} on {weekday} in
        front of {thousands} spectators.
        """,
        """
    At half-time the favorites from {town2} had led [clearly|by a comfortable margin], and few in
        the hall expected a turn.
    The coach, a former [teacher|plumber|postal worker], changed {few} players and [switched to an
        attacking line-up|told the team to play without fear].
    The goalkeeper played in spite of [a broken finger|a fever] and saved {few2} shots.
    Most of the squad grew up in the town and [train after work|still play for less than bus fare].
    Only {few2} years ago the club was nearly closed because of debts of {thousands} dollars.
    The visitors complained about [a late whistle|the state of the field], but congratulated the
        winners.
        """,
        """
    The parade is planned for {weekday2}, and schools will [close at noon|send their brass bands].
    In the next season the team will meet clubs with [ten|twenty] times its budget.
        """,
    ),
    kind(
        """
    The [shoe|furniture|battery|glass] maker {surname} will [close|open] a factory in {town},
        [affecting|with] about {hundreds} jobs.
    {Surname} {firm}, one of the largest employers in {region}, is [moving its head office to
        {town}|cutting {hundreds} jobs|hiring {hundreds} people].
        """,
        """
    The company gave [rising energy prices|strong demand from abroad|new machines] as the reason.
    Its sales [rose|fell] by {percent} percent last year, to {hundreds2} million dollars.
    The union was told [only on the morning of the announcement|in private some weeks ago] and
        speaks of a [shock|fair agreement].
    Workers who are affected will be offered [training for {few} months|work at a plant near
        {town2}].
    The town, where {surname} has produced since {year}, depends on the firm for a third of its
        taxes.
    Analysts [had expected the step|were surprised], and the share price moved by {few2} percent.
        """,
        """
    Talks between the company, the union and the mayor continue on {weekday}.
    A final decision about the older buildings is expected in {month}.
        """,
    ),
    kind(
        """
    A [hiker|fisherman|schoolboy|retired couple] near {town} has found [a hoard of Roman coins|a
        prehistoric canoe|the bones of a mammoth|a medieval bell].
    Builders who were digging [a cellar|a pond|a trench for cables] in {town} came across [the walls
        of a lost monastery|a grave from the Iron Age|an ancient kiln].
        """,
        """
    Experts from the museum of {town2} date the find to about {hundreds} [BC|AD].
    It lay only {few} meters below the surface, [protected by clay|under a layer of sand].
    "At first I thought that it was [scrap metal|a tree root]," the finder said.
    The place had been a [harbor|market|crossroads] in those days, which may explain how the objects
        got there.
    By law the find belongs to the state, but a reward of {thousands} dollars is [possible|likely].
    The site is now guarded, after [strangers with metal detectors were seen|curious visitors
        damaged the edges].
        """,
        """
    The excavation will go on until {month}, weather permitting.
    Visitors can see the first pieces in an exhibition from {month2}.
        """,
    ),
    kind(
        """
    A [storm|blizzard|heat wave|sudden frost] has [destroyed much of the {fruit} harvest|left
        {thousands} homes without power] in {region}.
    Farmers in {region} fear for their crops after [the driest {month} since {year}|three weeks of
        rain].
        """,
        """
    Near {town} gusts and hail tore [roofs from barns|nets from orchards], and {few} roads remain
        closed.
    The farmers' association puts the damage at {few2} million dollars, and only {percent} percent
        of it is insured.
    {Person2}, who farms {hundreds} hectares, said that [the work of a year was gone in an hour|such
        weather used to come once in a lifetime].
    Prices for {fruit}(s) and {vegetable}(s) have already risen by {few} percent.
    Schools served as shelters for {hundreds2} travelers who were stranded on trains.
    Meteorologists link such extremes to [a warmer sea|a slower jet stream], though they add that
        one event proves little.
        """,
        """
    The government will decide on {weekday} whether to pay emergency aid.
    Calmer weather is forecast from {weekday2} on.
        """,
    ),
    kind(
        """
    Police in {town} have [solved|closed] the [curious|strange] case of the [missing statue|stolen
        cello|vanished delivery van].
    A [painting|violin|rare stamp] that was stolen from a museum in {town} {tens} years ago has
        [turned up in an attic|been returned by post].
        """,
        """
    A tip from [a piano teacher|a night-shift nurse|two children] led the officers to a garage on
        the edge of {town2}.
    There they also found {tens2} other items, among them [antique clocks|bicycles|garden gnomes].
    A man of {age} has [admitted the theft|denied everything], and says that [he meant to give it
        back|he bought it at a flea market].
    The piece is worth around {thousands} dollars, but its owner called it priceless.
    At the time the alarm had been [switched off for repairs|set off by a cat so often that nobody
        looked].
    No one else is suspected, according to inspector {surname}.
        """,
        """
    The trial is to begin in {month}.
    The owner has invited the finders to [a concert|dinner] as a thank-you.
        """,
    ),
    kind(
        """
    A [hospital|clinic] in {town} has [begun to use|tested] a [blood test|breathing device|phone
        app] that could find [heart disease|infections|diabetes] earlier.
    Patients who [walked for half an hour a day|slept an hour longer|ate a handful of nuts each day]
        had {few} percent fewer [infections|falls], a study from {town} says.
        """,
        """
    The study followed {thousands} people between {age} and 80 for {few} years.
    Half of them were treated as before; the others were [called once a week by a nurse|given the
        new method].
    In the second group {percent} percent felt better, against a third in the first.
    Side effects were [rare and mild|mostly headaches], but {tens} people left the study early.
    One treatment costs about {tens2} dollars, which insurers [do not yet pay|have agreed to cover].
    Independent experts called the result [promising but early|solid], as [no children took part|a
        larger trial is missing].
        """,
        """
    A larger trial with {hundreds} patients in {few2} cities starts in {month}.
    Doctors warn that nobody should change a treatment without advice.
        """,
    ),
    kind(
        """
    The space agency of {region} has lost, and then regained, contact with its [weather
        satellite|small moon probe|comet mission].
    Engineers in {town} have [woken a satellite after {few} months of silence|landed a small probe
        on an asteroid].
        """,
        """
    The signal [broke off on {weekday} during a routine turn|had been weak since {month}], and a
        first attempt to restart the computer failed.
    A team of {tens} worked in shifts and [sent the same command every ten minutes|used an old
        antenna near {town2}].
    The fault was traced to [a frozen valve|a wrong sign in a table|a worn cable].
    The craft is the size of a [washing machine|shoe box|small car] and was launched in {year}.
    Since then it has sent more than {thousands} pictures, [some of them famous|which are free for
        anyone to use].
    The mission cost {hundreds} million dollars, less than half of comparable ones.
        """,
        """
    In {month2} the probe will [pass close to Venus|measure the dust around it].
    If all goes well, the mission will be extended by {few2} years.
        """,
    ),
    kind(
        """
    The film festival of {town} [opened on {weekday}|ended on {weekday}] with [a surprise|a
        scandal|long applause] for the director {person2}.
    A [novel|play|children's book] by {person2}, who works as a(n) {job} in {town}, has won the book
        prize of {region}.
        """,
        """
    It tells the story of a [lighthouse keeper|young interpreter|retired clown] who [inherits a
        house full of letters|returns to the village of her childhood].
    The jury praised its [dry humor|quiet language|courage], and chose it from {hundreds} entries.
    {Publisher} publishers had turned it down before a small press printed {hundreds2} copies.
    Not everyone agrees: one critic called it [far too long|a well-made postcard].
    The prize is worth {thousands} dollars, part of which will go to [a school library|a home for
        refugees].
    The author wrote it [on the bus to work|between four and six in the morning] over {few} years.
        """,
        """
    A translation into {few2} languages is under way.
    The next work is said to be about [the sea|a family of glassblowers].
        """,
    ),
    kind(
        """
    Pupils of a school in {town} have [built a solar boat|saved a pond|started a repair shop], and
        the idea is spreading.
    In {town}, a school without [bells|grades|smartphones] has become a model for {region}.
        """,
        """
    It began {few} years ago when [a teacher broke a leg|the heating failed] and the pupils had to
        [organize their own lessons|meet in a workshop].
    Today {hundreds} pupils take part, and {tens} are waiting for a place.
    Every {weekday} they [decide on new rules in an assembly|open the doors to the neighbors].
    Test results [rose by {few2} percent|did not change], but the number of missed days fell by a
        third.
    Some parents were against it: they feared that [the children would fall behind|nobody would
        clean up].
    The equipment, worth {thousands} dollars, was donated by [local firms|a former pupil].
        """,
        """
    In {month} a delegation from {town2} will come to have a look.
    The ministry will decide next year whether other schools may follow.
        """,
    ),
)

QUOTES = lines("""
    "We have never seen anything like it in {tens} years," said {person}[, who was there from the
        start|, a spokesperson|].
    "[It is too early|This is not the moment] to draw conclusions," {person} told reporters on
        {weekday2}.
    {Person3}, a(n) {job} from {town}, sees it with mixed feelings: "[I am glad|It had to
        come], but I wonder what it will cost us."
    "People here help one another," said {person3}. "[That is what I will remember|Without that we
        would have given up long ago]."
    "If you had told me this a year ago, I would have laughed," {person3} said[ with a smile|].
    {Person} called the news "[a wake-up call|a good day for {region}|long overdue]" and asked for
        patience.""")

TASKS = lines("""
    Summarize: {article}
    Summarize the following article in [two|three] sentences.\\n\\n{article}
    {article}\\n\\nWrite a short summary of this [article|report].
    Give the key points of this news report as bullet points:\\n\\n{article}
    {article}\\n\\nTL;DR
    Write a headline and a [one|two]-sentence summary for this text:\\n\\n{article}""")

# Figures and days are drawn anew in every sentence; names hold for the whole article.
FIGURE = re.compile(r"\{(few|tens|hundreds|thousands|percent|weekday|month|year)(\d*)\}")

LISTS = {
    "few": ("three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    "tens": tuple(str(count) for count in range(11, 48)),
    "hundreds": tuple(str(count) for count in range(120, 900, 20)),
    "thousands": tuple(f"{count},{half}00" for count in range(2, 30) for half in (0, 5)),
    "percent": tuple(str(count) for count in range(15, 90, 2)),
    "year": tuple(str(year) for year in range(1903, 1999, 4)),
    "age": tuple(str(age) for age in range(29, 70)),
    "firm": ("Works", "and Sons", "Group", "Industries", "Brothers"),
    "publisher": ("Eleven", "Nine", "Seventeen", "Twenty"),
}


def article(writer: Writer) -> str:
    """A text of 120 to 250 words with one set of names and figures."""
    event = writer.one(KINDS)
    body = writer.some(event.details, writer.number(4, 6))
    for quote in writer.some(QUOTES, writer.number(1, 2)):
        body.insert(writer.number(2, len(body)), quote)
    parts = [writer.one(event.leads), *body, writer.one(event.outlooks)]
    apart = (FIGURE.sub(rf"{{\1\g<2>{place}}}", part) for place, part in enumerate(parts))
    text = writer.fill(" ".join(apart))
    return text if 120 <= len(text.split()) <= 250 else article(writer)


def summarization(writer: Writer) -> list[str]:
    """One article with the wish for a summary."""
    return [writer.fill(writer.one(TASKS).replace("\\n", "\n"), article=article(writer))]
