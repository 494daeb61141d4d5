"""Tools and JSON: function signatures, requests that need them, the calls, the results read back, and schemas.

A drawn tool is an OpenAI function description with names that vary from one conversation to the next, so that
the model learns to copy them from the prompt. Everyday tools (weather, mail, files...) come with natural
requests; synthetic tools (verb + noun, made-up parameters) force copying. Tool names, key sets and made-up
values belong to one split only. Must not know ChatML.
"""
import json

import stories
import words
import world
from skills import Turn, pair


class Param:
    """A parameter as drawn for one conversation."""
    __slots__ = ("name", "type", "desc", "enum")

    def __init__(self, name, type_, desc, enum=None):
        self.name, self.type, self.desc, self.enum = name, type_, desc, enum


# ---------------------------------------------------------------- everyday tools
# id: (function names, description, parameters, requests, results). A parameter is (names, type, description, drawer,
# optional phrase or None). A request uses {0} {1}... for the values. A result is (drawer of an object, answer form).

def _int(low, high):
    return lambda rng, split: rng.randint(low, high)


def _pick(*options):
    return lambda rng, split: rng.choice(options)


def _w(function):
    return lambda rng, split: function(rng)


EVERYDAY = [
    ("weather", "get_weather get_current_weather weather fetch_weather weather_lookup getWeather current_weather "
     "lookup_weather check_weather", ["Get the current weather in a city.", "Get the weather.", "Look up the weather.",
                                      "Returns the weather for a place."],
     [("city location place town", "string", "The city", words.city, None),
      ("unit units scale", "string", "The unit of temperature", _pick("celsius", "fahrenheit"), " in {v}")],
     ["What is the weather in {0}?", "How is the weather in {0}?", "What's the weather like in {0}?",
      "Tell me the weather in {0}.", "Weather in {0}, please", "Is it warm in {0}?", "How warm is it in {0}?"],
     [(lambda rng, s: {"temperature": rng.randint(-20, 40), "condition": rng.choice(
         ["sunny", "rain", "snow", "cloudy", "windy", "fog", "clear", "storm"])},
       "The weather in {0}: {temperature} degrees, {condition}.")]),
    ("time", "get_time get_current_time current_time time_in getTime clock world_clock lookup_time",
     ["Get the current time in a city.", "Tell the local time.", "Returns the time for a place."],
     [("city location place timezone", "string", "The city", words.city, None)],
     ["What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"],
     [(lambda rng, s: {"time": words.clock(rng)}, "It is {time} in {0}.")]),
    ("calc", "calculate calculator calc evaluate compute math_eval do_math",
     ["Evaluate an expression.", "Calculate the value of an expression.", "A calculator."],
     [("expression expr formula input", "string", "The expression",
       lambda rng, s: (lambda ab, op: f"{ab[0]} {op} {ab[1]}")(
           pair(rng, s) if rng.random() < 0.4 else (rng.randint(100, 9999), rng.randint(100, 9999)),
           rng.choice("+-*/")), None)],
     ["What is {0}?", "Calculate {0}.", "How much is {0}?", "Compute {0} for me.", "Please work out {0}."],
     [(lambda rng, s: {"result": words.integer(rng)}, "{0} = {result}.")]),
    ("search", "search web_search search_web google lookup find_information searchWeb query_web",
     ["Search the web.", "Find information on the web.", "Run a web search."],
     [("query q text search_term", "string", "What to search for", words.phrase, None)],
     ["Search for {0}.", "Search the web for {0}.", "Find something about {0}.", "Look up {0} on the web.",
      "Can you search for {0}?"],
     [(lambda rng, s: {"title": words.phrase(rng, s, 2, 3), "hits": rng.randint(1, 900)},
       "I found {hits} results. The first is: {title}.")]),
    ("mail", "send_email send_mail email sendEmail mail_send write_email",
     ["Send an email.", "Send a mail to someone.", "Sends an email message."],
     [("to recipient address", "string", "The address", words.email, None),
      ("subject title", "string", "The subject", words.phrase, None)],
     ["Send an email to {0} with the subject \"{1}\".", "Write a mail to {0} about \"{1}\".",
      "Email {0} with the title \"{1}\".", "Mail {0}, subject \"{1}\"."],
     [(lambda rng, s: {"status": "sent"}, "The email to {0} was sent."),
      (lambda rng, s: {"error": "unknown address"}, "The tool reported an error: unknown address.")]),
    ("message", "send_message message text_user sendMessage notify post_message",
     ["Send a message to a person.", "Send a short message.", "Message someone."],
     [("to name recipient person", "string", "The person", words.name, None),
      ("text message body content", "string", "The text", words.phrase, None)],
     ["Send {0} the message \"{1}\".", "Tell {0}: \"{1}\"", "Message {0} with \"{1}\".", "Text {0} \"{1}\"."],
     [(lambda rng, s: {"status": "sent"}, "The message to {0} was sent.")]),
    ("timer", "set_timer start_timer timer setTimer countdown create_timer",
     ["Set a timer.", "Start a timer for some minutes.", "Count down."],
     [("minutes duration length mins", "integer", "The minutes", _int(1, 180), None)],
     ["Set a timer for {0} minutes.", "Start a {0} minute timer.", "Wake me in {0} minutes.", "Timer: {0} minutes"],
     [(lambda rng, s: {"status": "started"}, "The timer is set for {0} minutes.")]),
    ("alarm", "set_alarm alarm setAlarm add_alarm create_alarm wake_up",
     ["Set an alarm.", "Set an alarm clock."],
     [("time at when", "string", "The time", _w(words.clock), None)],
     ["Set an alarm for {0}.", "Wake me up at {0}.", "Alarm at {0}, please.", "I must get up at {0}."],
     [(lambda rng, s: {"status": "ok"}, "The alarm is set for {0}.")]),
    ("remind", "add_reminder remind create_reminder set_reminder addReminder",
     ["Add a reminder.", "Remind the user of something."],
     [("text title task note", "string", "What to remember", words.phrase, None),
      ("date day when due", "string", "The date", _w(words.date), None)],
     ["Remind me of \"{0}\" on {1}.", "Add a reminder \"{0}\" for {1}.", "Set a reminder for {1}: \"{0}\""],
     [(lambda rng, s: {"id": rng.randint(1, 999)}, "I added reminder {id}.")]),
    ("convert", "convert_currency currency exchange convertCurrency convert_money fx",
     ["Convert money.", "Convert an amount from one currency to another."],
     [("amount value sum", "number", "The amount", lambda rng, s: rng.choice((rng.randint(1, 999), words.decimal(rng))), None),
      ("from from_currency source", "string", "The currency", _pick("EUR", "USD", "GBP", "JPY", "CHF", "SEK"), None),
      ("to to_currency target", "string", "The other currency", _pick("PLN", "NOK", "DKK", "INR", "CAD", "AUD"), None)],
     ["Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}."],
     [(lambda rng, s: {"result": words.decimal(rng)}, "{0} {1} is {result} {2}.")]),
    ("translate", "translate translate_text translator translateText",
     ["Translate a text.", "Translate text into a language."],
     [("text input phrase", "string", "The text", words.phrase, None),
      ("language target lang to", "string", "The language",
       _pick("French", "German", "Spanish", "Italian", "Polish", "Dutch", "Greek", "Latin", "Swedish"), None)],
     ["Translate \"{0}\" into {1}.", "How do you say \"{0}\" in {1}?", "Say \"{0}\" in {1}."],
     [(lambda rng, s: {"text": words.phrase(rng, s, 2, 4)}, "In {1}: {text}.")]),
    ("read", "read_file open_file cat readFile file_read view_file",
     ["Read a file.", "Return the contents of a file.", "Open a file and read it."],
     [("path file filename file_path", "string", "The path", words.path, None)],
     ["Read the file {0}.", "Show me {0}.", "What is in {0}?", "Open {0}.", "Print the contents of {0}."],
     [(lambda rng, s: {"content": words.phrase(rng, s, 2, 5)}, "The file {0} says: {content}.")]),
    ("delete", "delete_file remove_file rm deleteFile unlink", ["Delete a file.", "Remove a file from the disk."],
     [("path file filename target", "string", "The path", words.path, None)],
     ["Delete {0}.", "Remove the file {0}.", "Please delete the file {0}."],
     [(lambda rng, s: {"status": "deleted"}, "The file {0} was deleted.")]),
    ("list", "list_files ls list_dir listFiles dir list_directory", ["List the files of a folder.", "List a directory."],
     [("path folder directory dir", "string", "The folder", lambda rng, s: "/" + words.made_up(rng, s), None)],
     ["List the files in {0}.", "What files are in {0}?", "Show the folder {0}."],
     [(lambda rng, s: {"files": [words.path(rng, s).split("/")[-1] for _ in range(rng.randint(1, 3))]},
       "The files in {0} are: {files}.")]),
    ("music", "play_song play_music play playMusic start_music", ["Play a song.", "Play music."],
     [("title song track", "string", "The title", words.phrase, None),
      ("volume loudness level", "integer", "The volume", _int(1, 100), " at volume {v}")],
     ["Play the song \"{0}\".", "Play \"{0}\".", "I want to hear \"{0}\".", "Put on \"{0}\"."],
     [(lambda rng, s: {"status": "playing"}, "Now playing {0}.")]),
    ("light", "set_light turn_light switch_light setLight light_control lamp",
     ["Switch a light.", "Turn the light in a room on or off."],
     [("room place where", "string", "The room",
       lambda rng, s: rng.choice(["kitchen", "hall", "bedroom", "attic", "garage", "bathroom", "cellar", "office"])
       if rng.random() < 0.6 and not s.held else words.made_up(rng, s), None),
      ("on state power", "boolean", "On or off", _pick(True, False), None)],
     ["Turn {1} the light in the {0}.", "Switch {1} the {0} light.", "Please turn the {0} light {1}."],
     [(lambda rng, s: {"status": "ok"}, "The light in the {0} is {1}.")]),
    ("stock", "get_stock_price stock_price quote getStockPrice stock get_quote", ["Get the price of a stock.",
                                                                               "Look up a stock price."],
     [("symbol ticker stock name", "string", "The symbol",
       lambda rng, s: "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5))), None)],
     ["What is the price of {0}?", "How much is {0} stock?", "Get the stock price of {0}.", "Quote {0}, please."],
     [(lambda rng, s: {"price": words.decimal(rng), "currency": "USD"}, "{0} costs {price} {currency}.")]),
    ("book", "book_table reserve_table make_reservation bookTable reserve",
     ["Book a table.", "Reserve a table at a restaurant."],
     [("restaurant place name", "string", "The restaurant", lambda rng, s: words.capital(words.made_up(rng, s)), None),
      ("people guests persons party_size", "integer", "How many people", _int(1, 20), None),
      ("time at when", "string", "The time", _w(words.clock), None)],
     ["Book a table at {0} for {1} people at {2}.", "Reserve a table for {1} at {0} at {2}.",
      "I want to eat at {0} with {1} people at {2}."],
     [(lambda rng, s: {"code": words.code(rng)}, "Your table at {0} is booked. The code is {code}."),
      (lambda rng, s: {"error": "no free table"}, "The tool reported an error: no free table.")]),
    ("route", "get_route directions route find_route getDirections navigate", ["Find a route.", "Get directions."],
     [("start from origin", "string", "The start", words.city, None),
      ("end to destination goal", "string", "The goal", words.city, None)],
     ["How do I get from {0} to {1}?", "Find a route from {0} to {1}.", "Show me the way from {0} to {1}.",
      "How far is it from {0} to {1}?"],
     [(lambda rng, s: {"km": rng.randint(1, 3000), "hours": rng.randint(1, 48)},
       "From {0} to {1} it is {km} km and takes {hours} hours.")]),
    ("define", "define_word dictionary define lookup_word getDefinition", ["Look up a word.", "Define a word."],
     [("word term text", "string", "The word", words.word, None)],
     ["What does {0} mean?", "Define {0}.", "Look up the word {0}.", "What is the meaning of {0}?"],
     [(lambda rng, s: {"meaning": words.phrase(rng, s, 2, 4)}, "{0} means: {meaning}.")]),
    ("order", "get_order order_status track_order getOrder check_order", ["Get the state of an order.", "Track an order."],
     [("order_id id number order", "string", "The order", _w(words.code), None)],
     ["Where is my order {0}?", "What is the state of order {0}?", "Track order {0}.", "Check order {0}, please."],
     [(lambda rng, s: {"status": rng.choice(["shipped", "packed", "lost", "delivered", "paid"])}, "Order {0} is {status}.")]),
    ("user", "get_user find_user user_info getUser lookup_user", ["Get a user by id.", "Look up a user."],
     [("id user_id uid number", "integer", "The id", _int(1, 99999), None)],
     ["Who is user {0}?", "Look up the user {0}.", "Get user {0}.", "Show me the user with id {0}."],
     [(lambda rng, s: {"name": words.name(rng, s), "city": words.city(rng, s)}, "User {0} is {name} from {city}.")]),
    ("random", "random_number roll randint randomNumber pick_number", ["Get a random number.", "Roll a number."],
     [("low min start", "integer", "The lowest", _int(0, 50), None), ("high max end", "integer", "The highest", _int(51, 999), None)],
     ["Give me a random number from {0} to {1}.", "Roll a number between {0} and {1}.", "Pick a number from {0} to {1}."],
     [(lambda rng, s: {"number": words.integer(rng)}, "The number is {number}.")]),
    ("run", "run_command shell exec bash run_shell execute", ["Run a command.", "Run a shell command."],
     [("command cmd code", "string", "The command",
       lambda rng, s: rng.choice(["ls", "cat", "make", "git log", "python", "echo", "grep", "cd", "touch", "head"]) + " " +
       words.made_up(rng, s), None)],
     ["Run `{0}`.", "Run the command `{0}`.", "Please execute `{0}`.", "Execute `{0}`"],
     [(lambda rng, s: {"output": words.phrase(rng, s, 1, 3), "exit_code": 0}, "The command printed: {output}.")]),
]

VERBS = """get set add find make open close start stop book send move copy count check list buy sell rent lock paint
clean cook draw fetch fill fix grow hide join lift load mark mix name order pack park pick plan plant pull push rate
read ring save scan sort swap tag test track turn wash wrap write update create remove""".split()
NOUNS = """account album badge bed bill bird boat boiler box branch bridge camera card castle channel clock cloud coach
contract crate crew desk device door dragon drone engine event farm fence flight forge garden gate ghost goat guest
harbour hotel invoice island jar job kettle kite label ladder lamp lesson letter library lift machine map market meal
meeting menu mill mission motor nest note oven package page parcel parking patient photo piano pipe planet plant
playlist poem pool port post potion prize project pump queue radio recipe record report robot roof room rope sail
sample sauna scene score seat sensor server shelf ship shop signal ski sled song spell stage star statue stove
student suitcase tank task taxi team tent ticket tower toy track trail train trip truck valve van vault video visit
vote wagon wall window wizard""".split()
GENERIC = "size level mode count speed owner label color amount reason source target group rank depth width height tag " \
          "note stage limit offset index status format title key value type kind code zone port host user token".split()


def describe(rng, name, desc, params, required):
    """The OpenAI description of a function, in the forms that clients send."""
    props = {}
    for p in params:
        d = {"type": p.type}
        if p.desc and rng.random() < 0.7:
            d["description"] = p.desc
            if rng.random() < 0.12:               # an example in the description is not what is asked for
                d["description"] += rng.choice([", e.g. ", ", for example ", " such as "]) + rng.choice(
                    ["San Francisco, CA", rng.choice(words.CITIES), rng.choice(stories.THINGS), str(words.integer(rng))])
        if p.enum:
            d["enum"] = p.enum
        props[p.name] = d
    schema = {"type": "object", "properties": props}
    if required or rng.random() < 0.5:
        schema["required"] = required
    if rng.random() < 0.05:
        schema["additionalProperties"] = False
    f = {"name": name}
    if desc and rng.random() < 0.92:
        f["description"] = desc
    f["parameters"] = schema
    return {"type": "function", "function": f}


class Call:
    """A tool with a request for it: the description, the arguments asked for, and the request in words."""
    __slots__ = ("tool", "name", "args", "ask", "results", "shown", "topic", "again")

    def copy(self, ask, args, shown):
        """The same tool asked for once more, with other arguments."""
        c = Call()
        c.tool, c.name, c.results, c.topic, c.again = self.tool, self.name, self.results, self.topic, self.again
        c.ask, c.args, c.shown = ask, args, shown
        return c


def everyday(rng, split):
    id_, names, descs, params, asks, results = rng.choice(EVERYDAY)
    c = Call()
    c.topic, c.name, c.results = id_, rng.choice(names.split()), results
    ps, required, plan = [], [], []
    for pnames, type_, desc, value, optional in params:
        n = rng.choice([x for x in pnames.split() if all(x != p.name for p in ps)])
        if optional and rng.random() < 0.4:
            continue
        enum = ["celsius", "fahrenheit"] if optional and type_ == "string" else None
        ps.append(Param(n, type_, desc, enum))
        if not optional:
            required.append(n)
        plan.append((n, value, optional))

    def request():
        args, shown, extra = {}, [], ""
        for n, value, optional in plan:
            v = value(rng, split)
            if not optional:
                args[n] = v
                shown.append(("on" if v else "off") if isinstance(v, bool) else v)
            elif rng.random() < 0.5:
                args[n] = v
                extra += optional.format(v=v)
        form = rng.choice(asks).format(*shown)
        if extra:
            end = form[-1] if form[-1] in ".?" else ""
            form = form[:len(form) - len(end)] + extra + end
        return form, args, shown

    c.again = lambda: c.copy(*request())
    c.ask, c.args, c.shown = request()
    if rng.random() < 0.15:
        rng.shuffle(ps)
    c.tool = describe(rng, c.name, rng.choice(descs), ps, required)
    return c


def value_of(rng, split, type_):
    if type_ == "integer":
        return words.integer(rng)
    if type_ == "number":
        return words.decimal(rng)
    if type_ == "boolean":
        return rng.random() < 0.5
    r = rng.random()
    if r < 0.27:
        return words.word(rng, split)
    if r < 0.3:
        return str(words.integer(rng))            # digits where the type says string
    return (words.name(rng, split) if r < 0.45 else words.city(rng, split) if r < 0.55 else words.date(rng) if r < 0.62
            else words.code(rng) if r < 0.7 else words.clock(rng) if r < 0.75 else words.email(rng, split) if r < 0.8
            else words.path(rng, split) if r < 0.87 else words.phrase(rng, split))


def quoted(rng, v):
    """How a value stands in a request: strings of several words always in quotes."""
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, str) and (" " in v or rng.random() < 0.4):
        return f'"{v}"'
    return str(v)


def synthetic(rng, split):
    """verb + noun with any parameters; the name belongs to the split."""
    c = Call()
    while True:
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        if rng.random() < 0.15:
            noun = words.made_up(rng, split, 1, 2)
        if rng.random() < 0.08:
            verb = words.made_up(rng, split, 1, 2)
        if split.ok("tool", verb, noun):
            break
    c.topic = noun
    r = rng.random()
    c.name = (f"{verb}_{noun}" if r < 0.55 else verb + noun.capitalize() if r < 0.75 else f"{noun}_{verb}" if r < 0.9
              else f"{noun}.{verb}" if r < 0.95 else f"{verb}-{noun}")
    ps, plan, required = [], [], []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3))):
        pname = rng.choice(GENERIC) if rng.random() < 0.7 else words.made_up(rng, split, 1, 2)
        if rng.random() < 0.12:
            pname = pname + "_" + rng.choice(GENERIC)
        if any(p.name == pname for p in ps):
            continue
        type_ = rng.choices(("string", "integer", "number", "boolean"), (60, 25, 6, 9))[0]
        enum = None
        if type_ == "string" and rng.random() < 0.15:
            enum = [words.word(rng, split) for _ in range(rng.randint(2, 4))]
        ps.append(Param(pname, type_, rng.choice([f"The {pname} of the {noun}", f"The {pname}", "", f"{pname} to use"]),
                        enum))
        if rng.random() < 0.15 and len(ps) > 1:
            continue                              # optional and never asked for
        plan.append(ps[-1])
        required.append(pname)

    def request():
        args, says = {}, []
        for p in plan:
            v = args[p.name] = rng.choice(p.enum) if p.enum else value_of(rng, split, p.type)
            shown = p.name.replace("_", " ") if rng.random() < 0.3 else p.name
            says.append(f"{shown} {quoted(rng, v)}" if rng.random() < 0.7 else f"{shown} = {quoted(rng, v)}"
                        if rng.random() < 0.5 else f"{shown}: {quoted(rng, v)}")
        start = rng.choice([f"{verb.capitalize()} the {noun}", f"Please {verb} the {noun}", f"Can you {verb} the {noun}",
                            f"{verb.capitalize()} {world.article(noun)} {noun}", f"I want to {verb} the {noun}",
                            f"Use {c.name}", f"Call {c.name}", f"{verb} the {noun}"])
        if says:
            start += " " + rng.choice(["with", "with", "using", "and set"]) + " " + \
                (" and ".join(says) if rng.random() < 0.7 else ", ".join(says))
        return start + ("?" if start.startswith("Can") else rng.choice([".", ".", "", "!"])), args, []

    c.results = [(generic_result, None)]
    c.again = lambda: c.copy(*request())
    c.ask, c.args, c.shown = request()
    order = list(ps)
    if rng.random() < 0.2:
        rng.shuffle(order)
    c.tool = describe(rng, c.name, rng.choice([f"{verb.capitalize()} the {noun}.",
                                               f"{verb.capitalize()} {world.article(noun)} {noun}.",
                                               f"Use this to {verb} the {noun}."]), order,
                      required if rng.random() < 0.8 else [])
    return c


