"""General questions: several hundred topics of eight fields, and short factual questions.

A question is a pattern of the topic's field with the topic in it; every fifth has a follow-up
turn. The short questions ask for one fact about the real world; a few patterns times lists.
"""

from outrider.data.prompts.writer import Writer, lines, listed

FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "phenomena": (
        listed("""
            rainbows, tides, thunder, earthquakes, volcanic eruptions, ocean currents, the northern
            lights, fog, hail, dew, tornadoes, monsoon winds, glacier movement, soil erosion, cave
            formation, fossilization, coral bleaching, bird migration, hibernation, pollination,
            seed dispersal, camouflage in animals, echolocation, bioluminescence, natural
            selection, symbiosis, fermentation, decomposition, the nitrogen cycle, osmosis, cell
            division, protein folding, muscle contraction, blood clotting, the immune response,
            digestion, hearing, color vision, sleep, hiccups, fever, radioactive decay, nuclear
            fusion, static electricity, electromagnetic induction, friction, buoyancy, surface
            tension, capillary action, refraction, resonance, the Doppler effect, heat conduction,
            evaporation, crystal growth, rusting, combustion, soap cleaning, catalysis, acid rain,
            the greenhouse effect, solar eclipses, the phases of the moon, the seasons, black
            holes, star formation, meteor showers, comets, gravity, time dilation, plate tectonics,
            El Nino, desertification, wildfires, mirages, lightning"""),
        lines("""
    Explain the science behind {topic} in simple terms.
    What causes {topic}?
    Explain {topic} to [a curious eight-year-old|a high school student|someone without any science
        background].
    What are common misconceptions about {topic}?
    Which open questions do scientists still have about {topic}?
    Give [three|four|five] [surprising|interesting] facts about {topic}.
    How do scientists [measure|study] {topic}?
    I have always wondered about {topic}. What is behind [it|this]?
    Explain {topic} with an everyday analogy, and say where the analogy fails."""),
    ),
    "technology": (
        listed("""
            the bicycle, the sewing machine, the printing press, the steam engine, the
            refrigerator, the microwave oven, the electric motor, the battery, the solar panel, the
            wind turbine, the heat pump, the light bulb, the camera, the telescope, the microscope,
            the laser, the compass, the mechanical clock, the telephone, the radio, radar, GPS
            navigation, the elevator, the escalator, the airplane wing, the helicopter, the
            submarine, the jet engine, the suspension bridge, the canal lock, the water mill, the
            nuclear power plant, the hydroelectric dam, the 3D printer, the touchscreen, the
            barcode, the QR code, the hard disk, the solid-state drive, the transistor, the web
            browser, the search engine, email, public-key encryption, the blockchain, cloud
            computing, the database, machine learning, speech recognition, the recommendation
            system, the self-driving car, the drone, magnetic resonance imaging, X-ray imaging, the
            pacemaker, the hearing aid, the vaccine, water purification, the smoke detector, the
            vacuum cleaner, the noise-cancelling headphone, the fiber-optic cable, the pressure
            cooker"""),
        lines("""
    How does {topic} work?
    Who developed {topic}, and which problem did it solve?
    How has {topic} changed everyday life?
    What are the [strengths and weaknesses|advantages and drawbacks] of {topic}?
    Describe the main [parts|components] of {topic} and what each of them does.
    What might {topic} look like in fifty years?
    Explain {topic} as if you were [a museum guide|an engineer talking to a child|writing a
        leaflet].
    Give a short history of {topic}."""),
    ),
    "history": (
        listed("""
            the fall of the Western Roman Empire, the Bronze Age collapse, the building of the
            Great Wall, the Silk Road, the Viking voyages, the Norman conquest of England, the
            Crusades, the Black Death, the Mongol Empire, the Mali Empire, the Inca Empire, the
            Ottoman conquest of Constantinople, the Renaissance, the Reformation, the voyages of
            Zheng He, the Columbian exchange, the Dutch tulip mania, the Thirty Years' War, the
            Enlightenment, the Industrial Revolution, the American Revolution, the French
            Revolution, the Haitian Revolution, the Congress of Vienna, the Irish Famine, the
            revolutions of 1848, the abolition of slavery, the Meiji Restoration, the California
            Gold Rush, the building of the Suez Canal, the Scramble for Africa, the First World
            War, the Russian Revolution, the Spanish flu, the Great Depression, the partition of
            India, the Marshall Plan, the Berlin Airlift, the Cuban Missile Crisis, the space race,
            the moon landing, the civil rights movement, the fall of the Berlin Wall, the end of
            apartheid, the founding of the European Union, women's suffrage, the invention of
            writing, the domestication of the horse, the spread of agriculture, the Hanseatic
            League, the Golden Age of Athens, the reign of Cleopatra, the journey of Marco Polo,
            the Trans-Siberian Railway"""),
        lines("""
    What were the main causes of {topic}?
    [Why|How] did {topic} matter for the people who lived at the time?
    Summarize {topic} in [three|five] sentences.
    How do historians know what they know about {topic}?
    What are the lasting [consequences|effects] of {topic}?
    Give a short timeline of {topic}.
    Which persons played a leading part in {topic}, and what did they do?
    Tell me about {topic} as [a storyteller would|a teacher would|a radio documentary would]."""),
    ),
    "places": (
        listed("""
            Iceland, Patagonia, the Sahara, the Amazon basin, the Alps, the Himalayas, the Great
            Barrier Reef, Madagascar, New Zealand, Japan, Vietnam, Morocco, Ethiopia, Kenya, Egypt,
            Turkey, Georgia, Portugal, Norway, Finland, Scotland, Ireland, Poland, Greece, Sicily,
            Venice, Vienna, Prague, Istanbul, Kyoto, Seoul, Mumbai, Cairo, Cape Town, Lagos, Buenos
            Aires, Lima, Mexico City, Havana, Montreal, New Orleans, Alaska, the Grand Canyon,
            Yellowstone, Lake Baikal, the Dead Sea, the Danube, the Nile, the Mekong, Antarctica,
            the Galapagos Islands, Mongolia, Nepal, Samarkand"""),
        lines("""
    What is {topic} [best ]known for?
    Describe the climate and landscape of {topic}.
    Plan a [three|five|seven]-day trip to {topic} for [a family with children|two friends|a solo
        traveler].
    Which foods should a visitor to {topic} try?
    How has geography shaped the history of {topic}?
    What should I know about customs before I travel to {topic}?
    Name some animals and plants that one finds in {topic}.
    Which environmental problems does {topic} face?"""),
    ),
    "household": (
        listed("""
            remove a coffee stain from a carpet, descale a kettle, sharpen a kitchen knife, unclog
            a sink, repot a houseplant, fix a flat bicycle tire, paint a room, hang a heavy
            picture, start a compost heap, grow tomatoes on a balcony, get rid of fruit flies,
            store potatoes, make sourdough bread, cook rice without a rice cooker, brew green tea,
            iron a shirt, sew on a button, wash a wool sweater, pack a suitcase, fold a fitted
            sheet, clean a cast-iron pan, save electricity at home, lower a heating bill, plan
            meals for a week, keep a budget, prepare for a job interview, write a resume, ask for a
            raise, apologize to a friend, learn a language, remember names, read faster, prepare
            for an exam, take good notes, stop procrastinating, wake up early, start running,
            improve posture, sleep better, train a puppy, introduce two cats, choose a first
            instrument, organize a birthday party, split chores in a shared flat, welcome new
            neighbors, give a speech, take better photos, choose a bicycle, prepare for a power
            cut, clean windows without streaks, water plants during a holiday, teach a child to
            swim"""),
        lines("""
    How do I {topic}?
    What is the [best|easiest|cheapest] way to {topic}?
    I have never done this before: how can I {topic}? Give me step-by-step instructions.
    What mistakes do people make when they try to {topic}?
    List what I need to {topic}, and then the steps.
    My roommate wants to {topic}. What advice would you give?
    Give me [five|six|seven] tips on how to {topic}."""),
    ),
    "health": (
        listed("""
            high blood pressure, iron deficiency, vitamin D, dietary fiber, dehydration, migraine,
            back pain, seasonal allergies, asthma, type 2 diabetes, cholesterol, the common cold,
            food poisoning, sunburn, concussions, sprained ankles, insomnia, jet lag, stress,
            burnout, anxiety before exams, loneliness, screen time, caffeine, sugar, salt, alcohol,
            intermittent fasting, a vegetarian diet, strength training, stretching, walking every
            day, meditation, good posture, hearing loss, dental care, eye strain, first aid for
            burns, antibiotics, painkillers, gut bacteria, snoring"""),
        lines("""
    What should everyone know about {topic}?
    What does science say about {topic}?
    Explain the effects of {topic} on the [body|daily life of a person].
    Which myths about {topic} are widespread, and what is true?
    When should somebody ask a doctor about {topic}?
    Write a short leaflet on {topic} for [teenagers|older people|new parents].
    Ask me three questions about {topic} that a [nurse|coach] would ask, and say why each
        matters."""),
    ),
    "ideas": (
        listed("""
            inflation, supply and demand, comparative advantage, unemployment, central banks,
            compound interest, insurance, the stock market, public goods, monopolies, taxes,
            universal basic income, globalization, microcredit, democracy, the separation of
            powers, federalism, constitutional monarchy, freedom of speech, human rights,
            propaganda, nationalism, civil disobedience, utilitarianism, stoicism, existentialism,
            the social contract, free will, the trolley problem, confirmation bias, the placebo
            effect, peer pressure, groupthink, the bystander effect, memory, intelligence,
            motivation, language acquisition, bilingualism, dialects, writing systems, translation,
            rhetoric, irony, metaphor, tragedy in ancient Greece, the novel, haiku, fairy tales,
            myths of creation, oral tradition, impressionism, cubism, Gothic architecture,
            perspective in painting, baroque music, jazz, folk songs, opera, the game of chess,
            street art, public libraries, museums, urban planning, tourism, advertising,
            friendship, prime numbers, infinity, probability, the golden ratio, game theory, logic,
            statistics, graphs, encryption keys"""),
        lines("""
    What is meant by {topic}?
    Explain {topic} [and give an example|with two concrete examples].
    What are the main arguments [for and against|about] {topic}?
    How did thinking about {topic} change over time?
    Why should [ordinary people|young people|anyone today] care about {topic}?
    What would a critic say about {topic}?
    Discuss {topic} in one paragraph for a [school newspaper|textbook|podcast].
    How would you teach a lesson on {topic}? Give an outline."""),
    ),
    "nature": (
        listed("""
            octopuses, honeybees, ants, elephants, wolves, crows, owls, penguins, hummingbirds,
            sharks, blue whales, dolphins, sea turtles, salmon, eels, jellyfish, corals, frogs,
            crocodiles, chameleons, snakes, bats, beavers, hedgehogs, kangaroos, camels, reindeer,
            polar bears, tigers, gorillas, sloths, butterflies, fireflies, spiders, earthworms, oak
            trees, bamboo plants, cacti, mosses, ferns, mushrooms, lichens, orchids, carnivorous
            plants, mangroves, seagrasses, wheat plants, rice plants, potatoes, coffee plants,
            cocoa trees, cotton plants, yeasts, bacteria, viruses, dinosaurs, mammoths"""),
        lines("""
    How do {topic} [survive|live|reproduce]?
    What makes {topic} special?
    Why are {topic} important [for their ecosystem|to people]?
    What do most people not know about {topic}?
    Describe a day, or a season, in the life of {topic}.
    Are {topic} in danger, and what can be done about it?
    Write [four|five|six] quiz questions about {topic}, with answers.
    How have {topic} changed in the course of evolution?"""),
    ),
}

