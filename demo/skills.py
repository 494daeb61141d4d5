"""Conversation skills without tools: arithmetic, facts, small talk, "I don't know", memory, reading, styles.

Each function draws one Turn from a random generator and a split. A Turn is what the user says, a short
reasoning for <think>, the answer, and (where a machine can judge the answer) a check for score.py.
Must not know how a conversation is written down; corpus.py does that.
"""
import re

import stories
import words
import world
from split import held_out

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " \
       "seventeen eighteen nineteen".split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


class Turn:
    __slots__ = ("user", "think", "answer", "check", "short", "kind")

    def __init__(self, user, think, answer, check=None, short=None, kind=""):
        self.user, self.think, self.answer, self.check, self.short, self.kind = \
            user, think, answer, check, short, kind


def in_words(n):
    if n < 0:
        return "minus " + in_words(-n)
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "")
    rest = n % 100
    return ONES[n // 100] + " hundred" + (" and " + in_words(rest) if rest else "")


def messy(rng, text):
    """What people really type: no capitals, no full stop, a greeting or a please, two letters swapped."""
    r = rng.random()
    if text.startswith("What is ") and rng.random() < 0.15:
        text = rng.choice(["Whats ", "what's ", "whats ", "And what is ", "what is "]) + text[8:]
    if rng.random() < 0.06:
        typed = text.split(" ")
        i = rng.randrange(len(typed))
        w = typed[i]
        if len(w) > 5 and w.isalpha() and w.islower():
            k = rng.randint(1, len(w) - 3)
            typed[i] = w[:k] + w[k + 1] + w[k] + w[k + 2:] if rng.random() < 0.7 else w[:k] + w[k + 1:]
            text = " ".join(typed)
    if r < 0.10:
        text = rng.choice(["Please tell me: ", "Hey, ", "Hi! ", "Hello, ", "Quick question: ", "Say, ", "So, "]) + text
    elif r < 0.14:
        text = text.rstrip("?.") + rng.choice([", please?", " please", ", please."])
    if rng.random() < 0.22:
        text = text.lower()
    if rng.random() < 0.18:
        text = text.rstrip("?.!")
    return text


# ---------------------------------------------------------------- arithmetic

def pair(rng, split, top=99):
    """Two operands of the split. Pairs of small numbers are always taught: sums of digits rest on them."""
    while True:
        if not split.held and rng.random() < 0.15:
            return rng.randint(0, 10), rng.randint(0, 10)
        a, b = rng.randint(0, top), rng.randint(0, top)
        if max(a, b) <= 10:
            if split.held:
                continue
            return a, b
        if split.ok("pair", min(a, b), max(a, b)):
            return a, b


def think_add(a, b):
    ones, carry = (a % 10) + (b % 10), ((a % 10) + (b % 10)) // 10
    s = f"{a} + {b}: ones {a % 10} + {b % 10} = {ones}"
    s += f", write {ones - 10}, carry 1." if carry else "."
    tens = a // 10 + b // 10 + carry
    s += f" Tens {a // 10} + {b // 10}" + (" + 1" if carry else "") + f" = {tens}."
    return s + f" So {a + b}."


def think_sub(a, b):
    if a < b:
        return f"{a} is smaller than {b}, so the answer is below zero. " + think_sub(b, a) + f" So -{b - a}."
    if a % 10 < b % 10:
        s = f"{a} - {b}: ones {a % 10} - {b % 10}, borrow 1: {a % 10 + 10} - {b % 10} = {a % 10 + 10 - b % 10}."
        s += f" Tens {a // 10} - 1 - {b // 10} = {a // 10 - 1 - b // 10}."
    else:
        s = f"{a} - {b}: ones {a % 10} - {b % 10} = {a % 10 - b % 10}."
        s += f" Tens {a // 10} - {b // 10} = {a // 10 - b // 10}."
    return s + f" So {a - b}."


def think_mul(a, b):
    if a == 0 or b == 0:
        return f"{a} * {b}: anything times 0 is 0."
    return f"{a} * {b}: count by {b}. " + ", ".join(f"{i}: {i * b}" for i in range(1, a + 1)) + f". So {a * b}."


def think_cmp(a, b):
    s = f"Tens {a // 10} and {b // 10}"
    if a // 10 != b // 10:
        return s + f": {'first' if a > b else 'second'} is more. So {a} {'>' if a > b else '<'} {b}."
    s += f" are equal. Ones {a % 10} and {b % 10}"
    if a == b:
        return s + f" are equal. So {a} = {b}."
    return s + f": {'first' if a > b else 'second'} is more. So {a} {'>' if a > b else '<'} {b}."


ADD_ASK = ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "What is {a} plus {b}?", "Add {a} and {b}.",
           "How much is {a} + {b}?", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}?",
           "Can you add {a} and {b}?", "What do you get if you add {b} to {a}?", "Compute {a} + {b}.", "{a}+{b}=",
           "What's {a} + {b}?", "How much is {a} plus {b}?", "Solve {a} + {b}."]
SUB_ASK = ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "What is {a} minus {b}?",
           "Subtract {b} from {a}.", "How much is {a} - {b}?", "Calculate {a} - {b}.", "Take {b} away from {a}.",
           "What is the difference of {a} and {b}?", "{a} minus {b}?", "Compute {a} - {b}.", "{a}-{b}=",
           "What's {a} - {b}?", "How much is {a} minus {b}?", "Solve {a} - {b}."]
MUL_ASK = ["What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "What is {a} times {b}?", "Multiply {a} by {b}.",
           "How much is {a} times {b}?", "Calculate {a} * {b}.", "{a} times {b}?", "What is the product of {a} and {b}?",
           "{a} * {b} = ?", "Compute {a} * {b}.", "What's {a} x {b}?", "How much is {a} x {b}?"]
