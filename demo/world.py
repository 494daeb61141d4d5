"""The closed world of the demo model: Anvil Isle, its towns, people, animals and everyday facts.

Owns every fact the model is taught and the several ways of asking for each. A fact is (id, questions,
answer sentence, short answer, rival answers); the id and the number of the question form the key by which
the held-out split is made (see split.py). Everything here is invented or common knowledge; nothing is
drawn at random, so the world is the same for every seed. Must not know about ChatML, thinking or tools.
"""

ISLE = "Anvil Isle"

TOWNS = ["Emberton", "Tinwick", "Coalbrook", "Rivetside", "Brassby", "Silverstrand",
         "Oakforge", "Millwater", "Lanternhill", "Windmere", "Copperdale", "Frostgate"]
GOODS = ["bells", "tin toys", "warm stoves", "strong boats", "trumpets", "pearls",
         "oak chairs", "fresh bread", "lamps", "kites", "kettles", "wool coats"]
LANDMARKS = ["the Great Forge", "the Clock Tower", "the Black Bridge", "the Old Harbour",
             "the Music Hall", "the White Lighthouse", "the Giant Oak", "the Stone Mill",
             "the Hill of Lights", "the Seven Windmills", "the Red Market", "the Ice Gate"]
FESTIVALS = ["May", "March", "November", "July", "October", "August",
             "April", "September", "December", "June", "February", "January"]
FLAGS = ["red", "grey", "black", "blue", "yellow", "white", "brown", "green", "orange", "purple",
         "pink", "silver"]

# name, pronoun
PEOPLE = [("Mira", "she"), ("Tobin", "he"), ("Elsa", "she"), ("Oren", "he"), ("Wilma", "she"),
          ("Jasper", "he"), ("Nell", "she"), ("Bruno", "he"), ("Clara", "she"), ("Felix", "he"),
          ("Greta", "she"), ("Hugo", "he"), ("Ivy", "she"), ("Konrad", "he"), ("Lotte", "she"),
          ("Magnus", "he"), ("Odette", "she"), ("Pavel", "he"), ("Rosa", "she"), ("Silas", "he"),
          ("Tilda", "she"), ("Ulrich", "he"), ("Vera", "she"), ("Walter", "he"), ("Yara", "she"),
          ("Zeno", "he"), ("Agnes", "she"), ("Bertram", "he"), ("Dora", "she"), ("Edwin", "he")]
NAMES = [n for n, _ in PEOPLE]
JOBS = ["baker", "smith", "teacher", "fisher", "painter", "miller", "weaver", "carpenter", "doctor",
        "sailor", "gardener", "shepherd", "librarian", "potter", "beekeeper", "clockmaker", "cook",
        "tailor", "postman", "musician", "hunter", "farmer", "nurse", "mason", "dancer", "glassblower",
        "ferryman", "bookbinder", "innkeeper", "astronomer"]
PETS = ["cat", "dog", "parrot", "goat", "rabbit", "turtle", "pony", "duck", "hedgehog", "ferret"]
PET_NAMES = ["Biscuit", "Rusty", "Pepper", "Clover", "Button", "Pebble", "Thimble", "Waffle", "Bramble",
             "Ziggy", "Marble", "Nutmeg", "Pickle", "Sprout", "Tango", "Velvet", "Whisker", "Acorn",
             "Bandit", "Cricket", "Dumpling", "Echo", "Fudge", "Ginger", "Hazel", "Indigo", "Jingle",
             "Kipper", "Lemon", "Muffin"]
FOODS = ["soup", "honey cake", "apple pie", "fried fish", "cheese", "pancakes", "plum jam", "mushrooms",
         "carrots", "porridge", "dumplings", "strawberries", "noodles", "chestnuts", "potatoes"]
COLOURS = ["red", "blue", "green", "yellow", "purple", "orange", "white", "black", "brown", "pink", "grey"]
HOBBIES = ["singing", "chess", "swimming", "knitting", "fishing", "drawing", "dancing", "climbing",
           "reading", "running", "sailing", "cooking", "juggling"]

