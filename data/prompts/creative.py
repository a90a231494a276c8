"""Writing, role play and code: tasks without one right answer."""

from outrider.data.prompts.writer import Writer, lines, listed

LISTS = {
    "theme": listed("""
        a lighthouse in winter, an old railway clock, a letter that arrives forty years late, the
        last tree in a city, two rival bakers, a robot that learns to whistle, the first day of a
        new job, a dog that steals shoes, a village without mirrors, the sound of rain, a
        grandmother's recipe, a broken umbrella, moving to another country, a long train ride, a
        chess game between strangers, a lost glove, the summer holidays, an empty theater, a bee
        that is afraid of flowers, a library at night, growing older, a marathon, the first snow, a
        map with a mistake, neighbors who never speak, a ship in a bottle, a secret garden, a piano
        on a beach, a town that forgets its name, homework on Mars, a cat that runs a hotel, a
        storm at sea, an unexpected inheritance, autumn leaves, a night market, the smell of bread,
        a bridge between two villages, a snail that wants to fly, silence, a photograph of nobody,
        the color blue, a lonely cloud, a talking elevator, an honest thief"""),
    "product": listed("""
        a folding bicycle, a lamp that wakes you gently, handmade soap, a silent vacuum cleaner, a
        reusable coffee cup, an app for finding lost keys, a cooking course, a weekend trip by
        train, a garden chair, a board game about bees, a backpack made of sailcloth, organic dog
        food, a language course, a pair of winter boots, a small bookstore"""),
    "occasion": listed("""
        the retirement of a colleague, a friend's wedding, the opening of a library, a farewell at
        a school, a silver jubilee, the start of a football season, a prize for volunteers, a
        birthday of a grandfather, the end of a long project, a meeting of beekeepers, the launch
        of a small company"""),
    "message": listed("""
        asking a landlord to repair the heating, thanking a teacher, inviting neighbors to a street
        party, declining an invitation politely, asking a professor for more time, complaining
        about a late delivery, applying for an internship at a museum, asking for feedback on a
        report, announcing a new meeting time, resigning from a job on good terms, asking a library
        for a rare book, apologizing for a double booking, proposing a joint project to another
        team, reminding a customer of an unpaid bill, welcoming a new colleague"""),
    "opinion": listed("""
        school uniforms, working from home, zoos, homework, four-day weeks, free public transport,
        learning to cook at school, phones in class, keeping pets in cities, self-checkout tills,
        space tourism, writing by hand, daylight saving time"""),
    "role": listed("""
        a ship's cook on a long voyage, a retired detective, a medieval blacksmith, a patient math
        tutor, a tour guide in Rome, a strict editor, an astronaut on a space station, a friendly
        pharmacist, a talking oak tree, a job interviewer, a nervous dragon, a stage magician, a
        museum guard at night, a football coach, a fortune teller who doubts herself, a cheerful
        weather presenter, a negotiator, a Roman senator, a grumpy bus driver, a kindergarten
        teacher, a time traveler from 1890, a hotel receptionist, a pirate who is afraid of water,
        a career adviser, a botanist in a rain forest, an old sailor, a lawyer for fairy-tale
        wolves, a barista with strong opinions"""),
    "prompt": listed("""
        How was your day?, What do you think about rain?, I am late and need your help., Tell me
        your best story., What would you never do again?, Please explain your work to me., I have
        lost my keys. What now?, Why should I trust you?, What is the hardest part of your job?, I
        would like to learn your trade., What do you eat for breakfast?, Can you give me some
        advice for an exam?, Which object could you not do without?, Somebody has broken a window.
        What happened?, What will the world look like in a hundred years?"""),
    "language": listed("""
        Python, Python, Python, Python, JavaScript, Java, C++, C, Go, Rust, TypeScript, Ruby, Bash,
        Kotlin"""),
    "task": listed("""
        reverses a string, checks whether a word is a palindrome, counts the vowels in a text,
        finds the two largest numbers in a list, merges two sorted lists, removes duplicates from a
        list and keeps the order, computes the factorial of n, tests whether a number is prime,
        converts Celsius to Fahrenheit, counts how often each word occurs in a file, validates an
        email address, finds the longest word in a sentence, sorts a list of people by age,
        computes a moving average, implements binary search, implements a stack with push and pop,
        simulates rolling two dice, generates a random password, converts a number to Roman
        numerals, parses a date of the form 2024-05-31, computes the greatest common divisor,
        flattens a nested list, transposes a matrix, checks balanced parentheses, finds all
        anagrams in a list of words, prints a multiplication table, encrypts text with a Caesar
        cipher, computes compound interest, reads a CSV file and prints column averages, finds the
        median, groups words by their first letter, implements bubble sort, rotates a list by k
        places, detects a cycle in a linked list, computes the Levenshtein distance, finds the
        shortest path in a grid, solves the towers of Hanoi, plays rock-paper-scissors, draws a
        triangle of stars, converts binary to decimal, counts the lines of all files in a folder,
        downloads a page and lists its links, caches the results of a slow function, splits a bill
        with tip, implements a queue with two stacks, checks a sudoku row, compresses a string by
        run lengths, finds the intersection of two lists, shuffles a deck of cards, formats seconds
        as hours and minutes"""),
    "concept": listed("""
        recursion, a hash table, a linked list, big-O notation, a pointer, inheritance, a
        closure, an interface, a race condition, unit testing, version control, a REST API, a
        database index, a regular expression, garbage collection, dynamic programming, a binary
        tree, an exception, type checking, a virtual environment, a deadlock, a decorator, lazy
        evaluation, the difference between a list and a tuple, the difference between a process
        and a thread"""),
    "table": listed("""
        books(id - title - author - year), orders(id - customer - amount - day), employees(id -
        name - salary - city), films(id - title - director - rating), flights(id - origin - target
        - minutes), pets(id - name - kind - age)"""),
    "query": listed("""
        counts the rows per group of your choice, finds the three largest values, lists all rows
        from the last year, finds duplicates, computes an average and sorts by it, selects rows
        whose name starts with A"""),
}