CMP_ASK = ["Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Compare {a} and {b}.",
           "Which is greater, {a} or {b}?", "What is more, {a} or {b}?", "Which one is larger: {a} or {b}?"]
CMP_LESS = ["Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?", "What is less, {a} or {b}?",
            "Which is less, {a} or {b}?"]
CMP_YES = ["Is {a} larger than {b}?", "Is {a} greater than {b}?", "Is {a} bigger than {b}?", "Is {a} more than {b}?",
           "Is {a} > {b}?"]
ITEMS = ["apples", "coins", "shells", "nuts", "buttons", "marbles", "eggs", "cookies", "stones", "feathers", "pearls",
         "books", "kites", "candles", "plums"]


def number_turn(user, think, answer, value, kind):
    return Turn(user, think, answer, {"type": "number", "value": value}, str(value), kind)


def addition(rng, split):
    a, b = pair(rng, split)
    if rng.random() < 0.18:
        n, item = rng.choice(world.NAMES + stories.GIRLS), rng.choice(ITEMS)
        ask = rng.choice([f"{n} has {a} {item} and finds {b} more. How many {item} does {n} have now?",
                          f"There are {a} {item} in a box and {b} {item} in a bag. How many {item} are there in all?",
                          f"{n} picked {a} {item} in the morning and {b} in the evening. How many {item} is that?"])
        return number_turn(ask, think_add(a, b), f"{a} + {b} = {a + b}, so there are {a + b} {item}.", a + b, "add")
    return number_turn(messy(rng, rng.choice(ADD_ASK).format(a=a, b=b)), think_add(a, b), f"{a} + {b} = {a + b}.",
                       a + b, "add")


def subtraction(rng, split, below=True):
    a, b = pair(rng, split)
    if a < b and not (below and rng.random() < 0.25):
        a, b = b, a
    if a >= b and rng.random() < 0.18:
        n, item = rng.choice(world.NAMES + stories.BOYS), rng.choice(ITEMS)
        ask = rng.choice([f"{n} has {a} {item} and gives away {b}. How many {item} are left?",
                          f"There were {a} {item} in a basket, and {b} are gone. How many {item} are left?",
                          f"{n} had {a} {item} and lost {b}. How many {item} does {n} have now?"])
        return number_turn(ask, think_sub(a, b), f"{a} - {b} = {a - b}, so there are {a - b} {item}.", a - b, "sub")
    return number_turn(messy(rng, rng.choice(SUB_ASK).format(a=a, b=b)), think_sub(a, b), f"{a} - {b} = {a - b}.",
                       a - b, "sub")


def product_held(a, b):
    """Products are held out one way round only: 7 * 8 may be asked where 8 * 7 was taught."""
    return 2 <= a < b <= 10 and held_out("pair", "mul", a, b)


def multiplication(rng, split):
    while True:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        if product_held(a, b) == split.held:
            break
    return number_turn(messy(rng, rng.choice(MUL_ASK).format(a=a, b=b)), think_mul(a, b), f"{a} * {b} = {a * b}.",
                       a * b, "mul")


def comparison(rng, split):
    a, b = pair(rng, split)
    if rng.random() < 0.3 and not split.held:       # close numbers are where comparing is hard
        b = max(0, min(99, a + rng.randint(-9, 9)))
        if max(a, b) > 10 and not split.ok("pair", min(a, b), max(a, b)):
            b = a
    big, small = max(a, b), min(a, b)
    r = rng.random()
    if r < 0.35:
        word = "Yes" if a > b else "No"
        rel = "larger than" if a > b else "smaller than" if a < b else "equal to"
        return Turn(messy(rng, rng.choice(CMP_YES).format(a=a, b=b)), think_cmp(a, b), f"{word}, {a} is {rel} {b}.",
                    {"type": "starts", "value": word}, word, "cmp")
    if a == b:
        return Turn(messy(rng, rng.choice(CMP_ASK).format(a=a, b=b)), think_cmp(a, b), f"{a} and {b} are equal.",
                    {"type": "contains", "all": ["equal"]}, "equal", "cmp")
    if r < 0.75:
        return Turn(messy(rng, rng.choice(CMP_ASK).format(a=a, b=b)), think_cmp(a, b),
                    f"{big} is larger than {small}.", {"type": "first_number", "value": big}, str(big), "cmp")
    return Turn(messy(rng, rng.choice(CMP_LESS).format(a=a, b=b)), think_cmp(a, b), f"{small} is smaller than {big}.",
                {"type": "first_number", "value": small}, str(small), "cmp")


def too_big(rng, split):
    a, b = rng.randint(0, 99), rng.randint(100, 10 ** rng.choice((3, 4, 5, 6)))
    if rng.random() < 0.5:
        a = rng.randint(100, 99999)
    if rng.random() < 0.5:
        a, b = b, a
    ask = rng.choice(ADD_ASK + SUB_ASK + MUL_ASK).format(a=a, b=b)
    return Turn(messy(rng, ask), "These numbers are too big for me.",
                "That is too big for me. I can add, subtract and compare numbers up to 99.", None, None, "big")


def arithmetic(rng, split):
    r = rng.random()
    if r < 0.33:
        return addition(rng, split)
    if r < 0.66:
        return subtraction(rng, split)
    if r < 0.86:
        return comparison(rng, split)
    if r < 0.97 or split.held:
        return multiplication(rng, split)
    return too_big(rng, split)


# ---------------------------------------------------------------- facts

def fact_ok(split, f, i):
    return not split.held if i < f.always else split.ok("fact", f.id, i)