def generic_result(rng, split):
    out = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        k = rng.choice(GENERIC + ["id", "state", "price", "result", "total"]) if rng.random() < 0.8 else \
            words.made_up(rng, split, 1, 2)
        out[k] = value_of(rng, split, rng.choice(("string", "string", "integer", "integer", "number")))
    return out


def say_value(v):
    if isinstance(v, list):
        return ", ".join(map(say_value, v))
    return str(v).lower() if isinstance(v, bool) else str(v)


def result_of(rng, split, c):
    """A tool response (text) for the call and the answer that reads it back."""
    make, form = rng.choice(c.results)
    obj = make(rng, split)
    if form is None:
        if rng.random() < 0.06:
            e = words.phrase(rng, split, 2, 3)
            return {"error": e}, f"The tool reported an error: {e}."
        bits = [f"the {k} is {say_value(v)}" for k, v in obj.items()]
        text = " and ".join(bits) if len(bits) < 3 else ", ".join(bits[:-1]) + " and " + bits[-1]
        return obj, text[:1].upper() + text[1:] + "."
    return obj, form.format(*c.shown, **{k: say_value(v) for k, v in obj.items()})


def drawn(rng, split):
    return everyday(rng, split) if rng.random() < 0.42 else synthetic(rng, split)


def toolbox(rng, split, need, draw=drawn):
    """The tools of one conversation: those needed and some others with other names and topics, shuffled."""
    box = list({c.name: c for c in need}.values())
    n = rng.choices((1, 2, 3, 4, 5), (25, 30, 25, 15, 5))[0]
    names = {c.name for c in box}
    topics = {c.topic for c in box}
    tries = 0
    while len(box) < n and tries < 20:
        tries += 1
        o = draw(rng, split)
        # a distractor may share a verb or a noun with the tool in need, but never both, and not an everyday topic
        if o.name in names or o.topic in topics:
            continue
        names.add(o.name)
        topics.add(o.topic)
        box.append(o)
    rng.shuffle(box)
    return [c.tool for c in box]


