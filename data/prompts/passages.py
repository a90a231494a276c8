"""Retrieval-augmented questions: two to four invented passages with titles, one question.

An entry describes one made-up thing: a title, facts in order and questions that the facts
answer. One entry is asked about, the others distract; some questions have no answer in the text.
"""

from outrider.data.prompts.writer import Writer, lines, listed

TEXTS = """
    {Town} Bridge
    {Town} Bridge is a [stone|steel|wooden] bridge over the River {stream}, built in the years after
        {year}.
    It was designed by {person} and is {hundreds} meters long.
    In {late} it was closed to trucks after [cracks were found|a flood had damaged a pier].
    ? Who designed {Town} Bridge?
    ? How long is the bridge over the {stream}?
    ? Why was {Town} Bridge closed to trucks?

    River {stream}
    The {stream} is a river in {region} which rises near {town} and flows into the sea at {town2}.
    Its length is {hundreds} kilometers, and its main tributary is the {stream2}.
    The river is known for its [otters|wild salmon|spring floods], and barges used it until {late}.
    ? Where does the {stream} reach the sea?
    ? What is the {stream} known for?
    ? how long is the {stream} river

    {surname} {firm}
    {surname} {firm} is a maker of [bicycles|pianos|ovens|toys] with its head office in {town}.
    It was founded in {year} by the {job} {person2} with a loan of {hundreds} dollars.
    Today the firm has {hundreds2} employees and sells most of its goods in {region}.
    ? Who founded {surname} {firm}, and when?
    ? How many people work for {surname} {firm}?
    ? What does {surname} {firm} produce, and where is it based?

    {Town} Lantern Festival
    The {town} Lantern Festival takes place every {month} and lasts {few} days.
    It recalls the night of {year}, when [fishermen were guided home by lights|the town was saved
        from a fire].
    About {hundreds} lanterns are floated on the {stream}, and the largest is made by
        [schoolchildren|the bakers].
    ? What does the Lantern Festival in {town} recall?
    ? When is the {town} Lantern Festival, and how long does it last?
    ? who makes the largest lantern in {town}

    {dish}
    {Dish} is a [stew|pie|soup|dumpling dish] from {region}, made with {vegetable}(s), {grain} and
        [smoked fish|goat cheese].
    It was first described by {person} in a cookbook of {year}.
    By tradition it is served on {weekday}s, and [children get the crust|it is eaten with a wooden
        spoon].
    ? What is {dish} made of?
    ? Which book or author first mentions {dish}?
    ? On which day do people eat {dish}?

    The {novel}
    The {novel} is a novel by {person}, published in {year}.
    It follows a(n) {job} from {town} who [inherits a ship|loses her memory|is mistaken for a spy].
    Critics disliked it, but it sold {hundreds},000 copies and was filmed in {late}.
    ? Who wrote The {novel}?
    ? What is The {novel} about?
    ? When was The {novel} made into a film?

    {band}
    {band} [were|was] a [rock|folk|jazz] band from {town}, formed in {late} by {person} and
        {person2}.
    Their second album, "The {novel}", stayed in the charts for {few} weeks.
    The band broke up after [a quarrel over money|the drummer left to study medicine].
    ? Why did {band} break up?
    ? who started the band {band}
    ? What was the second album of {band} called?

    {Beast}
    The {beast} is a small [bird|lizard|rodent] that lives only in {region}.
    It weighs about {hundreds} grams, feeds on [seeds|snails|beetles] and is active [at night|at
        dawn].
    Its numbers fell to {tens} in {late}, but grew again after [cats were removed|hunting was
        banned].
    ? What does the {beast} eat?
    ? Why did the number of {beast}s grow again?
    ? Where does the {beast} live?

    {Town} Museum of [Clocks|Salt|Maps|Shadows]
    The museum in {town} was opened in {late} in a former [railway station|brewery|prison].
    Its collection of {hundreds} pieces began as the private hobby of {person}.
    Entry is free on {weekday}, and the oldest piece dates from {year}.
    ? What was the museum building in {town} used for before?
    ? Whose hobby was the start of the {town} museum?
    ? On which day is entry to the museum in {town} free?

    {Town} Light Railway
    The {town} Light Railway ran for {tens} kilometers from {town} to {town2}.
    It carried [slate|sugar beets|miners] from {year} on, and soon passengers as well.
    The line closed in {late}; volunteers reopened {few} kilometers of it as a heritage railway.
    ? What did the {town} Light Railway carry at first?
    ? How much of the railway at {town} was reopened, and by whom?
    ? When did the railway between {town} and {town2} close?

    {sport} Club {Town}
    The club was founded in {year} by workers of a [tram depot|paper mill] and plays in {color} and
        {color2}.
    It won its only title in {late}, when {person} scored {tens} times in a season.
    Its home ground, {surname2} Park, has room for {hundreds}0 spectators.
    ? What are the colors of the {sport} club of {town}?
    ? Who scored most when {town} won the title?
    ? How many spectators fit into {surname2} Park?

    {person} (explorer)
    {person} was an explorer born in {town}, who crossed {region} on foot in {year}.
    The journey took {few} months, and {few2} of the companions turned back because of
        [fever|hunger|a quarrel].
    The diaries were found in {late} in [a bakery|a church tower] and fill {tens} notebooks.
    ? How long did the journey across {region} take?
    ? Where were the diaries of {person} found?
    ? Why did some companions of {person} turn back?

    {isle}
    {isle} is an island off {region} with {hundreds} inhabitants and no [cars|trees|police].
    Its lighthouse, built in {year}, was the last to be run by hand, until {late}.
    Most families live from [knitting|seaweed|honey], and a ferry goes to {town} on {weekday} and
        {weekday2}.
    ? How many people live on {isle}?
    ? From what do most families on {isle} live?
    ? On which days does the ferry from {isle} to {town} go?

    {tool} (software)
    {tool} is an open-source program for [mapping caves|tuning pianos|planning gardens], first
        released in {recent}.
    It was written by {person} at the University of {town} in {few} weeks.
    Version {few}, the current one, added [support for phones|a search|a dark mode] and {tens}
        languages.
    ? What is {tool} used for?
    ? Who wrote {tool}, and where?
    ? What was new in the current version of {tool}?
"""
ENTRIES = tuple(lines(text) for text in TEXTS.split("\n\n"))