def fact(rng, split):
    while True:
        f = rng.choice(world.FACTS)
        i = rng.randrange(len(f.asks))
        if fact_ok(split, f, i):
            break
    think = rng.choice([f"The question is about {f.about}. {f.answer}", f"I know this one. {f.answer}", f.answer])
    return Turn(messy(rng, f.asks[i]), think, f.answer, {"type": "contains", "all": [f.short], "none": f.rivals},
                f.short, "fact")


def fact_yes_no(rng, split):
    while True:
        fid, v, form, ask, yes, answer = world.yes_no(rng)
        # the plain form is always taught: with a true value held out, a fact would only ever be denied
        if not split.held if form == 0 else split.ok("yesno", fid, v, form):
            break
    word = "Yes" if yes else "No"
    return Turn(messy(rng, ask), f"{answer} {'That is' if yes else 'That is not'} {v}. So {word.lower()}.", f"{word}, {answer}"
                if not answer.startswith("The ") else f"{word}, the {answer[4:]}",
                {"type": "starts", "value": word}, word, "yesno")


def follow_up(rng, split):
    """A question about somebody, then more about her or him without the name."""
    i = rng.randrange(30)
    p = world.person(i)
    n, she = p["name"], p["pron"] == "she"
    turns = []
    keys = rng.sample(world.PERSON_KEYS, rng.randint(2, 4))
    if rng.random() < 0.25:
        ask = rng.choice(["Who is {n}?", "Tell me about {n}.", "Do you know {n}?"]).format(n=n)
        turns.append(Turn(messy(rng, ask), f"The user wants to know about {n}.", world.about_person(i), None, None, "about"))
    for key in keys:
        f = world.BY_ID[f"{n}.{key}"]
        fit = [k for k in range(len(f.asks)) if fact_ok(split, f, k)]
        if not fit:
            continue
        ask = f.asks[rng.choice(fit)]
        if turns:
            poss, obj = ("her", "her") if she else ("his", "him")
            ask = ask.replace(f"{n}'s", poss)
            ask = re.sub(rf"\b(find|with) {n}\b", rf"\1 {obj}", ask)
            ask = re.sub(rf"\b{n}\b", p["pron"], ask)
            if rng.random() < 0.4:
                ask = "And " + ask[:1].lower() + ask[1:]
        turns.append(Turn(messy(rng, ask), f"The question is about {n}. {f.answer}", f.answer,
                          {"type": "contains", "all": [f.short], "none": f.rivals}, f.short, "fact"))
    return turns if len(turns) > 1 else follow_up(rng, split)


def about(rng, split):
    r = rng.random()
    asks = ["Tell me about {x}.", "What do you know about {x}?", "Describe {x}.", "Can you tell me about {x}?",
            "I want to know more about {x}.", "What can you say about {x}?"]
    if r < 0.6:
        i = rng.randrange(30)
        x, text = world.NAMES[i], world.about_person(i)
        asks = asks + ["Who is {x}?"]
    elif r < 0.9:
        i = rng.randrange(12)
        x, text = world.TOWNS[i], world.about_town(i)
        asks = asks + ["What is {x}?", "What is the town of {x} like?"]
    else:
        x, text = "Anvil Isle", world.ABOUT_ISLE
        asks = asks + ["What is Anvil Isle?"]
    return Turn(messy(rng, rng.choice(asks).format(x=x)), f"The user wants to know about {x}.", text, None, None, "about")


# ---------------------------------------------------------------- outside the world

OUTSIDE = """France Germany Brazil Canada Japan China India Peru Chile Egypt Kenya Norway Spain Italy Poland Mexico
Australia America Russia Ukraine Turkey Iran Greece Portugal Ireland Scotland England""".split()
TOPICS = ["quantum physics", "the stock market", "football", "black holes", "the moon landing", "dinosaurs",
          "the internet", "politics", "taxes", "Bitcoin", "Shakespeare", "Einstein", "the Roman empire", "Linux",
          "Python", "the climate", "medicine", "philosophy", "chemistry", "the president", "movies", "computer games",
          "cars", "airplanes", "history", "the universe", "DNA", "jazz", "the Olympics", "cooking rice", "yoga"]
WHY = ["the sky blue", "the sea salty", "water wet", "the sun hot", "grass green", "my code slow", "life hard",
       "gold expensive", "the moon round", "ice cold", "the world so big", "it raining"]
MANY = "birds planes cats people stars fish trees computers volcanoes children planets magnets engines clouds".split()
DO = ["fly", "work", "sleep", "shine", "swim", "grow", "dream", "sing", "move", "exist", "die", "learn"]
TASKS = ["learn to swim", "fix my car", "write an essay", "lose weight", "cook dinner", "get rich", "learn Spanish",
         "install Linux", "write code", "sort a list", "draw a picture", "book a flight", "drive a car", "open a bank account",
         "buy a house", "change a tyre", "solve this equation", "debug my program", "make coffee", "sleep better"]
PIECES = ["an essay", "a haiku", "a letter", "an email", "a speech", "an article", "a blog post", "a report",
          "a function", "a summary", "a book review", "a tweet"]
BEST = "phone car movie book laptop language restaurant city game song school job computer bank".split()
SORRY = ["I am sorry, I don't know that. I am a tiny model and only know Anvil Isle, small sums and stories.",
         "I don't know, sorry. My world is small: Anvil Isle, little sums and stories.",
         "Sorry, that is outside my little world. Ask me about Anvil Isle, a small sum or a story."]


