"""Grade-school word problems of two to five steps.

Each story is a template (grammar: `writer.py`) with ranges for its numbers. The ranges are
chosen so that the answer exists: what is halved is even, what is shared divides, what is given
away was there before.
"""

from outrider.data.prompts.writer import Range

Story = tuple[str, tuple[tuple[str, Range], ...]]


def story(text: str, **ranges: Range) -> Story:
    """One schema: line breaks in the source are spaces in the text."""
    return " ".join(text.split()), tuple(ranges.items())


# fmt: off
STORIES: tuple[Story, ...] = (
    story(
        """{woman} bakes {n} trays of {treat}(s) with {a} on each tray. {Woman} [eats|burns] {b} and
        sells the rest at the {shop} for ${p} each. How much money does {woman} [make|earn|take
        in]?""",
        n=(3, 9), a=(6, 24, 2), b=(2, 6), p=(2, 5),
    ),
    story(
        """A(n) {shop} has {a} {fruit}(s) in the morning. It sells {b} before noon and twice as many
        in the afternoon. [How many are left|How many {fruit}(s) remain] [in the evening|at closing
        time]?""",
        a=(150, 320, 5), b=(12, 48),
    ),
    story(
        """{man} saves ${p} every week. After {n} weeks his {relative} gives him another ${b}, and
        he buys {k} {media}(s) for ${c} each. How much money does {man} have left?""",
        p=(15, 40), n=(6, 12), b=(10, 50, 5), k=(2, 4), c=(7, 19),
    ),
    story(
        """[In a school|At a summer camp|In a club] there are {a} children. Half of them play
        {sport}, a quarter play {sport2}, and the others [paint|sing in the choir|build robots]. How
        many children [paint, sing or build|do neither sport]?""",
        a=(40, 240, 4),
    ),
    story(
        """{woman} reads {a} pages of a(n) {media} on {weekday}, {b} more pages the next day, and on
        the third day as many as on both days together. The {media} has {c} pages. How many pages
        are left to read?""",
        a=(12, 30), b=(4, 15), c=(180, 420, 10),
    ),
    story(
        """A tank holds {a} liters of {liquid}. A pump [removes|takes out] {b} liters per minute,
        while a pipe adds {c} liters per minute. How many liters are in the tank after {n}
        minutes?""",
        a=(400, 900, 50), b=(18, 30), c=(4, 12), n=(5, 15),
    ),
    story(
        """{man} [drives|travels] for {n} hours at {a} kilometers per hour and then for {m} hours at
        {b} kilometers per hour. His car needs {c} liters of fuel for every 100 kilometers. [How far
        does he travel, and how much fuel does he use?|How many liters of fuel does he need for the
        whole trip?]""",
        n=(2, 5), a=(60, 100, 10), m=(2, 4), b=(80, 120, 10), c=(5, 9),
    ),
    story(
        """A(n) {garment} costs ${a}. In [{month}|the sale] the price falls by {p} percent. {woman}
        buys {n} of them and pays with [two|three] $100 bills. How much change does {woman} get
        back?""",
        a=(20, 40, 20), p=(10, 50, 5), n=(2, 4),
    ),
    story(
        """{woman}, {woman2} and {man} collect {toy}(s). {woman} has {a}, {woman2} has {k} times as
        many as {woman}, and {man} has {b} fewer than {woman2}. How many {toy}(s) do they have
        [together|in all]?""",
        a=(14, 40), k=(2, 5), b=(5, 20),
    ),
    story(
        """A farmer keeps {a} {animal}(s) and {b} {animal2}(s). Each {animal} eats {c} kilograms of
        feed a day and each {animal2} eats {d} kilograms. One sack holds {s} kilograms. How many
        sacks does the farmer need for {n} days?""",
        a=(6, 20, 2), b=(5, 25, 5), c=(2, 4), d=(2, 6, 2), s=(10, 20, 10), n=(10, 30, 10),
    ),
    story(
        """{man} works as a(n) {job} and earns ${p} per hour. For every hour beyond {a} hours a week
        he gets one and a half times that wage. Last week he worked {b} hours. [How much did he
        earn?|What was his pay?]""",
        p=(12, 30, 2), a=(35, 40), b=(42, 52),
    ),
    story(
        """{n} friends share a bill of ${t} equally. Then {woman} also pays ${b} for parking, [and
        she tips the waiter ${c}|and she buys a drink for ${c}]. How much does {woman} spend
        [altogether|that evening]?""",
        n=(3, 8), t=("n", 12, 35), b=(4, 9), c=(3, 8),
    ),
    story(
        """A garden has {n} rows with {a} {flower}(s) in each row. [A storm|A hungry rabbit|A late
        frost] destroys {b} {flower}(s) in every row. {woman} replaces a third of the lost ones. How
        many {flower}(s) grow in the garden now?""",
        n=(6, 15, 3), a=(14, 30), b=(3, 9),
    ),
    story(
        """{woman} is {a} years old. Her {relative} {man} is {k} times as old. In how many years
        will {man} be [exactly ]twice as old as {woman}?""",
        a=(4, 12), k=(3, 5),
    ),
    story(
        """A train with {n} cars leaves {town} with {a} passengers in each car. At {town2} {b}
        people get off and {c} get on; at the next station half of all passengers leave. How many
        passengers are on the train after that?""",
        n=(4, 10, 2), a=(24, 60, 4), b=(20, 60, 2), c=(10, 50, 2),
    ),
    story(
        """{man} needs {a} grams of flour for one batch of {treat}(s), which makes {b} pieces. He
        wants to give {k} pieces to each of the {n} guests [at his party|at the wedding]. Flour is
        sold in bags of 1000 grams. How many bags must he buy?""",
        a=(200, 450, 50), b=(12, 12), k=(2, 4), n=(24, 60, 6),
    ),
    story(
        """A [cinema|theater|concert hall] in {town} sells {a} tickets for adults at ${p} and {b}
        tickets for children at half the price. {c} percent of the income goes to the
        [city|owner|animal shelter]. How much money does the [cinema|house] keep?""",
        a=(50, 150, 10), p=(8, 16, 2), b=(20, 80, 10), c=(10, 30, 10),
    ),
    story(
        """{woman} makes {craft}(s). The material for one costs ${c}, and she needs {m} minutes for
        it. She sells each for ${p}. How much profit does she make in a day on which she works for
        {h} hours?""",
        c=(3, 8), m=(10, 30, 10), p=(12, 25), h=(4, 8),
    ),
    story(
        """A box contains {a} {color}, {b} {color2} and {c} {color3} balls. {man} takes out half of
        the {color} balls and adds as many {color2} balls as he took. How many more {color2} balls
        than {color3} balls are then in the box?""",
        a=(10, 30, 2), b=(12, 25), c=(3, 10),
    ),
    story(
        """{woman} runs {a} kilometers on every school day and {b} kilometers on Saturday. On Sunday
        she rests. Her {relative} runs {c} kilometers every day. Who runs more in {n} weeks, and by
        how much?""",
        a=(3, 7), b=(8, 16), c=(3, 6), n=(2, 6),
    ),
    story(
        """A [library|second-hand bookshop] has {n} shelves with {a} books each. It gives away {p}
        percent of its books, and then receives a gift of {b} books. How many books does it have
        now?""",
        n=(10, 40, 10), a=(20, 60, 10), p=(10, 40, 10), b=(35, 150, 5),
    ),
    story(
        """A rectangular [field|yard|playground] is {a} meters long and {b} meters shorter in width.
        {man} puts a fence around it that costs ${p} per meter and leaves out a gate of {g} meters.
        What does the fence cost?""",
        a=(30, 80, 2), b=(4, 20, 2), p=(5, 15), g=(2, 6),
    ),
    story(
        """{woman} buys {a} {item}(s) at ${p}.50 each and {b} {item2}(s) at ${q} each. She has a
        voucher for ${v}. How much does she still have to pay?""",
        a=(2, 10, 2), p=(1, 4), b=(3, 9), q=(2, 6), v=(3, 8),
    ),
    story(
        """A machine fills {a} bottles of {drink} per minute. A second, newer machine fills {k}
        times as many. How many [minutes|hours and minutes] do both machines together need for an
        order of {t} bottles?""",
        a=(10, 30), k=(2, 3), t=(3600, 14400, 1800),
    ),
    story(
        """{man} plants {a} trees. In the first year {b} of them die, and in the second year [half|a
        third|a sixth] of the remaining trees die. He plants {c} new trees in each of the two years.
        How many trees does he have after two years?""",
        a=(60, 90, 6), b=(6, 12, 6), c=(5, 20),
    ),
    story(
        """[A school|A factory|A hotel] orders {n} boxes of {item}(s). Each box contains {k} packs,
        and each pack has {a} {item}(s). {b} people receive {c} {item}(s) each. How many {item}(s)
        are left over?""",
        n=(5, 9), k=(8, 12), a=(10, 20), b=(30, 60), c=(3, 6),
    ),
    story(
        """{woman} has {a} coins worth 50 cents and {b} coins worth 20 cents. She buys {k}
        {fruit}(s) for {c} cents each. How much money does she have left, in dollars?""",
        a=(8, 20), b=(10, 30), k=(3, 8), c=(25, 60, 5),
    ),
    story(
        """The {sport} team of {town} scored {a} points in the first game, {b} points fewer in the
        second, and in the third game twice as many as in the second. What is its average over the
        three games?""",
        a=(24, 60, 12), b=(4, 16, 2),
    ),
    story(
        """A phone plan costs ${a} a month and includes {m} messages. Every further message costs
        {c} cents. {woman} sent {t} messages in {month}. Another plan costs ${b} without any limit.
        Which plan was cheaper for her, and by how much?""",
        a=(8, 15), m=(100, 300, 50), c=(5, 20, 5), t=(350, 500, 10), b=(18, 30),
    ),
    story(
        """{man} climbs a tower of {t} steps. He takes a break after every {k} steps, and each break
        lasts {b} minutes. Climbing {k} steps takes him {c} minutes. How long does he need to reach
        the top[, if he takes no break there]?""",
        k=(20, 50, 5), t=("k", 5, 12), b=(1, 3), c=(2, 5),
    ),
    story(
        """In a jar there are {a} {treat}(s). {woman} takes a third of them, {man} takes half
        of what is left, and their {relative} gets {b} of the rest. How many {treat}(s) are still in
        the jar?""",
        a=(36, 120, 6), b=(3, 9),
    ),
    story(
        """Last year the village of {town} had {a} inhabitants. This year {b} babies were born, {c}
        people moved in, and {p} percent of last year's inhabitants moved away. How many people live
        there now?""",
        a=(800, 4000, 100), b=(15, 60), c=(30, 120, 5), p=(3, 8),
    ),
    story(
        """{woman} wants to buy a(n) {furniture} for ${a}. She already has ${b} and earns ${p} for
        every dog that she walks. She walks {n} dogs each {weekday}. [After how many weeks can she
        buy it?|How many weeks must she wait?]""",
        a=(180, 360, 20), b=(20, 60, 10), p=(4, 8), n=(2, 5),
    ),
    story(
        """A [ferry|cable car|lift] carries {a} people per trip and makes {k} trips per hour. {t}
        people are waiting, and every hour {b} more arrive. How many people are still waiting after
        {h} hours?""",
        a=(12, 20), k=(3, 5), t=(460, 600, 10), b=(10, 25), h=(2, 4),
    ),
    story(
        """{man} mixes {a} liters of [blue|green|yellow|red] paint with {b} liters of white paint.
        One liter covers {c} square meters. He has to paint {n} walls, each {d} meters long and {e}
        meters high. How many liters are left over?""",
        a=(6, 12), b=(10, 20), c=(9, 12), n=(3, 4), d=(5, 8), e=(3, 4),
    ),
    story(
        """For the school fair, class A bakes {a} {treat}(s), class B bakes {p} percent more, and
        class C bakes {b} fewer than class B. Each {treat} is sold for ${q}, but {c} of them stay
        unsold. How much money is raised?""",
        a=(60, 200, 20), p=(10, 50, 10), b=(10, 30), q=(1, 3), c=(8, 25),
    ),
    story(
        """{woman} and {man} start walking toward each other from {town} and {town2}, which are {t}
        kilometers apart. {woman} walks {a} kilometers per hour and {man} {b} kilometers per hour.
        [When do they meet?|How far has {woman} walked when they meet?]""",
        a=(3, 5), b=(3, 6), t=(16, 48, 4),
    ),
    story(
        """A hotel has {f} floors with {a} rooms each. On {weekday} {p} percent of the rooms are
        taken. A room costs ${c} per night, and cleaning a used room costs ${d}. How much does the
        hotel earn that night after cleaning?""",
        f=(4, 10, 2), a=(10, 30, 10), p=(50, 90, 10), c=(60, 120, 5), d=(8, 15),
    ),
    story(
        """{man} keeps {n} beehives. Each gives {a} jars of honey in summer and {b} jars in autumn.
        He keeps {c} jars for his family and sells the others in boxes of {k}. How many full boxes
        can he sell?""",
        n=(4, 12), a=(9, 18), b=(4, 8), c=(5, 15), k=(4, 8),
    ),
    story(
        """The sum of the ages of {woman}, {man} and {woman2} is {t}. {man} is {a} years older than
        {woman}, and {woman2} is {b} years younger than {woman}. How old is each of them?""",
        t=(45, 75, 3), a=(3, 9, 3), b=(3, 6, 3),
    ),
    story(
        """A baker uses {a} eggs for a cake and {b} eggs for a tray of {treat}(s). On {weekday} she
        makes {n} cakes and {m} trays. Eggs come in cartons of 12 that cost ${p} each. How much does
        she spend on eggs?""",
        a=(3, 6), b=(2, 5), n=(4, 12), m=(5, 10), p=(2, 5),
    ),
    story(
        """{woman} watches {a} episodes of a series every day from Monday to Friday and {b} episodes
        on each day of the weekend. An episode lasts {m} minutes. How many hours does she watch in
        one week?""",
        a=(1, 3), b=(3, 6), m=(30, 60, 15),
    ),
    story(
        """A swimming pool can be filled by one hose in {a} hours. With a second hose of the same
        strength, how long does it take to fill {n} such pools, if [no time is lost in
        between|changing from one pool to the next takes {b} minutes]?""",
        a=(6, 14, 2), n=(2, 5), b=(15, 30, 5),
    ),
    story(
        """{man} bought {a} shares of a company for ${p} each. The price first rose by {r} percent
        and then fell by ${d}. He sold all shares and paid a fee of ${f}. What was his profit or
        loss?""",
        a=(10, 60, 10), p=(20, 60, 10), r=(10, 30, 10), d=(1, 6), f=(5, 20, 5),
    ),
    story(
        """A museum lets in {a} visitors every {m} minutes. It is open from 10 a.m. to {h} p.m. A
        fifth of the visitors are children who pay ${c}; all others pay ${p}. How much does the
        museum take in on a fully booked day?""",
        a=(20, 60, 5), m=(15, 30, 15), h=(4, 6), c=(2, 5), p=(9, 14),
    ),
    story(
        """{woman} has {a} meters of ribbon. She needs {b} centimeters for each of {n} presents and
        {c} meters for a banner. How many bows of {d} centimeters can she make from what is
        left?""",
        a=(30, 50), b=(60, 120, 20), n=(8, 15), c=(3, 6), d=(20, 50, 10),
    ),
    story(
        """Of the {a} {animal}(s) on a farm, {p} percent are brown and the rest are white. A
        third of the white ones are sold, [and {b} new brown ones are born|while {b} brown
        ones are bought]. How many {animal}(s) live on the farm now?""",
        a=(60, 180, 60), p=(10, 40, 30), b=(4, 15),
    ),
    story(
        """{man} takes the bus to work on {n} days a week. A single ride costs ${p}, and he rides
        twice a day. A monthly ticket costs ${m}. How much does he save [in a month|over {k} months]
        of four weeks with the monthly ticket?""",
        n=(4, 5), p=(3, 5), m=(70, 90, 5), k=(2, 6),
    ),
    story(
        """A rope of {t} meters is cut into two pieces. One piece is {k} times as long as the other.
        The longer piece is then cut into as many parts of {c} meters as possible. How long is the
        shorter piece, and how many parts are there?""",
        k=(2, 4), c=(2, 3), t=(60, 180, 60),
    ),
    story(
        """{woman} scored {a}, {b} and {c} points in three tests. What must she score in the fourth
        test to reach an average of {d} points?""",
        a=(76, 85), b=(78, 88), c=(80, 90), d=(80, 83),
    ),
    story(
        """{man} and his {relative} pick {fruit}(s). He picks {a} per hour, and his {relative} picks
        {b} per hour. After {h} hours they put all {fruit}(s) into crates of {k} and sell each full
        crate for ${p}. How much do they earn?""",
        a=(40, 90, 5), b=(30, 70, 5), h=(3, 6), k=(20, 40, 10), p=(9, 18),
    ),
    story(
        """A recipe for {n} people needs {a} grams of rice and {b} milliliters of broth. {woman}
        cooks for {m} people. [How much rice and broth does she need?|She has 2 kilograms of rice.
        How much is left?]""",
        n=(4, 4), a=(200, 320, 40), b=(400, 800, 100), m=(6, 18, 2),
    ),
)
# fmt: on