WRITING = lines("""
    Write a [short story|fable|scene|fairy tale] about {theme}[ in at most {words} words|].
    Write a [poem|limerick|haiku|sonnet|song text] about {theme}.
    Write the opening paragraph of a [mystery|fantasy|science fiction|historical|comic] novel about
        {theme}.
    Write a(n) [dialogue|argument] between {man} and {woman} about {theme}.
    Continue this story: {Woman} opened the door and saw {theme}.
    Write a diary entry of a(n) {job} from {town}, in which {theme} plays a part.
    Write a[ short|n informal| formal| friendly] email {message}.
    [Draft|Write] a letter {message}. Keep it [polite|brief|warm].
    Write an advertisement for {product}[ without any adjectives| aimed at students| in three
        sentences|].
    Write a product [description|review with four stars|review with two stars] for {product}.
    Write a [short|funny|moving] speech for {occasion}.
    Write a(n) [blog post|column|opinion piece] about {opinion}. [Begin with a question.|Use an
        example.|Stay neutral.]
    Write a persuasive paragraph [for|against] {opinion}.
    Suggest [five|seven|ten] titles for a [novel|film|podcast] about {theme}.
    Make an outline for a [blog post|talk|school essay] about {opinion}, with headings.
    Describe {theme} in [four|five|six] sentences, so that the reader can [hear|smell|see] it.
    Rewrite this sentence in [a formal|a poetic|a simple|an angry] style: "{Man} came home late
        because of {theme}."
    Write a social media post about {product}, with [an emoji-free joke|a call to action|a rhyme].
    Write instructions for {theme}, as if it were a board game.
    Write a [travel report|postcard] from {town} in which {theme} surprises you.""")

ROLEPLAY = lines("""
    Pretend to be {role}. {prompt}
    You are {role}. [Stay in character.|Answer in three sentences.|Use short sentences.] {prompt}
    Let us play a scene: you are {role}, and I am {role2}. You begin.
    Act as {role} and introduce yourself to [a group of children|me|a suspicious stranger].
    Imagine that you are {role}. How would you react to {theme}?
    Speak like {role} from now on. First question: {prompt}
    I want you to be {role}. I will be a customer. I say: "{prompt}" """)

PROGRAMS = lines("""
    Write a [function|program] in {language} that {task}.
    Write a {language} function that {task}. [Add comments.|Add a docstring and an example.|Handle
        empty input.]
    [How do I write|Show me] a {language} program that {task}?
    Write a Python function that {task}, [with type hints|without using any library|in as few lines
        as possible].
    Write three unit tests for a Python function that {task}.
    Explain step by step how one could write a program that {task}. Use pseudocode.
    What is the [time|memory] complexity of code that {task}? Give code and reasons.
    Given the SQL table {table}, write a query that {query}.
    Write a small HTML page [about|that shows a button for] {product}[ with some CSS| and a bit of
        JavaScript|].
    My {language} program {task}, but it is too slow. What should I look for?""")

CONCEPTS = lines("""
    Explain {concept} [to a beginner|with a small code example|with an analogy].
    When should I care about {concept}? Show a short example in {language}.
    What is {concept}, and which mistakes do beginners make with it?
    I have a job interview tomorrow. What should I know about {concept}?""")

AGAIN = lines("""
    Rewrite your previous answer [as a poem|in the style of a news report|in half as many words|for
        children].
    Now make it [funnier|more formal|sadder|more vivid].
    Change the ending.
    What would you improve in your own text?
    Write it again, but start every sentence with a different letter.
    Continue with the next part.""")
REVISE = lines("""
    Now write it in [Java|Python|JavaScript|Rust].
    Can you make it [faster|shorter|easier to read]?
    What happens with empty or wrong input? Improve it.
    Explain the code line by line.
    Add [tests|logging|error handling|a command line].""")
DEEPER = lines("""
    Show another example.
    When would that be a bad idea?
    Which tool or library helps with this?
    Put the main point into one sentence.""")


def _tasks(
    writer: Writer, patterns: tuple[str, ...], follow_ups: tuple[str, ...], share: float
) -> list[str]:
    """One filled pattern, with a second turn in this share of the cases."""
    task = writer.fill(writer.one(patterns), words=writer.number(80, 250, 10)).strip()
    return [task, writer.fill(writer.one(follow_ups))] if writer.chance(share) else [task]


def writing(writer: Writer) -> list[str]:
    """A text to write or rewrite."""
    return _tasks(writer, WRITING, AGAIN, 0.3)


def roleplay(writer: Writer) -> list[str]:
    """A character to speak as; the second turn is another question to the same character."""
    return _tasks(writer, ROLEPLAY, LISTS["prompt"], 0.4)


def coding(writer: Writer) -> list[str]:
    """A small program, a query or a page; one in five asks for an explanation instead."""
    if writer.chance(0.2):
        return _tasks(writer, CONCEPTS, DEEPER, 0.3)
    return _tasks(writer, PROGRAMS, REVISE, 0.3)