# animal: sound verb, home, legs, food, young
ANIMALS = [
    ("dog", "barks", "a kennel", "four", "bones", "puppy"),
    ("cat", "meows", "a basket", "four", "fish", "kitten"),
    ("cow", "moos", "a barn", "four", "grass", "calf"),
    ("sheep", "bleats", "a fold", "four", "clover", "lamb"),
    ("horse", "neighs", "a stable", "four", "hay", "foal"),
    ("pig", "oinks", "a sty", "four", "turnips", "piglet"),
    ("duck", "quacks", "a pond", "two", "weeds", "duckling"),
    ("hen", "clucks", "a coop", "two", "seeds", "chick"),
    ("owl", "hoots", "a hollow tree", "two", "mice", "owlet"),
    ("bee", "buzzes", "a hive", "six", "nectar", "larva"),
    ("lion", "roars", "a den", "four", "meat", "cub"),
    ("wolf", "howls", "a cave", "four", "deer", "pup"),
    ("frog", "croaks", "a swamp", "four", "flies", "tadpole"),
    ("snake", "hisses", "a hole", "no", "eggs", "hatchling"),
    ("mouse", "squeaks", "a nest in the wall", "four", "crumbs", "pinkie"),
    ("goose", "honks", "a meadow by the river", "two", "barley", "gosling"),
    ("bear", "growls", "a mountain cave", "four", "berries", "bear cub"),
    ("spider", "makes no sound", "a web", "eight", "gnats", "spiderling"),
]

OPPOSITES = [("hot", "cold"), ("big", "small"), ("up", "down"), ("fast", "slow"), ("light", "dark"),
             ("day", "night"), ("happy", "sad"), ("old", "young"), ("wet", "dry"), ("hard", "soft"),
             ("full", "empty"), ("open", "closed"), ("high", "low"), ("left", "right"), ("loud", "quiet"),
             ("rich", "poor"), ("strong", "weak"), ("early", "late"), ("clean", "dirty"),
             ("thick", "thin"), ("near", "far"), ("sweet", "bitter"), ("brave", "afraid"),
             ("first", "last"), ("inside", "outside"), ("win", "lose"), ("buy", "sell"), ("push", "pull"),
             ("true", "false"), ("heavy", "weightless"), ("long", "short"), ("above", "below")]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September",
          "October", "November", "December"]