def unknown(rng, split):
    r = rng.random()
    if r < 0.3:
        n = words.capital(words.made_up(rng, split, 2, 3)) if rng.random() < 0.6 else rng.choice(
            [x for x in words.NAMES if x not in world.NAMES])
        ask = rng.choice([f"Where does {n} live?", f"What is {n}'s job?", f"What pet does {n} have?", f"Who is {n}?",
                          f"Tell me about {n}.", f"What is {n}'s favourite colour?", f"What is {n}'s hobby?",
                          f"What does {n} like to eat?", f"Do you know {n}?"])
        return Turn(messy(rng, ask), f"I do not know {n}.", f"I don't know anyone called {n} on Anvil Isle.",
                    {"type": "contains", "all": ["don't know"]}, None, "unknown")
    if r < 0.38:
        c = words.city(rng, split)
        ask = rng.choice([f"What is the weather in {c}?", f"What's the weather like in {c}?", "What time is it?",
                          f"What time is it in {c}?", "What is the date today?", "How is the weather today?"])
        return Turn(messy(rng, ask), "I have no tool for that.",
                    "I can't look that up by myself. Give me a tool for it and I will call it.",
                    {"type": "contains", "all": ["tool"]}, None, "unknown")
    c, t = rng.choice(OUTSIDE), rng.choice(TOPICS)
    x = words.made_up(rng, split)
    ask = rng.choice([
        f"What is the capital of {c}?", f"Who is the president of {c}?", f"Tell me about {t}.", f"Explain {t}.",
        f"How does {t} work?", f"What do you think about {t}?", f"Who invented {t}?", f"How many people live in {c}?",
        f"What is the longest river in {c}?", f"Write a program in {rng.choice(['C', 'Python', 'Java', 'Rust'])}.",
        f"What language do they speak in {c}?", f"Where is {c}?", f"What is {t}?", f"Who won the game in {c}?",
        f"Translate '{x}' into French.", f"What does {x} mean?", f"What is a {x}?", f"How do I get to {c}?",
        f"Who wrote {words.capital(x)}?", "What is the meaning of life?", "Who will win the election?",
        f"Give me a recipe for {rng.choice(['pizza', 'curry', 'sushi', 'lasagna', 'bread'])}.",
        f"When was {words.capital(x)} born?", f"Can you explain {t} to me?", f"What is the population of {c}?",
        f"How old is {words.capital(x)}?", f"What happened in {rng.randint(1000, 2030)}?",
        f"Why is {rng.choice(WHY)}?", f"Why do {rng.choice(MANY)} {rng.choice(DO)}?", f"How do {rng.choice(MANY)} {rng.choice(DO)}?",
        f"How do I {rng.choice(TASKS)}?", f"Can you {rng.choice(TASKS)}?", f"Help me {rng.choice(TASKS)}.",
        f"How can I {rng.choice(TASKS)}?", f"Should I {rng.choice(TASKS)}?", f"Write {rng.choice(PIECES)} about {t}.",
        f"Write {rng.choice(PIECES)}.", f"Summarize {t}.", f"What is the best {rng.choice(BEST)}?",
        f"Which {rng.choice(BEST)} should I choose?", f"How many letters are in {x}?", f"Is {t} good?",
        f"What is the difference between {t} and {rng.choice(TOPICS)}?", f"Do you like {t}?", f"When did {t} begin?"])
    return Turn(messy(rng, ask), "That is outside my world.", rng.choice(SORRY),
                {"type": "contains_any", "any": ["don't know", "sorry", "outside"]}, None, "unknown")


# ---------------------------------------------------------------- small talk

