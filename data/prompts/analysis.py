"""Tasks about a given text or situation: extraction, classification, comparison, reasoning."""

from outrider.data.prompts.writer import Writer, lines, listed

LISTS = {
    "fact": listed("""
        names, places, dates, amounts of money, names and their jobs, numbers with their units,
        places and dates, names and places"""),
    "format": listed("""
        a JSON object, a Markdown table, a bulleted list, comma-separated values, one line per
        item, YAML"""),
    "note": lines("""
    {Person} ({job}, {town}) will meet {person2} on {weekday}, {day} {month}, at {hour}:30 to sign
        the lease for ${price}.
    On {day} {month} {woman} paid ${price} for two {furniture}(s) in {town}; {man} picked them up on
        {weekday}.
    Order {number} for {person}: {count} {item}(s) at ${small} each, {count2} {garment}(s) at
        ${small2} each, to {town}.
    Minutes: {woman} will book the hall by {weekday}. {Man} calls the {job}. The budget is ${price}.
        Next meeting: {day} {month}.
    The workshop on {craft}s is led by {person}, costs ${price} and runs from {day} {month} for
        {count} days in {town}.
    Lost near {town} on {weekday}: a(n) {color} {garment} and a bag with {count} keys. Call {person}
        after {hour} p.m.
    {Person} moved from {town} to {town2} in {year}, worked there as a(n) {job} and bought a
        house for ${price},000.
    The ferry {town}-{town2} leaves at {hour}:15 on {weekday} and {weekday2}; tickets cost ${small},
        bicycles ${small2}.
    Dear {man}, my train reaches {town} at {hour}:45 on {day} {month}. I bring {count} {fruit}(s)
        and the ${price}. {Woman}
    Recipe by {person}: {count} {vegetable}(s), {small}0 grams of rice and two {fruit}(s); cook for
        {day} minutes."""),
    "review": lines("""
    The {product} broke after {count} days, and nobody answered my calls.
    I bought the {product} for my {relative}, who uses it every {weekday}. Worth every cent!
    The {product} is fine, but for ${price} I had hoped for more.
    Delivery took {count} weeks. The {product} itself works as described.
    What a joy: the {product} is light, quiet and even {color}.
    I would not buy this {product} again, although it looks nice.
    My {relative} laughed at the {product} at first and now wants one too.
    The manual of the {product} is a joke, the support friendly, the price fair."""),
    "product": listed("""
        kettle, backpack, lamp, toaster, headset, tent, printer, umbrella, desk, alarm clock,
        blender"""),
    "statement": listed("""
        The chef salted the soup twice., Interest rates will rise next spring., The striker missed
        the penalty., A new comet is visible at dawn., The choir rehearses on Mondays., The vaccine
        needs two doses., Parliament passed the budget., The novel has two narrators., The bridge
        was built in iron., My phone does not charge., The glacier lost ten meters., The goalkeeper
        signed a contract., The pianist played an encore., Wheat prices fell again., The router
        must be restarted., The painter used only blue., The court heard three witnesses., Bread
        needs time to rise."""),
    "pair": listed("""
        cats and dogs as pets, trains and planes for short trips, renting and buying a home, tea
        and coffee, cities and villages, paper books and e-readers, electric and petrol cars, gas
        and induction stoves, butter and olive oil, frogs and toads, alligators and crocodiles,
        weather and climate, viruses and bacteria, comets and asteroids, mean and median, Python
        and C++, SQL and spreadsheets, novels and films, democracy and monarchy, capitalism and
        socialism, yoga and pilates, running and swimming, violin and guitar, oil paint and
        watercolor, wool and cotton, bees and wasps, the Renaissance and the Baroque, solar and
        wind power, introverts and extroverts, loans and leases, essays and reports, whales and
        sharks, cash and cards, email and phone calls, ferries and bridges, oak and pine, metaphors
        and similes, speed and velocity, mass and weight, rivers and canals, poetry and prose, rice
        and pasta"""),
    "change": listed("""
        the moon were twice as close, nobody needed sleep, all cars were electric tomorrow, paper
        had never been invented, people could read minds, the oceans were fresh water, money had an
        expiry date, school began at noon, everyone spoke one language, bees died out, gravity were
        half as strong, the internet failed for a week, cities had no cars, people lived to be 200,
        it never rained on land, sugar were banned"""),
    "day": tuple(str(day) for day in range(2, 29)),
    "hour": tuple(str(hour) for hour in range(3, 12)),
    "count": ("three", "four", "five", "six", "seven", "eight", "nine"),
    "small": tuple(str(price) for price in range(3, 30)),
    "price": tuple(str(price) for price in range(45, 500, 5)),
    "number": tuple(str(number) for number in range(210, 9900, 130)),
    "thing": listed("smaller, older, faster, heavier, louder, richer, younger, taller"),
}