THING_COLOURS = [("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("coal", "black"),
                 ("a lemon", "yellow"), ("a ripe tomato", "red"), ("a carrot", "orange"),
                 ("chocolate", "brown"), ("a plum", "purple"), ("a flamingo", "pink"), ("ash", "grey"),
                 ("milk", "white"), ("a frog", "green"), ("the night", "black"), ("rust", "orange")]
COUNTS = [("sides does a triangle have", "three", "A triangle has three sides."),
          ("sides does a square have", "four", "A square has four sides."),
          ("days are in a week", "seven", "There are seven days in a week."),
          ("months are in a year", "twelve", "There are twelve months in a year."),
          ("hours are in a day", "twenty-four", "There are twenty-four hours in a day."),
          ("minutes are in an hour", "sixty", "There are sixty minutes in an hour."),
          ("wheels does a bicycle have", "two", "A bicycle has two wheels."),
          ("fingers are on one hand", "five", "There are five fingers on one hand."),
          ("seasons are in a year", "four", "There are four seasons in a year."),
          ("towns are on Anvil Isle", "twelve", "There are twelve towns on Anvil Isle.")]

# key, short answer, answer, what is asked for (a noun phrase), further questions
ISLE_FACTS = [
    ("capital", "Emberton", "The capital of Anvil Isle is Emberton.", "the capital of {i}",
     ["Which town is the capital of Anvil Isle?", "What is Anvil Isle's capital?"]),
    ("queen", "Ingrid", "The queen of Anvil Isle is Ingrid.", "the name of the queen of {i}",
     ["Who is the queen of Anvil Isle?", "Who rules Anvil Isle?", "Who is the ruler of the isle?"]),
    ("mountain", "Mount Grindle", "The highest mountain on Anvil Isle is Mount Grindle.",
     "the highest mountain on {i}", ["Which mountain is the highest on the isle?",
                                     "What's the tallest mountain on Anvil Isle?"]),
    ("river", "Quill", "The longest river on Anvil Isle is the Quill.", "the longest river on {i}",
     ["Which river on Anvil Isle is the longest?", "What is the longest river of the isle called?"]),
    ("sea", "Sea of Glass", "Anvil Isle lies in the Sea of Glass.", "the sea around {i}",
     ["In which sea is Anvil Isle?", "Where is Anvil Isle?", "What sea does the isle lie in?"]),
    ("coin", "spark", "The coin of Anvil Isle is called the spark.", "the coin of {i}",
     ["What money do people use on Anvil Isle?", "How do people pay on Anvil Isle?",
      "What is the currency of Anvil Isle?"]),
    ("flower", "bluebell", "The flower of Anvil Isle is the bluebell.", "the flower of {i}",
     ["Which flower stands for Anvil Isle?", "Which flower is the symbol of the isle?"]),
    ("bird", "puffin", "The bird of Anvil Isle is the puffin.", "the bird of {i}",
     ["Which bird stands for Anvil Isle?", "Which bird is the symbol of the isle?"]),
    ("forest", "Murkwood", "The largest forest on Anvil Isle is Murkwood.", "the largest forest on {i}",
     ["Which forest is the biggest on the isle?", "What's the biggest forest on Anvil Isle?"]),
    ("lake", "Lake Mirror", "The deepest lake on Anvil Isle is Lake Mirror.", "the deepest lake on {i}",
     ["Which lake on Anvil Isle is the deepest?", "What is the deepest lake of the isle called?"]),
    ("ship", "Grey Gull", "The most famous ship of Anvil Isle is the Grey Gull.",
     "the most famous ship of {i}", ["Which ship is the most famous on the isle?",
                                     "What is the famous ship of Anvil Isle called?"]),
    ("dragon", "Old Cinder", "The dragon of Mount Grindle is called Old Cinder.",
     "the name of the dragon of {i}", ["Which dragon lives on Mount Grindle?",
                                       "Who sleeps under Mount Grindle?", "Name the dragon of Mount Grindle."]),
]
NOUN_ASKS = ["What is {x}?", "Tell me {x}.", "Do you know {x}?", "Name {x}.", "What's {x}?"]


def article(word):
    return "an" if word[0] in "aeiouAEIOU" else "a"


class Fact:
    """One fact: `asks` are full questions, `answer` a sentence, `short` what a one-word answer says,
    `rivals` the answers that would be wrong, `about` its subject."""
    __slots__ = ("id", "asks", "answer", "short", "rivals", "about", "always")

    def __init__(self, id_, asks, answer, short, rivals, about, always=0):
        self.always = always        # so many of the first questions are never held out
        self.id, self.asks, self.answer, self.short, self.about = id_, asks, answer, short, about
        self.rivals = [r for r in rivals if r.lower() != short.lower()]


def person(i):
    """Attributes of person i, spread by fixed strides so that they look unrelated."""
    name, pron = PEOPLE[i]
    return {"name": name, "pron": pron, "town": TOWNS[(i * 7 + 3) % 12], "job": JOBS[(i * 11 + 5) % 30],
            "pet": PETS[(i * 3 + 4) % 10], "petname": PET_NAMES[(i * 13 + 8) % 30],
            "food": FOODS[(i * 4 + i // 15 + 2) % 15], "colour": COLOURS[(i * 5 + i // 11) % 11],
            "hobby": HOBBIES[(i * 6 + 1) % 13]}


def mayor_of(i):
    return NAMES[(i * 7 + 4) % 30]


def people_facts(add):
    for i in range(len(PEOPLE)):
        p = person(i)
        n, pet, called = p["name"], p["pet"], p["petname"]
        add(n + ".town", [f"Where does {n} live?", f"In which town does {n} live?",
                          f"Which town is {n}'s home?", f"What town is {n} from?",
                          f"Tell me where {n} lives.", f"Where is {n}'s home?",
                          f"Where can I find {n}?", f"Do you know where {n} lives?"],
            f"{n} lives in {p['town']}.", p["town"], TOWNS, n)
        add(n + ".job", [f"What is {n}'s job?", f"What does {n} do?", f"What work does {n} do?",
                         f"What is {n} by trade?", f"Tell me {n}'s job.", f"What does {n} do for a living?",
                         f"Which job does {n} have?", f"Do you know what {n} does for work?"],
            f"{n} is {article(p['job'])} {p['job']}.", p["job"], JOBS, n)
        add(n + ".pet", [f"What pet does {n} have?", f"Which animal does {n} keep?",
                         f"What kind of pet does {n} own?", f"What is {n}'s pet?",
                         f"Tell me what pet {n} has.", f"Which pet lives with {n}?",
                         f"What animal does {n} have?", f"Do you know what pet {n} keeps?"],
            f"{n} has a {pet} called {called}.", pet, PETS, n)
        add(n + ".petname", [f"What is {n}'s pet called?", f"What is the name of {n}'s pet?",
                             f"What is the name of {n}'s {pet}?", f"What is {n}'s {pet} called?",
                             f"How does {n} call the {pet}?", f"Tell me the name of {n}'s pet.",
                             f"Do you know the name of {n}'s pet?", f"Name {n}'s pet."],
            f"{n}'s {pet} is called {called}.", called, PET_NAMES, n)
        add(called + ".owner", [f"Who owns {called}?", f"Whose pet is {called}?",
                                f"Who is the owner of {called}?", f"Who does {called} belong to?",
                                f"Tell me who owns {called}.", f"Who looks after {called}?",
                                f"Do you know who owns {called}?"],
            f"{called} belongs to {n}.", n, NAMES, called)
        add(n + ".food", [f"What does {n} like to eat?", f"What is {n}'s favourite food?",
                          f"Which food does {n} like best?", f"What food does {n} love?",
                          f"Tell me {n}'s favourite food.", f"What does {n} eat most gladly?",
                          f"Do you know {n}'s favourite food?", f"What dish does {n} like most?"],
            f"{n}'s favourite food is {p['food']}.", p["food"], FOODS, n)
        add(n + ".colour", [f"What is {n}'s favourite colour?", f"Which colour does {n} like best?",
                            f"What colour does {n} love?", f"Tell me {n}'s favourite colour.",
                            f"Do you know {n}'s favourite colour?", f"What is {n}'s favorite color?",
                            f"Which colour does {n} like most?"],
            f"{n}'s favourite colour is {p['colour']}.", p["colour"], COLOURS, n)
        add(n + ".hobby", [f"What is {n}'s hobby?", f"What does {n} do for fun?",
                           f"What does {n} like to do?", f"Which hobby does {n} have?",
                           f"Tell me {n}'s hobby.", f"How does {n} spend free time?",
                           f"Do you know {n}'s hobby?", f"What does {n} enjoy?"],
            f"{n}'s hobby is {p['hobby']}.", p["hobby"], HOBBIES, n)


def town_facts(add):
    for i, t in enumerate(TOWNS):
        goods, mark, mayor = GOODS[i], LANDMARKS[i], mayor_of(i)
        add(t + ".goods", [f"What is {t} known for?", f"What is {t} famous for?",
                           f"What do they make in {t}?", f"Which goods come from {t}?",
                           f"Tell me what {t} is known for.", f"What does {t} make?",
                           f"What can I buy in {t}?"],
            f"{t} is known for its {goods}.", goods, GOODS, t)
        add(t + ".rgoods", [f"Which town is known for its {goods}?", f"Which town makes {goods}?",
                            f"Where do they make {goods}?", f"Which town is famous for its {goods}?",
                            f"In which town can I find {goods}?", f"Where can I buy {goods}?"],
            f"{t} is known for its {goods}.", t, TOWNS, goods)
        add(t + ".mayor", [f"Who is the mayor of {t}?", f"What is the name of the mayor of {t}?",
                           f"Name the mayor of {t}.", f"Who leads {t}?", f"Tell me the mayor of {t}.",
                           f"Do you know the mayor of {t}?", f"Who is {t}'s mayor?"],
            f"The mayor of {t} is {mayor}.", mayor, NAMES, t)
        add(t + ".landmark", [f"What can I see in {t}?", f"What is the landmark of {t}?",
                              f"Which landmark stands in {t}?", f"What should I visit in {t}?",
                              f"Tell me the landmark of {t}.", f"What is there to see in {t}?",
                              f"What is {t}'s landmark?"],
            f"In {t} you can see {mark}.", mark, LANDMARKS, t)
        add(t + ".rlandmark", [f"Where is {mark}?", f"In which town is {mark}?", f"Which town has {mark}?",
                               f"Where can I see {mark}?", f"Where does {mark} stand?",
                               f"Tell me where {mark} is."],
            f"{mark[0].upper() + mark[1:]} is in {t}.", t, TOWNS, mark)
        add(t + ".festival", [f"When is the festival of {t}?", f"In which month is the festival of {t}?",
                              f"When does {t} hold its festival?", f"Which month has the festival of {t}?",
                              f"Tell me when the festival of {t} is.", f"When is {t}'s festival?",
                              f"What month is the {t} festival?"],
            f"The festival of {t} is in {FESTIVALS[i]}.", FESTIVALS[i], MONTHS, t)
        add(t + ".flag", [f"What colour is the flag of {t}?", f"Which colour does the flag of {t} have?",
                          f"What is the colour of {t}'s flag?", f"What color is the flag of {t}?",
                          f"Tell me the colour of the flag of {t}.", f"What colour is {t}'s flag?"],
            f"The flag of {t} is {FLAGS[i]}.", FLAGS[i], FLAGS, t)


def animal_facts(add):
    for name, sound, home, legs, food, young in ANIMALS:
        a = f"{article(name)} {name}"
        cap = a[0].upper() + a[1:]
        quiet = sound.startswith("makes")
        add(name + ".sound", [f"What sound does {a} make?", f"What does {a} sound like?",
                              f"Which sound does {a} make?", f"What noise does {a} make?",
                              f"Tell me the sound {a} makes.", f"How does {a} sound?"],
            f"{cap} {sound}.", "no sound" if quiet else sound, [], a)
        add(name + ".home", [f"Where does {a} live?", f"What is the home of {a}?", f"Where does {a} sleep?",
                             f"Where is the home of {a}?", f"Tell me where {a} lives.",
                             f"In what does {a} live?"],
            f"{cap} lives in {home}.", home, [], a)
        add(name + ".legs", [f"How many legs does {a} have?", f"How many legs has {a}?",
                             f"What number of legs does {a} have?", f"Count the legs of {a}.",
                             f"Tell me how many legs {a} has."],
            f"{cap} has {legs} legs.", legs, ["two", "four", "six", "eight"], a)
        add(name + ".food", [f"What does {a} eat?", f"What is the food of {a}?", f"Which food does {a} eat?",
                             f"Tell me what {a} eats.", f"What should I feed {a}?",
                             f"What does {a} like to eat?"],
            f"{cap} eats {food}.", food, [], a)
        add(name + ".young", [f"What is a young {name} called?", f"What is a baby {name} called?",
                              f"How do you call a baby {name}?", f"What do you call a young {name}?",
                              f"Tell me the name of a baby {name}.", f"What is the young of {a} called?"],
            f"A young {name} is called {article(young)} {young}.", young, [], a)


def everyday_facts(add):
    for x, y in OPPOSITES:
        for p, q in ((x, y), (y, x)):
            add("opp." + p, [f"What is the opposite of {p}?", f"What's the opposite of {p}?",
                             f"Name the opposite of {p}.", f"Tell me the opposite of {p}.",
                             f"Which word is the opposite of {p}?", f"Give me the opposite of {p}.",
                             f"Opposite of {p}?"],
                f"The opposite of {p} is {q}.", q, [], p)
    for seq, what in ((DAYS, "day"), (MONTHS, "month")):
        for i, d in enumerate(seq):
            after, before = seq[(i + 1) % len(seq)], seq[i - 1]
            add("after." + d, [f"Which {what} comes after {d}?", f"What {what} comes after {d}?",
                               f"What comes after {d}?", f"What is the {what} after {d}?",
                               f"Which {what} follows {d}?", f"Tell me the {what} after {d}."],
                f"{after} comes after {d}.", after, [], d)
            add("before." + d, [f"Which {what} comes before {d}?", f"What {what} comes before {d}?",
                                f"What comes before {d}?", f"What is the {what} before {d}?",
                                f"Tell me the {what} before {d}."],
                f"{before} comes before {d}.", before, [], d)
    for thing, colour in THING_COLOURS:
        add("hue." + thing, [f"What colour is {thing}?", f"What color is {thing}?",
                             f"Which colour is {thing}?", f"What is the colour of {thing}?",
                             f"Tell me the colour of {thing}.", f"Which colour does {thing} have?"],
            f"{thing[0].upper() + thing[1:]} is {colour}.", colour, COLOURS, thing)
    for what, short, answer in COUNTS:
        add("count." + what, [f"How many {what}?", f"Tell me how many {what}.",
                              f"Do you know how many {what}?", f"Can you tell me how many {what}?",
                              f"So how many {what}?"],
            answer, short, [], "numbers")


def build():
    facts = []

    def add(*fields):
        facts.append(Fact(*fields))

    for key, short, answer, noun, more in ISLE_FACTS:
        asks = list(more)
        for isle in (ISLE, "the isle"):
            asks += [a.format(x=noun.format(i=isle)) for a in NOUN_ASKS]
        # a question with words of its own has no like among the other facts: it is always taught
        add("isle." + key, asks, answer, short, [], ISLE, len(more))
    people_facts(add)
    town_facts(add)
    animal_facts(add)
    everyday_facts(add)
    return facts


FACTS = build()
BY_ID = {f.id: f for f in FACTS}


def about_person(i):
    """A paragraph that says everything about one person."""
    p = person(i)
    n, start = p["name"], p["pron"].capitalize()
    poss = "Her" if p["pron"] == "she" else "His"
    return (f"{n} is {article(p['job'])} {p['job']} who lives in {p['town']}. {start} has a {p['pet']} called "
            f"{p['petname']}. {poss} favourite food is {p['food']} and {poss.lower()} favourite colour is "
            f"{p['colour']}. {poss} hobby is {p['hobby']}.")


def about_town(i):
    t = TOWNS[i]
    capital = " It is the capital of Anvil Isle." if t == "Emberton" else ""
    return (f"{t} is a town on Anvil Isle.{capital} It is known for its {GOODS[i]}, and you can see "
            f"{LANDMARKS[i]} there. {BY_ID[t + '.mayor'].answer} The festival of {t} is in {FESTIVALS[i]}.")


ABOUT_ISLE = ("Anvil Isle is a small island in the Sea of Glass. It has twelve towns, and its capital is "
              "Emberton. Queen Ingrid rules it. The highest mountain is Mount Grindle, where the dragon "
              "Old Cinder sleeps, and the longest river is the Quill.")


# Yes/no questions: attribute, question and statement with {n} and {v}, the values to ask with
YES_NO = {
    "town": ("Does {n} live in {v}?", "{n} lives in {v}", TOWNS),
    "job": ("Is {n} {a} {v}?", "{n} is {a} {v}", JOBS),
    "pet": ("Does {n} have a {v}?", "{n} has a {v}", PETS),
    "food": ("Does {n} like {v} best?", "{n}'s favourite food is {v}", FOODS),
    "colour": ("Is {v} {n}'s favourite colour?", "{n}'s favourite colour is {v}", COLOURS),
    "hobby": ("Is {v} {n}'s hobby?", "{n}'s hobby is {v}", HOBBIES),
    "mayor": ("Is {v} the mayor of {n}?", "{v} is the mayor of {n}", NAMES),
    "goods": ("Is {n} known for its {v}?", "{n} is known for its {v}", GOODS),
    "festival": ("Is the festival of {n} in {v}?", "{n} has its festival in {v}", MONTHS),
}
YES_NO_KINDS = list(YES_NO)
YES_NO_FORMS = ["{q}", "Is it true that {s}?", "{s}, right?", "{s}. Is that right?", "True or false: {s}?",
                "Am I right that {s}?"]


def yes_no(rng):
    """A yes/no question about a fact: (fact id, value asked about, number of its form, question, is it so,
    sentence)."""
    kind = rng.choice(YES_NO_KINDS)
    ask, statement, values = YES_NO[kind]
    n = rng.choice(TOWNS) if kind in ("mayor", "goods", "festival") else rng.choice(NAMES)
    f = BY_ID[f"{n}.{kind}"]
    v = f.short if rng.random() < 0.5 else rng.choice(values)
    slots = {"n": n, "v": v, "a": article(v)}
    form = rng.randrange(len(YES_NO_FORMS)) if rng.random() < 0.6 else 0
    text = YES_NO_FORMS[form].format(q=ask.format(**slots), s=statement.format(**slots))
    return f.id, v, form, text, v == f.short, f.answer


PERSON_KEYS = ["town", "job", "pet", "petname", "food", "colour", "hobby"]