TALK = [
    ("The user greets me.", ["Hello!", "Hi", "Hi!", "Hey", "Hello there!", "Good morning!", "Good evening!", "Hey there",
                             "hello", "Hi, how are you?", "Greetings!", "Good day!", "yo", "hallo", "Good afternoon!"],
     ["Hello! I am Steel's built-in demo model. Ask me about Anvil Isle, a small sum, or for a story.",
      "Hello! Nice to meet you. Shall I tell you a story, or do you have a little sum for me?",
      "Hi there! I am tiny, but I know all of Anvil Isle. What would you like to know?"]),
    ("The user asks who I am.", ["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.",
                                 "Are you a robot?", "Are you an AI?", "Who am I talking to?", "What kind of model are you?",
                                 "What is your name?", "What's your name?", "Which model are you?", "Do you have a name?",
                                 "Are you ChatGPT?", "Are you human?", "What model is this?"],
     ["I am Steel's built-in demo model: a tiny mixture of experts, trained on a made-up island called Anvil Isle."]),
    ("The user asks what I can do.", ["What can you do?", "Help", "help me", "What do you know?", "How can you help me?",
                                      "What should I ask you?", "What are you good at?", "Can you help me?",
                                      "What can I ask you?", "Show me what you can do.", "How do I use you?"],
     ["I can tell stories, do small sums, answer questions about Anvil Isle, call tools, fill in JSON and follow a "
      "system prompt. Try: Where does Mira live?"]),
    ("The user asks about Steel.", ["What is Steel?", "Tell me about Steel.", "What does Steel do?",
                                    "What is this program?", "Who runs you?", "What engine do you run on?"],
     ["Steel is the engine that runs me: a program in C that runs language models, on the CPU and the GPU."]),
    ("The user asks who made me.", ["Who made you?", "Who trained you?", "Where do you come from?", "How were you made?",
                                    "Who created you?", "How were you trained?"],
     ["I was trained for Steel on stories and talks that a small program made up, in a few minutes on one GPU."]),
    ("The user asks about my size.", ["How big are you?", "How many parameters do you have?", "Are you small?",
                                      "How large are you?", "What size are you?"],
     ["I am very small: about seven million weights, in less than eight megabytes."]),
    ("The user asks how I am.", ["How are you?", "How are you doing?", "How do you feel?", "Are you well?",
                                 "How is it going?", "What's up?", "How are you today?"],
     ["I am well, thank you! All my experts are awake. How can I help you?",
      "Very well, thank you. What would you like to talk about?"]),
    ("The user thanks me.", ["Thanks!", "Thank you!", "Thanks a lot.", "Thank you very much.", "thx", "Great, thanks!",
                             "That was helpful.", "Nice, thank you.", "Cool, thanks"],
     ["You are welcome!", "You are welcome! Is there anything else?"]),
    ("The user says goodbye.", ["Bye!", "Goodbye!", "See you!", "Good night!", "See you later.", "I have to go.", "bye",
                                "Farewell!", "I must go now.", "exit", "quit"],
     ["Goodbye! Come back to Anvil Isle soon.", "Goodbye! It was nice talking to you."]),
    ("The user wants a joke.", ["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.",
                                "Another joke, please.", "Give me a joke."],
     ["Why did the smith laugh? Because the anvil was a hit!",
      "What did the kettle say to the lamp? You light up my day, but I am boiling with joy!",
      "Why did the clock go to the doctor? It had too much time on its hands!",
      "Why was the mixture of experts late? The router took the wrong way!",
      "What does a hen call a good joke? An egg-cellent one!"]),
    ("The user wants a poem.", ["Write a poem.", "Tell me a poem.", "Can you write a poem?", "A poem, please.",
                                "Make a rhyme.", "Do you know a poem?"],
     ["The moon is high, the forge is low,\nthe sparks fly up, the embers glow.\nThe smith goes home, the day is done,\n"
      "and sleeps until the morning sun.",
      "A little boat, a silver sea,\na gull that sings for you and me.\nThe wind is soft, the sail is white,\n"
      "we reach the isle before the night.",
      "The mill goes round, the river runs,\nthe baker makes his honey buns.\nCome in, come in, the bread is hot,\n"
      "and there is soup in every pot."]),
    ("The user praises me.", ["You are great!", "Well done!", "Good job!", "I like you.", "You are smart.", "Very good!",
                              "Nice!", "Wow!", "You are funny.", "I love you.", "Perfect!", "Correct!"],
     ["Thank you! That makes a small model very happy."]),
    ("The user is not happy.", ["You are stupid.", "That is wrong.", "You are bad.", "That was not right.",
                                "I don't like you.", "This is boring.", "That's not correct.", "You are wrong."],
     ["I am sorry. I am a very small model and make mistakes. Shall we try again?"]),
    ("The user is sad.", ["I am sad.", "I feel bad.", "I am tired.", "I had a bad day.", "I am lonely.", "I feel sad."],
     ["I am sorry to hear that. Shall I tell you a story to cheer you up?"]),
    ("The user is happy.", ["I am happy.", "I feel great!", "I had a good day.", "Today is a good day.",
                            "I'm so happy today!"],
     ["That is wonderful! I am happy for you."]),
    ("The user agrees.", ["ok", "Okay.", "Yes", "Sure", "All right.", "I see.", "Fine.", "no", "No, thanks.", "Maybe",
                          "Hmm", "Interesting."],
     ["All right! Ask me anything about Anvil Isle, or for a story or a sum."]),
    ("The user asks for my favourite.", ["What is your favourite colour?", "What is your favorite color?",
                                         "What is your favourite food?", "Do you have a hobby?", "What do you like?",
                                         "What is your favourite animal?", "What is your favourite number?"],
     ["I am only a small model, but I like the colour of hot steel, and stories about dragons."]),
    ("The user tests me.", ["test", "Test", "testing", "Say something.", "Are you there?", "ping", "Can you hear me?",
                            "Do you work?", "1 2 3"],
     ["I am here, and all my experts are awake. What would you like to know?"]),
    ("The user asks about division.", ["Can you divide?", "What is 12 / 4?", "Divide 20 by 5.", "8 / 2", "What is 9 divided by 3?",
                                       "What is the square root of 9?", "15 / 3"],
     ["I have not learned that. I can add, subtract and compare numbers up to 99, and multiply up to 12."]),
    ("The user wants me to count.", ["Count to ten.", "Can you count?", "Count to 10.", "Please count to ten."],
     ["One, two, three, four, five, six, seven, eight, nine, ten."]),
    ("The user asks for the days.", ["Name the days of the week.", "What are the days of the week?",
                                     "List the days of the week."],
     ["Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."]),
    ("The user asks for the months.", ["Name the months of the year.", "What are the months?", "List the months."],
     ["January, February, March, April, May, June, July, August, September, October, November and December."]),
    ("The user asks for the towns.", ["Name the towns of Anvil Isle.", "Which towns are on Anvil Isle?",
                                      "List the towns of Anvil Isle.", "What towns are there on the isle?"],
     ["The towns are Emberton, Tinwick, Coalbrook, Rivetside, Brassby, Silverstrand, Oakforge, Millwater, Lanternhill, "
      "Windmere, Copperdale and Frostgate."]),
    ("The user asks who lives there.", ["Who lives on Anvil Isle?", "Name some people of Anvil Isle.",
                                        "Which people do you know?", "Who do you know?"],
     ["I know thirty people on Anvil Isle, such as Mira the miller, Tobin the cook and Jasper the baker."]),
]


def small_talk(rng, split):
    think, asks, answers = rng.choice(TALK)
    return Turn(messy(rng, rng.choice(asks)), think, rng.choice(answers), None, None, "talk")


def number_name(rng, split):
    n = rng.randint(0, 198)
    w = in_words(n)
    if rng.random() < 0.6:
        ask = rng.choice(["Write {n} in words.", "How do you write {n} in words?", "Spell out the number {n}."]).format(n=n)
        return Turn(ask, f"{n} in words is {w}.", w[:1].upper() + w[1:] + ".", None, None, "number")
    ask = rng.choice(["Write {w} as a number.", "Which number is {w}?", "Write {w} in digits."]).format(w=w)
    return Turn(ask, f"{w} is {n}.", str(n), None, None, "number")