LISTS = {
    "year": tuple(str(year) for year in range(1871, 1960, 3)),
    "stream": listed("Avel, Brill, Corve, Dace, Elder, Fenn, Garl, Isk, Lorne, Mede, Orrin"),
    "late": tuple(str(year) for year in range(1962, 2016)),
    "recent": tuple(str(year) for year in range(2009, 2023)),
    "dish": listed("""
        brottel, sennick, marrowpot, ollap, tushka, grannel, pelmorra, dunnish, kessla"""),
    "grain": listed("barley, rye, millet, oats, buckwheat"),
    "novel": listed("""
        Glass Orchard, Tin Harbor, Ninth Bell, Paper Lighthouse, Salt Ledger, Crooked Mile,
        Winter Ferry, Borrowed Sky, Clockmaker's Debt, Quiet Meridian, Amber Stair"""),
    "band": listed("""
        The Velvet Ladders, Copper Weather, Nine Umbrellas, The Late Ferries, Static Orchard,
        Moss and Wire, The Paper Wolves, Slow Comet"""),
    "beast": listed("""
        ridge wren, saltback, lesser quillet, marsh tapperling, spotted dorrick, cinder vole,
        velvet skinkel, horned pipkin"""),
    "isle": listed("Sandrey, Ormsay, Calver, Little Brenna, Tarnholm, Eskray, Gannoway, Pellin"),
    "tool": listed("Larkmap, Tessel, Quickfen, Orbitree, Noteweaver, Plumbline, Gridmoss"),
}

ASKS = lines("""
    {texts}\\n\\n{question}
    {texts}\\n{question}
    Answer the question with the help of the passages.\\n\\n{texts}\\n\\nQuestion: {question}
    {texts}\\n\\nUsing only the text above, answer: {question} If the text does not say, say so.
    Question: {question}\\n\\nSearch results:\\n{texts}\\n\\nAnswer [briefly|in a full sentence|and
        name the passage]:""")


def entry(writer: Writer) -> tuple[str, str]:
    """A passage with its title, and one question about it, with the same invented names."""
    title, *rest = writer.one(ENTRIES)
    facts = [line for line in rest if not line.startswith("?")]
    question = writer.one(tuple(line for line in rest if line.startswith("?")))
    filled = writer.fill("\n".join([title, " ".join(facts), question[2:]]))
    head, body, question = filled.split("\n")
    return f"{head[0].upper()}{head[1:]}\n{body}", question


def rag(writer: Writer) -> list[str]:
    """Two to four passages in any order and a question about one, in rare cases about none."""
    asked, question = entry(writer)
    if writer.chance(0.06):
        asked = entry(writer)[0]
    others = [entry(writer)[0] for _ in range(1 + writer.chance(0.3) + writer.chance(0.1))]
    texts = [*others[1:], asked, *others[:1]]
    if writer.chance(0.5):
        texts.reverse()
    form = writer.one(ASKS).replace("\\n", "\n")
    return [writer.fill(form, texts="\n\n".join(texts), question=question)]