def call_think(rng, c):
    if not c.args:
        return f"I can use {c.name}. It needs no arguments."
    return f"I can use {c.name} with " + " and ".join(f"{k} {say_value(v)}" for k, v in c.args.items()) + "."


# ---------------------------------------------------------------- JSON to a schema

KEYS = """name age city color size price count title author year owner job pet food hobby country language level score
rank weight height brand model street phone email team role status kind material shape speed length""".split()


def schema_value(rng, split, key, type_):
    if type_ == "string":
        if key in ("name", "author", "owner", "pet"):
            return words.name(rng, split)
        if key in ("city", "country", "street", "team"):
            return words.city(rng, split)
        if key == "color":
            return rng.choice(world.COLOURS) if not split.held or rng.random() < 0.5 else words.made_up(rng, split)
        if key == "job":
            return rng.choice(world.JOBS)
        if key == "email":
            return words.email(rng, split)
        if key == "title":
            return words.phrase(rng, split, 2, 3)
        return words.word(rng, split)
    if type_ == "array":
        return [words.word(rng, split) for _ in range(rng.randint(1, 3))]
    return value_of(rng, split, type_)


NUMERIC = {"age": "integer", "price": "number", "count": "integer", "year": "integer", "level": "integer",
           "score": "integer", "rank": "integer", "weight": "number", "height": "number", "speed": "integer",
           "length": "integer"}