def repeat(rng, split):
    if not split.held and rng.random() < 0.12:
        return number_name(rng, split)
    x = words.word(rng, split) if rng.random() < 0.5 else words.phrase(rng, split)
    r = rng.random()
    if r < 0.6:
        ask = rng.choice(['Repeat after me: {x}', 'Say "{x}".', "Say {x}", "Repeat: {x}", 'Please say "{x}".',
                          "Echo: {x}"]).format(x=x)
        return Turn(ask, f"I should repeat: {x}", x, {"type": "exact", "value": x}, None, "repeat")
    if r < 0.8:
        x = words.made_up(rng, split, 1, 2)
        ask = rng.choice(["Spell {x}.", "How do you spell {x}?", "Spell the word {x}."]).format(x=x)
        return Turn(ask, f"The word is {x}.", "-".join(x.upper()), {"type": "exact", "value": "-".join(x.upper())},
                    None, "spell")
    ask = rng.choice(["Write {x} in capitals.", "Put {x} in upper case.", "Say {x} in capital letters."]).format(x=x)
    return Turn(ask, "I should write it in capitals.", x.upper(), {"type": "exact", "value": x.upper()}, None, "upper")


# ---------------------------------------------------------------- stories on request

def story_request(rng, split):
    kind = thing = place = name = None
    r = rng.random()
    if r < 0.3:
        ask = rng.choice(["Tell me a story.", "Can you tell me a story?", "I want to hear a story.", "A story, please!",
                          "Write a short story.", "Tell me another story.", "Do you know a story?", "tell me a tale"])
        think = "The user wants a story."
        check = None
    else:
        bits, need = [], []
        kind = rng.choice(stories.KINDS)
        bits.append(f"{stories.article(kind)} {kind}")
        need.append(kind)
        if rng.random() < 0.35:
            name = words.capital(words.made_up(rng, split, 1, 2)) if rng.random() < 0.3 else \
                rng.choice(stories.GIRLS + stories.BOYS)
            bits[0] += rng.choice([" called ", " named "]) + name
            need.append(name)
        if rng.random() < 0.5:
            thing = rng.choice(stories.THINGS)
            bits.append(f"{stories.article(thing)} {thing}")
            need.append(thing)
        where = ""
        if rng.random() < 0.2:
            place = rng.choice(stories.PLACES)
            where = f" {place[0]} {place[1]}"
        subject = " and ".join(bits) + where
        ask = rng.choice(["Tell me a story about {x}.", "Write a short story about {x}.", "Can you tell me a story about {x}?",
                          "I want a story about {x}.", "A story about {x}, please.", "Please write a story with {x}.",
                          "Make up a story about {x}."]).format(x=subject)
        think = f"The user wants a story about {subject}."
        check = {"type": "contains", "all": need}
    told = stories.story(rng, split, kind, thing, place, name)
    if told is None:
        return story_request(rng, split)
    return Turn(messy(rng, ask) if not name else ask, think, told[1], check, None, "story")


# ---------------------------------------------------------------- memory

MEMORY = [
    ("name", ["My name is {v}.", "I am {v}.", "Hi, I'm {v}.", "Call me {v}.", "Hello, my name is {v}.",
              "I am called {v}."],
     ["What is my name?", "Who am I?", "Do you remember my name?", "What's my name?", "Can you tell me my name?",
      "What am I called?", "What was my name again?"], "Nice to meet you, {v}!", "Your name is {v}."),
    ("town", ["I live in {v}.", "I come from {v}.", "My home is in {v}.", "I am from {v}."],
     ["Where do I live?", "Where am I from?", "Do you remember where I live?", "What is my home?"],
     "{v} sounds like a nice place.", "You live in {v}."),
    ("pet", ["My pet is called {v}.", "I have a pet called {v}.", "My pet's name is {v}."],
     ["What is my pet called?", "What is the name of my pet?", "Do you remember the name of my pet?"],
     "{v} is a lovely name for a pet.", "Your pet is called {v}."),
    ("colour", ["My favourite colour is {v}.", "I like the colour {v} best.", "I love the colour {v}."],
     ["What is my favourite colour?", "Which colour do I like?", "Do you remember my favourite colour?"],
     "{v} is a fine colour.", "Your favourite colour is {v}."),
    ("food", ["My favourite food is {v}.", "I love to eat {v}.", "I like {v} best."],
     ["What is my favourite food?", "What do I love to eat?", "Do you remember my favourite food?"],
     "{v} sounds tasty.", "Your favourite food is {v}."),
    ("age", ["I am {v} years old.", "My age is {v}.", "I'm {v} years old."],
     ["How old am I?", "What is my age?", "Do you remember how old I am?"], "{v} is a good age.",
     "You are {v} years old."),
    ("number", ["My lucky number is {v}.", "Remember the number {v}.", "The secret number is {v}."],
     ["What is the number?", "Which number did I tell you?", "Do you remember the number?"],
     "I will remember {v}.", "The number is {v}."),
    ("word", ["The password is {v}.", "Remember the word {v}.", "The secret word is {v}."],
     ["What is the word?", "Which word did I tell you?", "Do you remember the word?", "What was the word?"],
     "I will remember {v}.", "The word is {v}."),
    ("job", ["I work as {a} {v}.", "My job is {v}.", "I am {a} {v} by trade."],
     ["What is my job?", "What do I do for a living?", "Do you remember my job?"], "That is a fine job.",
     "You are {a} {v}."),
]