EXTRACTION = lines("""
    Extract all {fact} from this text as {format}: {note}
    {note}\\n\\nTurn this note into {format} with suitable field names.
    {note}\\nWho, where, when, how much? Answer from the text above, with "unknown" where it says
        nothing.
    Read the notes and list the {fact} in {format}.\\n1. {note}\\n2. {note2}
    From the following two messages, list [all amounts|everyone's name|every place], one per
        line.\\n- {note}\\n- {note2}
    Is each review positive, negative or mixed? Answer with {format}.\\n1. {review}\\n2.
        {review2}\\n3. {review3}
    Rate each review from 1 (very bad) to 5 (very good).\\na) {review}\\nb) {review2}\\nc) {review3}
    Assign a topic (sports, science, arts, economy, food, technology, politics) to each: {statement}
        {statement2} {statement3}
    Which of these sentences are about [technology|nature|art|sport]? {statement} {statement2}
        {statement3} {statement4}
    Sort these words into groups: {fruit}, {sport}, {furniture}, {fruit2}, {garment}, {sport2},
        {job}, {garment2}.
    Put these events in order of time and give {format}: {note}
    Correct the mistakes in this sentence: {woman} dont [has no|have] {count} {fruit}s who was
        {color} and [more better|to small].""")

REASONING = lines("""
    Compare {pair}[ in a table| in five sentences| under three headings].
    What are the [differences between|pros and cons of] {pair}?
    Which would you choose for [a student|a family|an older person], and why: {pair}?
    What would happen if {change}? [Think about two consequences.|Reason step by step.]
    {Woman} is {thing} than {man}. {Man2} is {thing} than {woman}. {Woman2} is less so than {man}.
        Who comes last?
    {Woman}, {man} and {woman2} own a(n) {animal}, a(n) {animal2} and a(n) {animal3}. {Woman} has no
        {animal}. {Man} has the {animal2}. \
Who owns which animal?
    If all {job}s in {town} own a(n) {color} {garment}, and {man} owns a(n) {color} {garment},
        is {man} a {job}? Explain.
    Today is {weekday}. {Woman} has her lesson in {day} days, and {man} visits her two days before.
        On which day does he come?
    {Man} is the only child of {woman}, and {woman2} is the daughter of {man}. How are {woman} and
        {woman2} related?
    {Woman} leaves at {hour}:40 and needs {day} minutes to the station and {small} minutes by train.
        When does she arrive?
    Five people sit in a row. {Woman} is in the middle, {man} at the left end, {woman2} not next to
        {man}. Where can {woman2} sit?
    One of these does not belong: {fruit}, {fruit2}, {vegetable}, {furniture}. Which one, and why?
        Is there another answer?
    {Man} says: "I always lie on {weekday}s." Can he say this on a {weekday}? Explain.
    A(n) {garment} and a(n) {toy} cost ${price} together. The {garment} costs $20 more than the
        {toy}. What does the {toy} cost?
    Three switches outside a closed room control three lamps in it: {color}, {color2} and {color3}.
        You may enter once. \
How do you find out which is which?
    {Woman} saw wet streets in {town} and concluded that it had rained. What other explanations are
        there?
    Plan the day: {woman} must [visit the {job}|buy a(n) {furniture}] before {hour}, fetch {man} at
        {hour} and cook for {count} guests.""")

FOLLOW_UPS = lines("""
    Now give the same as {format}.
    Are you sure? Check every item.
    Explain how you got there.
    Add one more example of your own.
    Shorten your answer to one sentence.""")
DOUBTS = lines("""
    Are you sure? Check every step.
    Explain how you got there.
    Is there another way to see it?
    Change one detail so that the answer changes.
    Shorten your answer to one sentence.""")


def _task(writer: Writer, patterns: tuple[str, ...], follow_ups: tuple[str, ...]) -> list[str]:
    """One filled pattern; every fourth has a second turn."""
    task = writer.fill(writer.one(patterns).replace("\\n", "\n"))
    return [task, writer.fill(writer.one(follow_ups))] if writer.chance(0.25) else [task]


def extraction(writer: Writer) -> list[str]:
    """Facts to find in a text, or texts to put in classes."""
    return _task(writer, EXTRACTION, FOLLOW_UPS)


def reasoning(writer: Writer) -> list[str]:
    """A comparison, a what-if or a small puzzle."""
    return _task(writer, REASONING, DOUBTS)