FOLLOW_UPS = lines("""
    Now say it again in [two sentences|one sentence|fifty words].
    Can you give a concrete example?
    What is the most common objection to what you said?
    Which part of your answer are you least sure about?
    Turn your answer into [a short poem|a list of bullet points|a dialogue between two friends].
    Explain it once more for [a five-year-old|an expert|someone who speaks little English].
    What should I read or try next to learn more?""")

QUICK = {
    "country": listed("""
        France, Canada, Brazil, Kenya, Norway, Peru, Thailand, Hungary, Nigeria, Chile, Austria,
        Cuba, Ghana, Iran, Laos, Mexico, Nepal, Oman, Poland, Qatar, Romania, Senegal, Tunisia,
        Uganda, Vietnam, Zambia, Australia, Belgium, Croatia, Denmark, Ecuador, Finland, Greece,
        India, Jordan, Latvia, Malaysia, Portugal, Spain, Sweden, Ukraine, Uruguay"""),
    "element": listed("""
        gold, silver, iron, copper, sodium, potassium, lead, tin, mercury, helium, neon, carbon,
        nitrogen, calcium, tungsten, zinc, nickel, silicon, sulfur, chlorine, magnesium, aluminum,
        uranium, titanium, iodine"""),
    "book": listed("""
        Frankenstein, Moby-Dick, Middlemarch, Don Quixote, The Odyssey, Anna Karenina, Dracula,
        Jane Eyre, Emma, Robinson Crusoe, Gulliver's Travels, The Time Machine, Treasure Island,
        Faust, Les Miserables, Candide, Ulysses, Great Expectations, The Trial, Little Women, The
        Jungle Book, Peter Pan, Heidi, Madame Bovary, The Iliad"""),
    "invention": listed("""
        the telephone, dynamite, the lightning rod, the safety razor, the World Wide Web,
        penicillin, the zipper, the piano, the parachute, the barometer, the saxophone, the steam
        locomotive, the ballpoint pen, the typewriter, the X-ray, the smallpox vaccine, the diesel
        engine, the hot-air balloon, the phonograph, the periodic table, Braille, Esperanto"""),
    "event": listed("""
        the French Revolution, World War One, World War Two, the American Civil War, the first moon
        landing, the Korean War, the fall of the Berlin Wall, the Great Fire of London, the battle
        of Waterloo, the Chernobyl accident, the first modern Olympic Games, the sinking of the
        Titanic, the signing of Magna Carta, the Boston Tea Party, the eruption that buried
        Pompeii, the first powered flight, the Wall Street crash, the discovery of insulin"""),
    "landmark": listed("""
        Machu Picchu, the Taj Mahal, Petra, Angkor Wat, Stonehenge, the Parthenon, Mount
        Kilimanjaro, the Colosseum, the Alhambra, Uluru, Mount Fuji, the Hagia Sophia, Niagara
        Falls, Victoria Falls, Lake Titicaca, the Kremlin, the Acropolis, Table Mountain, the Blue
        Mosque, Loch Ness, the Matterhorn, the Bosporus, Easter Island, Timbuktu"""),
    "short": listed("""
        DNA, NASA, UNESCO, GDP, HTML, CPU, RAM, LED, RNA, URL, FAQ, PDF, USB, ATM, MRI, OPEC, WHO,
        NATO, SQL, CEO, UV, HIV"""),
    "whole": listed("""
        bones are in the adult human body, chambers does the human heart have, strings does a
        violin have, keys does a piano have, legs does a spider have, players are on a baseball
        team, continents are there, moons does Mars have, sides does a hexagon have, squares are on
        a chessboard, planets are in the solar system, days does a leap year have, minutes are in a
        day, ounces are in a pound, letters does the Greek alphabet have, teeth does an adult have,
        time zones does Russia have, degrees are in a circle, feet are in a mile, players are on a
        volleyball team, stars are on the flag of China, symphonies did Beethoven write, hearts
        does an octopus have, wives did Henry the Eighth have"""),
}
QUICK_PATTERNS = lines("""
    [What is the capital of|Which is the capital city of] {country}?
    Which [language|languages] do people speak in {country}?
    Which countries share a border with {country}?
    What is the currency of {country}?
    What is the chemical symbol for {element}?
    What is {element} used for?
    [Who wrote|Who is the author of] {book}?
    What is the plot of {book} in one sentence?
    [Who invented|Who came up with] {invention}?
    When was {invention} invented or discovered?
    When did {event} happen?
    Where did {event} take place?
    [Where is|In which country is] {landmark}?
    Why is {landmark} famous?
    What does {short} stand for?
    How many {whole}?""")


def general(writer: Writer) -> list[str]:
    """One question on one topic; every fifth has a second turn."""
    topics, patterns = FIELDS[writer.one(tuple(FIELDS))]
    question = writer.fill(writer.one(patterns), topic=writer.one(topics))
    return [question, writer.fill(writer.one(FOLLOW_UPS))] if writer.chance(0.2) else [question]


def quick(writer: Writer) -> list[str]:
    """A question with a short factual answer; some without capitals, as people type them."""
    question = writer.fill(writer.one(QUICK_PATTERNS))
    if writer.chance(0.25):
        return [question.lower().rstrip("?")]
    if writer.chance(0.25):
        return [writer.fill("[Answer in one sentence|Quick question|For a quiz]: ") + question]
    return [question]