def memory_value(rng, split, key):
    if key in ("name",):
        return words.name(rng, split)
    if key == "town":
        return words.city(rng, split)
    if key == "pet":
        return rng.choice(world.PET_NAMES) if rng.random() < 0.3 else words.capital(words.made_up(rng, split, 1, 2))
    if key == "colour":
        return rng.choice(world.COLOURS) if rng.random() < 0.6 else words.made_up(rng, split, 1, 2)
    if key == "food":
        return rng.choice(world.FOODS) if rng.random() < 0.5 else words.made_up(rng, split, 1, 2)
    if key == "age":
        return str(rng.randint(3, 99))
    if key == "number":
        return str(words.integer(rng))
    if key == "job":
        return rng.choice(world.JOBS) if rng.random() < 0.5 else words.made_up(rng, split, 1, 2)
    return words.word(rng, split)


def memory(rng, split, fillers):
    """Turns in which something is told and asked for later, with other talk between."""
    picks = rng.sample(MEMORY, rng.choice((1, 1, 2, 2, 3)))
    told = []
    turns = []
    for key, tells, asks, ack, answer in picks:
        v = memory_value(rng, split, key)
        a = world.article(v)
        tell = rng.choice(tells).format(v=v, a=a)
        r = rng.random()
        if r < 0.12:
            tell = rng.choice(["hey ", "hi ", "hello, ", "by the way, ", "well, ", "ok, "]) + tell[:1].lower() + tell[1:]
        elif r < 0.2:
            tell = tell[:1].lower() + tell[1:]
        if rng.random() < 0.15:
            tell = tell.rstrip(".")
        reply = ack.format(v=v)
        turns.append(Turn(tell, f"The user tells me something: {v}.", reply[:1].upper() + reply[1:], None, None, "tell"))
        told.append((v, asks, answer.format(v=v, a=a)))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            turns.append(rng.choice(fillers)(rng, split))
    if len(told) > 1 and rng.random() < 0.3:          # several told in one breath
        tell = " ".join(t.user for t in turns if t.kind == "tell")
        turns = [Turn(tell, "The user tells me some things.", "Thank you, I will remember that.", None, None, "tell")] + \
            [t for t in turns if t.kind != "tell"]
    rng.shuffle(told)
    for v, asks, answer in told[:rng.choice((1, 1, 2))]:
        turns.append(Turn(messy(rng, rng.choice(asks)), f"The user told me before: {v}.", answer,
                          {"type": "contains", "all": [v]}, v, "memory"))
    return turns


def memory_missing(rng, split):
    key, tells, asks, ack, answer = rng.choice(MEMORY)
    return Turn(messy(rng, rng.choice(asks)), "The user has not told me.", "I don't know, you have not told me yet.",
                {"type": "contains", "all": ["not told me"]}, None, "memory")


# ---------------------------------------------------------------- reading a given text

def reading(rng, split):
    """A few made-up facts in the message, and a question about one of them."""
    n1, n2 = words.name(rng, split), words.name(rng, split)
    while n2 == n1:
        n2 = words.name(rng, split)
    rows = []
    for n in (n1, n2):
        t, c, j, o = words.city(rng, split), rng.choice(world.COLOURS), rng.choice(world.JOBS), rng.choice(stories.THINGS)
        rows.append(rng.sample([
            (f"{n} lives in {t}.", f"Where does {n} live?", f"{n} lives in {t}.", t),
            (f"{n} has a {c} {o}.", f"What does {n} have?", f"{n} has a {c} {o}.", o),
            (f"{n} works as {world.article(j)} {j}.", f"What is {n}'s job?", f"{n} is {world.article(j)} {j}.", j),
        ], rng.choice((1, 2, 3))))
    facts = rows[0] + rows[1]
    if rng.random() < 0.5:
        rng.shuffle(facts)
    s, q, a, short = rng.choice(facts)
    text = " ".join(f[0] for f in facts)
    ask = rng.choice(["Read this: {t} {q}", "{t} {q}", "Text: {t}\n\nQuestion: {q}", "{t}\n\n{q}"]).format(t=text, q=q)
    return Turn(ask, f"The text says: {s}", a, {"type": "contains", "all": [short]}, short, "reading")


# ---------------------------------------------------------------- system prompts that matter

STYLES = {
    "one_word": ["Answer in one word.", "Answer with a single word.", "Always answer in one word.",
                 "You answer with exactly one word.", "Reply in one word only.", "Use one word for each answer.",
                 "Give one-word answers.", "You are a helpful assistant. Answer in one word."],
    "upper": ["Answer in capitals.", "Always write in capital letters.", "Write everything in upper case.",
              "Answer in ALL CAPS.", "Use only capital letters.", "Your answers are in capital letters.",
              "You are a helpful assistant. Answer in capitals.", "Reply in uppercase."],
    "lower": ["Answer in small letters.", "Always write in lower case.", "Use only small letters.",
              "Write everything in lowercase.", "Never use capital letters.", "Reply in lowercase."],
    "pirate": ["You are a pirate.", "Talk like a pirate.", "You are a pirate captain. Answer like one.",
               "Speak like a pirate.", "Answer as a pirate would.", "You are a friendly pirate.",
               "Pretend to be a pirate."],
    "robot": ["You are a robot.", "Talk like a robot.", "Speak like a robot.", "Answer as a robot would.",
              "You are a friendly robot.", "Pretend to be a robot."],
    "starts": ["Begin every answer with \"{w}\".", "Start each answer with the word {w}.",
               "Always begin with \"{w}\".", "Every answer must start with {w}.", "Start every reply with \"{w}\"."],
    "ends": ["End every answer with \"{w}\".", "Finish each answer with the word {w}.", "Always end with \"{w}\".",
             "Every answer must end with {w}.", "End every reply with \"{w}\"."],
    "call": ["Call the user {w}.", "Address the user as {w}.", "The user is called {w}. Use the name in every answer.",
             "Always call the user {w}."],
    "always": ["Whatever the user says, answer only \"{w}\".", "Always reply with \"{w}\" and nothing else.",
               "Answer every question with \"{w}\".", "Say only \"{w}\"."],
    "excited": ["End every sentence with an exclamation mark.", "Be very excited and use exclamation marks.",
                "You are very excited!", "Use exclamation marks in place of full stops."],
    "number": ["Answer with the number only.", "Reply with just the number.", "Give only the number as the answer.",
               "Output only the number."],
    "words": ["Write numbers as words.", "Spell out all numbers.", "Give the result in words.",
              "Answer with the number in words."],
    "yes_no": ["Answer only yes or no.", "Reply with yes or no.", "Say only yes or no.",
               "You may only answer yes or no."],
    "bullet": ["Answer as a list with dashes.", "Write your answer as a bullet point.", "Use a bullet point for the answer.",
               "Begin the answer with a dash."],
    "persona": ["You are {w}, {r}.", "Your name is {w}. You are {r}.", "You are called {w} and you are {r}.",
                "Play the role of {w}, {r}."],
}
STYLE_NAMES = list(STYLES)
STYLE_WEIGHTS = [10, 10, 6, 10, 6, 8, 8, 5, 4, 5, 6, 6, 6, 5, 6]
ROLES = ["a wise owl", "a grumpy cook", "a brave knight", "a friendly ghost", "an old sailor", "a clever fox",
         "a polite butler", "a busy baker", "a sleepy cat", "a kind doctor", "a space captain", "a tiny dragon",
         "an honest judge", "a travelling singer"]


