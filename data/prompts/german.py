"""German sentences to translate, by a small grammar in the style of news and prose.

The one module that is not ASCII: German needs its umlauts. Verbs, cases and genders agree
because each pattern fixes them: a slot's name says case and gender where that matters, e.g.
`{der}` is a person or body in the nominative singular with its article.
"""

from outrider.data.prompts.writer import Writer, lines, listed

LISTS = {
    "der": listed("""
        der Minister, die Sprecherin, der Bürgermeister, die Präsidentin, der Trainer, die
        Richterin, der Vorstand, die Regierung, die Polizei, die Gewerkschaft, der Verein, die
        Opposition, das Unternehmen, der Betreiber, die Stadtverwaltung, das Gericht, die
        Forscherin, der Landwirt, die Ärztin, der Schulleiter, die Kommission, das Krankenhaus, die
        Feuerwehr, der Verband, die Botschafterin, der Wirt, die Nachbarin, der Kapitän"""),
    "dem": listed("""
        dem Ausschuss, dem Publikum, der Zeitung, dem Vertreter der Bahn, der Delegation, dem
        Nachbarland, der Familie, dem Gremium, der Behörde, dem Ausland, der Gemeinde, dem
        Kollegen, der Presse"""),
    "den": listed("""
        den Vorschlag, die Reform, das Abkommen, den Vertrag, die Kritik, den Plan, die Erhöhung
        der Preise, das Urteil, den Umbau des Bahnhofs, die Schließung der Fabrik, das neue Gesetz,
        den Bericht, die Pläne für den Flughafen, die Vorwürfe, den Rücktritt des Direktors, die
        Ausstellung, den Bau der Brücke, die Ergebnisse der Studie"""),
    "verteidigte": listed("""
        verteidigte, kritisierte, begrüßte, unterstützte, verschob, prüfte, verurteilte,
        erläuterte, lobte, bedauerte"""),
    "zeit": listed("""
        am Montag, am Dienstagabend, am frühen Morgen, in der Nacht zum Sonntag, vor drei Wochen,
        im vergangenen Herbst, kurz vor Mitternacht, nach langen Verhandlungen, am Ende des Jahres,
        während der Sitzung, im Laufe des Tages"""),
    "ort": listed("""
        in der Hauptstadt, in einem Vorort von Leipzig, an der Nordseeküste, im Schwarzwald, in der
        Nähe von Graz, auf dem Marktplatz, in einem kleinen Dorf in Tirol, im Norden des Landes, am
        Rande der Altstadt, in Rotterdam, auf einem Bauernhof bei Ulm, im Hafen von Rostock, an der
        Grenze zu Polen, in den Bergen, vor dem Rathaus"""),
    "grund": listed("""
        wegen des starken Regens, trotz der hohen Kosten, aus Angst vor neuen Schulden, wegen
        eines technischen Fehlers, auf Druck der Wähler, aus gesundheitlichen Gründen, trotz
        aller Warnungen, mangels Beweisen, wegen des Mangels an Fachkräften, infolge des langen
        Streiks"""),
    "dass": listed("""
        die Kosten weiter steigen würden, niemand verletzt worden sei, man aus den Fehlern gelernt
        habe, die Zahl der Besucher deutlich zugenommen habe, es keine Alternative gebe, die
        Arbeiten bald beginnen könnten, das Wasser nicht trinkbar sei, der Zug künftig jede Stunde
        fahren solle, die Mieten zu hoch seien, das Museum im Mai wieder öffne, viele junge Leute
        die Region verließen, der Winter mild bleiben werde, die Ursache des Brandes noch unklar
        sei, mehr Lehrer eingestellt werden müssten"""),
    "zahl": listed("""
        zwölf, zwanzig, rund fünfzig, mehr als hundert, etwa dreihundert, fast tausend, über
        viertausend, knapp achtzig, mindestens fünfzehn, mehrere Dutzend"""),
    "leute": listed("""
        Menschen, Schüler, Arbeiter, Anwohner, Touristen, Fans, Studenten, Freiwillige, Ärzte,
        Radfahrer, Rentner, Demonstranten, Musiker, Soldaten, Familien"""),
    "taten": listed("""
        mussten ihre Häuser verlassen, protestierten gegen die Sparpläne, warteten stundenlang
        auf einen Zug, feierten bis in den Morgen, suchten nach dem vermissten Hund,
        unterschrieben einen offenen Brief, halfen bei den Aufräumarbeiten, verloren ihren
        Arbeitsplatz, saßen in der Seilbahn fest, kamen zur Eröffnung des neuen Theaters,
        sammelten Spenden für die Opfer"""),
    "sache": listed("""
        die Inflation, die Zahl der Unfälle, der Umsatz, die Nachfrage nach Wohnungen, der
        Wasserstand, der Ölpreis, die Arbeitslosigkeit, der Export, die Beteiligung an der Wahl,
        der Verbrauch von Strom, die Lebenserwartung"""),
    "stieg": listed("stieg, sank, wuchs, fiel, erhöhte sich, verringerte sich"),
    "figur": listed("""
        der alte Fischer, die junge Lehrerin, der Uhrmacher, das kleine Mädchen, der Fremde, meine
        Großmutter, der Briefträger, die Witwe, der Student aus Wien, mein Bruder, die Köchin, der
        Gärtner, der müde Arzt"""),
    "erzählt": listed("""
        öffnete langsam die Tür, blickte lange aus dem Fenster, sagte kein einziges Wort, lachte
        plötzlich laut auf, zog einen zerknitterten Brief aus der Tasche, ging ohne Gruß davon,
        zündete eine Kerze an, dachte an den Sommer am See, setzte sich auf die Bank vor dem Haus,
        schüttelte nur den Kopf"""),
    "als": listed("""
        als die Glocken läuteten, während draußen der Schnee fiel, bevor die anderen erwachten, als
        sei nichts geschehen, obwohl es schon spät war, weil niemand sonst gekommen war, nachdem
        der letzte Zug abgefahren war, ohne den Hund zu bemerken, als wollte die Nacht nicht enden,
        obwohl der Wind immer stärker wurde"""),
    "urteil": listed("""
        eine gefährliche Entwicklung, ein Schritt in die richtige Richtung, eine große Chance für
        die Region, ein Zeichen der Schwäche, eine Frage der Gerechtigkeit, das Ergebnis
        jahrelanger Arbeit, reine Verschwendung"""),
}

