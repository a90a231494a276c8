"""Word lists that several kinds of prompt share: people, places, things; all names invented.

A key is the slot's name in a template: `{fruit}` draws from `WORDS["fruit"]`. Things that can be
counted stand in the singular and take a regular plural.
"""

from outrider.data.prompts.writer import listed

WOMEN = listed("""
    Amira, Beatrix, Chiara, Dalia, Edda, Fenna, Greta, Hanako, Ines, Jocasta, Katya, Lumi,
    Mireille, Nadia, Odile, Petra, Quilla, Rosalind, Saskia, Tamsin, Ulrike, Vesna, Wanda, Ximena,
    Yasmin, Zelda, Anneke, Bronwen, Carmen, Dorothea, Elif, Freya, Gudrun, Helga, Ilse, Jolanta,
    Kirsten, Leonie, Maren, Noor, Oksana, Paloma, Ruta, Sunniva, Thandi, Ursula, Viola, Winnie,
    Yara, Zuzana""")
MEN = listed("""
    Anton, Bastian, Cyrus, Darius, Emeka, Fabian, Gustav, Hamid, Ivo, Jasper, Kofi, Lorenz, Matteo,
    Nils, Oskar, Pavel, Quentin, Rashid, Silas, Tobias, Umberto, Viktor, Wim, Xavier, Yannick,
    Zoltan, Aksel, Bruno, Cedric, Dmitri, Elias, Farid, Goran, Henrik, Ismael, Janus, Kenji, Linus,
    Marek, Nestor, Otto, Piet, Ruben, Stefan, Teodor, Ulf, Vasco, Wendell, Yusuf, Zeno""")
SURNAMES = listed("""
    Abernall, Brackwell, Castellow, Dunmarsh, Eastlake, Fennimore, Garrowby, Hollister, Ivarsen,
    Jarrold, Kestrel, Lindqvist, Marchetti, Norwood, Okonjo, Pellworth, Quarrie, Ravensby, Solberg,
    Tamura, Underhay, Vanterpool, Wexcombe, Yarrow, Zielonka, Ashgrove, Birkett, Calloway,
    Delacroix, Elmsworth, Farrant, Grenfell, Halvorsen, Iddison, Jessop, Kaminski, Lockridge,
    Mbeki, Nakata, Ostrander, Prewitt, Rosenthal, Sandoval, Thackeray, Ullmann, Varga, Whitlock,
    Yamada, Zeller, Brandt""")
TOWNS = tuple(
    start + end
    for start in listed("""
        Alder, Bram, Corrin, Dun, Ester, Fal, Gren, Haver, Kel, Lang, Mar, Nor, Oak, Pel, Quern,
        Rus, Stan, Thorn, Wex, Yar""")
    for end in listed("ford, wick, mouth, by, stead, combe, haven, bridge")
)
REGIONS = listed("""
    the Lower Marches, Kessel County, the Arlen Valley, North Tarrow, the Pelham Coast, Ostmark
    Province, the Brennick Hills, Vale County, the Seven Lakes district, Harrow Island, the
    Sorrel Plains, Upper Dell, the Calder Peninsula, West Lindsey, the Moorland district,
    Tolland County""")

WORDS = {
    "woman": WOMEN,
    "man": MEN,
    "surname": SURNAMES,
    "person": ("{woman} {surname}", "{man} {surname}"),
    "town": TOWNS,
    "region": REGIONS,
    "fruit": listed("""
        apple, pear, plum, orange, lemon, apricot, fig, mango, melon, kiwi, lime, banana"""),
    "vegetable": listed("""
        carrot, cabbage, pumpkin, onion, turnip, leek, cucumber, beetroot, zucchini"""),
    "treat": listed("""
        muffin, cookie, pretzel, cupcake, doughnut, waffle, brownie, scone, bagel, tart"""),
    "toy": listed("marble, sticker, trading card, toy car, puzzle, kite, yo-yo, model plane, doll"),
    "animal": listed("goat, duck, hen, rabbit, donkey, pony, alpaca, turkey, cow, llama, pig"),
    "flower": listed("""
        tulip, rose, daisy, sunflower, orchid, lily, dahlia, marigold, violet, crocus"""),
    "garment": listed("scarf, shirt, sweater, jacket, hat, skirt, apron, vest, raincoat, blanket"),
    "item": listed("""
        notebook, pencil, eraser, folder, marker, ruler, paintbrush, glue stick, stapler"""),
    "drink": listed("""
        lemonade, apple juice, iced tea, orange juice, cocoa, ginger beer, milk, coffee"""),
    "craft": listed("""
        candle, basket, bracelet, clay bowl, birdhouse, wooden spoon, lantern, picture frame"""),
    "media": listed("novel, comic, magazine, cookbook, travel guide, atlas, poetry book, songbook"),
    "furniture": listed("chair, table, bookcase, bench, lamp, desk, stool, wardrobe, mirror, rug"),
    "shop": listed("""
        bakery, toy store, garden center, corner shop, craft fair, market stall, gift shop"""),
    "sport": listed("""
        soccer, basketball, handball, hockey, volleyball, rugby, water polo, badminton"""),
    "weekday": listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "month": listed("""
        January, February, March, April, May, June, July, August, September, October, November,
        December"""),
    "relative": listed("brother, sister, cousin, neighbor, best friend, classmate, uncle, aunt"),
    "color": listed("red, blue, green, yellow, purple, white, black, orange, silver, brown"),
    "job": listed("""
        baker, plumber, librarian, nurse, carpenter, gardener, teacher, bus driver, tailor,
        electrician, beekeeper, dentist, painter, photographer, sailor, watchmaker"""),
    "liquid": listed("water, paint, cooking oil, syrup, fuel, rainwater, soup, vinegar"),
}