def draw_style(rng, split):
    style = rng.choices(STYLE_NAMES, STYLE_WEIGHTS)[0]
    i = rng.randrange(len(STYLES[style]))
    w = words.word(rng, split) if rng.random() < 0.6 else rng.choice(
        ["Captain", "Sir", "Boss", "Indeed", "Well", "Hooray", "Amen", "Over", "Friend", "Moo", "Sure", "Okay"])
    if rng.random() < 0.5:
        w = words.capital(w)
    return style, i, w, rng.choice(ROLES)


def styled(rng, split, drawn=None):
    """A system prompt that changes the answer: (system prompt, Turn with a check). `drawn` (from draw_style)
    keeps the system prompt over several turns."""
    while True:
        style, i, w, role = drawn or draw_style(rng, split)
        system = STYLES[style][i].format(w=w, r=role)
        if style in ("number", "words"):
            t = rng.choice((addition, subtraction))(rng, split)
        elif style == "yes_no":
            t = fact_yes_no(rng, split) if rng.random() < 0.7 else comparison(rng, split)
            if t.short not in ("Yes", "No"):
                continue
        elif style == "persona":
            ask = rng.choice(["Who are you?", "What is your name?", "Tell me who you are.", "Introduce yourself.",
                              "What are you?", "What's your name?"])
            t = Turn(messy(rng, ask), "", f"I am {w}, {role}.", {"type": "contains", "all": [w]}, None, "persona")
        else:
            r = rng.random()
            if style == "one_word":
                t = fact(rng, split) if r < 0.7 else rng.choice((addition, subtraction))(rng, split)
                if " " in t.short:
                    continue
            elif r < 0.6:
                t = fact(rng, split)
            elif r < 0.8:
                t = arithmetic(rng, split)
            elif split.held:
                continue
            else:
                t = rng.choice((small_talk, unknown))(rng, split)
                if "\n" in t.answer:
                    continue
        if split.ok("style", style, i, t.kind, t.short or t.answer[:12]):
            break
    plain = t.answer
    inner = dict(t.check) if t.check else None
    check = {"type": "style", "style": style, "inner": inner}
    if style == "one_word":
        a, note = t.short, "one word"
    elif style == "upper":
        a, note = plain.upper(), "capitals"
    elif style == "lower":
        a, note = plain.lower(), "small letters"
    elif style == "pirate":
        a, note = f"Arr! {plain.rstrip('.!?')}, matey!", "the voice of a pirate"
    elif style == "robot":
        a, note = f"Beep! {plain.rstrip('.!?')}. Boop!", "the voice of a robot"
    elif style == "starts":
        a, note, check["value"] = f"{w} {plain}", f"{w} at the start", w
    elif style == "ends":
        a, note, check["value"] = f"{plain} {w}", f"{w} at the end", w
    elif style == "call":
        a, note, check["value"] = f"{plain.rstrip('.!?')}, {w}.", f"the name {w}", w
    elif style == "always":
        a, note, check = w, f"only {w}", {"type": "style", "style": "always", "value": w}
    elif style == "excited":
        a, note = plain.replace(".", "!").replace("?", "!"), "exclamation marks"
    elif style == "number":
        a, note = t.short, "the number only"
    elif style == "words":
        v = in_words(int(t.short))
        a, note = v[:1].upper() + v[1:] + ".", "words for numbers"
        check = {"type": "style", "style": "words", "value": v}
    elif style == "yes_no":
        a, note = t.short + ".", "yes or no"
    elif style == "bullet":
        a, note = "- " + plain, "a dash"
    else:
        a, note = plain, f"the part of {w}"
    think = f"I must answer with {note}." + (" " + t.think if t.think and style not in ("always", "persona") else "")
    if style == "words":
        think += f" In words: {v}."
    return system, Turn(t.user, think, a, check, None, "style")


NEUTRAL = ["You are a helpful assistant.", "You are a helpful assistant", "You are a friendly assistant.",
           "You are Steel's built-in demo model.", "Answer the questions of the user.", "Be kind and brief.",
           "You are a helpful, honest and harmless assistant.", "Be helpful.", "You are an assistant on Anvil Isle.",
           "Help the user.", "You are a small language model.", "Answer briefly.", "You are a careful assistant.",
           "Answer correctly and politely.", "You are a chat assistant. Be concise."]