SENTENCES = lines("""
    {Der} {verteidigte} {zeit} {den}.
    {Zeit} {verteidigte} {der} {ort} {den}, [ohne Einzelheiten zu nennen|obwohl viele Fragen offen
        sind].
    {Der} teilte {dem} {zeit} mit, dass {dass}.
    {Der} betonte, dass {dass}, und verwies auf {den}.
    {Der} erklärte, dass {dass}[ - eine Behauptung, die {der2} bestreitet| und dass {dass2}].
    Nach Angaben der Behörden wurden {zeit} {ort} {zahl} {leute} in Sicherheit gebracht.
    {Zahl} {leute} {taten}, [berichtete {der}|wie {der} {zeit} mitteilte|obwohl {der} davor gewarnt
        hatte].
    {Zahl} {leute} {taten}, nachdem {der} {den} {grund} gestoppt hatte.
    {Sache} {stieg} im vergangenen Jahr um {prozent} Prozent und damit [stärker|weniger] als
        erwartet.
    Während {sache} in diesem Jahr [stieg|sank], blieben die Löhne [fast unverändert|weit zurück].
    Im Jahr {jahr} lag {sache} noch deutlich [höher|niedriger], wie {der} {dem} sagte.
    {Grund} {verteidigte} {der} {den}, doch {der2} spricht von [einem Fehler|einem Erfolg|leeren
        Versprechen].
    „Das ist {urteil}“, sagte {der} {zeit} {ort}.
    „Wir können nicht länger warten“, erklärte {der}, „denn {sache} ist [kaum noch zu erklären|unser
        größtes Problem].“
    {Figur} {erzählt}, {als}.
    {Figur} {erzählt}, {als}, und {figur2} {erzählt2}.
    Es war {zeit}, als {figur} zum ersten Mal von der Sache hörte; da war es längst zu spät.
    Ob {der} {den} wirklich kannte, ist bis heute [nicht geklärt|umstritten].
    Hätte {der} früher gehandelt, so {der2}, wäre das alles nicht nötig gewesen.
    Wer {ort} lebt, weiß, wie schnell sich das Wetter [dort |]ändern kann.
    Die Straße {ort} bleibt {grund} bis auf Weiteres gesperrt.
    Im Streit um {den} haben sich {der} und {der2} {zeit} geeinigt.
    {Figur} hatte {jahre} Jahre {ort} gelebt, ohne je [das Meer gesehen|ein Buch gelesen|davon
        erzählt] zu haben.
    Bei einem [Unfall|Brand|Unwetter] {ort} sind {zeit} {zahl} {leute} leicht verletzt worden.
    Das Spiel endete {jahre} zu [eins|zwei|null], weil {figur} kurz vor Schluss noch traf.
    Mit {prozent} Prozent der Stimmen wurde {figur} {zeit} in den [Stadtrat|Landtag] gewählt.
    [Man sagt|Es heißt|In der Stadt erzählt man], {figur} habe {ort} einen Schatz vergraben.
    Der Film über {leute} {ort} läuft seit dieser Woche im Kino und hat bereits {zahl} Zuschauer
        gefunden.
    Viele Eltern fragen sich, ob {dass}, und warten auf eine Antwort.
    Niemand ahnte, dass {figur} {zeit} zurückkehren würde.""")

ASKS = lines("""
    Translate German to English: {text}
    Translate to English: {text}
    [Please translate|Translate] [this sentence|the following German text] into English.\\n\\n{text}
    What does this mean in English? „{text}“
    {text}\\n\\nTranslate the German text above into [natural |idiomatic |]English.""")

LISTS["prozent"] = tuple(str(share) for share in range(2, 60))
LISTS["jahr"] = tuple(str(year) for year in range(1955, 2020, 3))
LISTS["jahre"] = listed("zwei, drei, vier, fünf, sechs, sieben")


def translation(writer: Writer) -> list[str]:
    """One or two German sentences; some with spaces before the stops, as news corpora have them."""
    count = 2 if writer.chance(0.3) else 1
    text = " ".join(writer.fill(writer.one(SENTENCES)) for _ in range(count))
    if writer.chance(0.3):
        for stop in ",.;":
            text = text.replace(stop, f" {stop}")
    return [writer.fill(writer.one(ASKS).replace("\\n", "\n"), text=text)]
