"""Random material that a model can only copy: made-up words, names, numbers, dates, paths, phrases.

Copying from the prompt is what tools, schemas and memory rest on, so these are drawn from far more forms
than a model of this size could learn by heart. Made-up words belong to the held-out split or to the
training split by their hash (split.py).
"""
from stories import BOYS, GIRLS, KINDS, THINGS

ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kn l m n p pl pr qu r s sc sh sk sl sm sn sp st str " \
         "t th tr tw v w wh y z zh x".split()
VOWELS = "a e i o u a e i o u ai au ea ee ei ie oa oo ou y".split()
CODAS = ["", "", "", "", "b", "ck", "d", "f", "g", "k", "l", "ld", "lm", "m", "mp", "n", "nd", "ng", "nk", "nt",
         "p", "r", "rd", "rk", "rn", "s", "sk", "st", "t", "th", "v", "x", "z"]
CITIES = """Paris London Berlin Rome Madrid Vienna Prague Oslo Dublin Lisbon Athens Warsaw Tokyo Kyoto Seoul
Delhi Cairo Nairobi Lagos Sydney Boston Chicago Denver Seattle Austin Toronto Montreal Lima Quito Bogota
Santiago Havana Bern Zurich Geneva Milan Naples Venice Munich Hamburg Cologne Lyon Nice Porto Seville Krakow
Budapest Helsinki Stockholm Copenhagen Reykjavik Istanbul Ankara Dubai Mumbai Bangkok Hanoi Jakarta Manila
Singapore Shanghai Beijing Osaka Auckland Perth Brisbane Emberton Tinwick Brassby Windmere Coalbrook""".split()
NAMES = GIRLS + BOYS + """Alice Bob Carol Dave Eve John Mary James Linda Robert Susan Maria Ahmed Fatima Wei Yuki
Priya Raj Omar Aisha Chen Kim Olivia Liam Sophia Mason Lily Ethan Grace Lucas Chloe Mateo Hana Kenji Amara Kofi
Zara Nikolai Svetlana Diego Lucia Pierre Amelie Giulia Marco Jan Eva Sven Astrid Mohammed""".split()
ADJECTIVES = "red blue green big small old new fast slow cold warm bright dark quiet loud soft round".split()
DOMAINS = "example.com example.org mail.test anvil.isle forge.net".split()
EXTS = "txt md json csv py c log png yaml html".split()


def capital(word):
    return word[:1].upper() + word[1:]


def made_up(rng, split, low=1, high=3):
    while True:
        w = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
                    for _ in range(rng.randint(low, high)))
        if len(w) > 2 and split.ok("word", w):
            return w


def name(rng, split):
    """A person's name: common, or one nobody has heard before."""
    r = rng.random()
    if r < 0.45 and not split.held:
        return rng.choice(NAMES)
    if r < 0.55:
        return capital(made_up(rng, split, 1, 2)) + " " + capital(made_up(rng, split, 1, 2))
    return capital(made_up(rng, split, 1, 3))


def city(rng, split):
    r = rng.random()
    if r < 0.6 and not split.held:
        return rng.choice(CITIES)
    if r < 0.7:
        return rng.choice(["New ", "San ", "Port ", "Fort ", "Lake ", "Saint "]) + capital(made_up(rng, split, 1, 2))
    return capital(made_up(rng, split, 1, 3))


def word(rng, split):
    r = rng.random()
    if r < 0.35 and not split.held:
        return rng.choice(THINGS + KINDS)
    return made_up(rng, split, 1, 3)


def phrase(rng, split, low=2, high=5):
    out = []
    for _ in range(rng.randint(low, high)):
        r = rng.random()
        out.append(rng.choice(ADJECTIVES) if r < 0.3 else rng.choice(THINGS) if r < 0.6 else
                   made_up(rng, split, 1, 2) if r < 0.8 else rng.choice(KINDS))
    return " ".join(out)


def integer(rng):
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 4, 5)))


def decimal(rng):
    return rng.randrange(1, 10 ** rng.choice((2, 3, 4))) / rng.choice((10, 100, 10))


def date(rng):
    return f"{rng.randint(1990, 2049)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock(rng):
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def email(rng, split):
    user = made_up(rng, split, 1, 2) if split.held or rng.random() < 0.6 else rng.choice(NAMES).lower()
    return f"{user}@{rng.choice(DOMAINS) if rng.random() < 0.5 else made_up(rng, split, 1, 2) + '.com'}"


def path(rng, split):
    parts = [made_up(rng, split, 1, 2) if rng.random() < 0.6 else rng.choice(THINGS)
             for _ in range(rng.randint(1, 3))]
    return rng.choice(["", "", "/", "./", "/home/"]) + "/".join(parts) + "." + rng.choice(EXTS)


def code(rng):
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 3))) + rng.choice(["", "-"]) + \
        str(rng.randrange(10, 10 ** rng.choice((2, 3, 4))))