SYSTEM = ["Answer with JSON that matches this schema: {s}", "Reply only with JSON for this schema:\n{s}",
          "Extract the data as JSON. Schema: {s}", "Return a JSON object that follows this schema:\n{s}",
          "Output JSON only. The schema is {s}", "Use this JSON schema for your answer: {s}"]


def schema_case(rng, split):
    """(system prompt or None, Turn): a small schema and a text; the answer is the JSON object."""
    while True:
        n = rng.choice((1, 2, 2, 3, 3, 4))
        keys = []
        while len(keys) < n:
            k = rng.choice(KEYS) if rng.random() < 0.75 else words.made_up(rng, split, 1, 2)
            if k not in keys:
                keys.append(k)
        if split.ok("schema", *keys):
            break
    props, value, say = {}, {}, []
    for k in keys:
        type_ = NUMERIC.get(k) or rng.choices(("string", "integer", "boolean", "array"), (72, 12, 8, 8))[0]
        d = {"type": type_}
        v = schema_value(rng, split, k, type_)
        if type_ == "array":
            d = {"type": "array", "items": {"type": "string"}}
        elif type_ == "string" and rng.random() < 0.1:
            enum = [words.word(rng, split) for _ in range(rng.randint(2, 3))]
            v = rng.choice(enum)
            d = {"type": "string", "enum": enum}
        props[k], value[k] = d, v
        shown = say_value(v)
        say.append(rng.choice([f"The {k} is {shown}.", f"{k}: {shown}.", f"{k.capitalize()}: {shown}.",
                               f"The {k} is {shown}."]))

    if rng.random() < 0.75:
        schema = {"type": "object", "properties": props, "required": keys}
        if rng.random() < 0.1:
            schema["additionalProperties"] = False
        text = json.dumps(schema, ensure_ascii=False)
    else:
        text = "{" + ", ".join(f'"{k}": {"[string]" if d["type"] == "array" else d["type"]}' for k, d in props.items()) + "}"
    schema = {"type": "object", "properties": props, "required": keys}
    order = list(say)
    if rng.random() < 0.4:
        rng.shuffle(order)
    noise = []
    if rng.random() < 0.3:
        noise = [rng.choice(["Here is what I know.", "Please note this down.", "Look at this.", "I met someone today.",
                             rng.choice(stories.WEATHER) + "."])]
    data = " ".join(noise + order)
    system = rng.choice(SYSTEM).format(s=text)
    answer = json.dumps(value, ensure_ascii=False)
    check = {"type": "json", "value": value, "schema": schema}
    think = "I fill in the schema. " + " ".join(f"{k}: {say_value(v)}." for k, v in value.items())
    if rng.random() < 0.75:
        return system, Turn(data, think, answer, check, None, "schema")
    return None, Turn(f"{system}\n\n{data}" if rng.random() < 0.5 else f"{data}\n\n{system}", think, answer, check, None,
                      "schema")
