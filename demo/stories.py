"""Short stories: a hero, a place, a thing, a trouble and an ending, from a grammar of sentences.

The skeleton of a story is (hero kind, place, thing, plot); the held-out split owns some skeletons and the
training split the others. Around the skeleton every sentence has several forms and free slots, so that no
two stories are alike. Owns the story vocabulary. Must not know about chat.
"""

GIRLS = """Ada Alma Anna Bella Betty Bonnie Carla Celia Cora Daisy Della Edith Ella Emma Etta Fern Flora Gemma
Hanna Helga Ida Inga Iris Jana Josie Julia Kara Katja Lena Lila Lucy Luna Mabel Maja Marta Mina Molly Nadia Nina
Nora Olga Pearl Petra Pia Polly Ruby Ruth Sadie Sally Sofia Stella Susi Thea Tina Toni Ursula Vicky Willa Zoe"""
BOYS = """Adam Albin Anton Arno Basil Ben Boris Carl Caspar Colin Conny Daniel David Dirk Emil Erik Ernest Finn
Frank Fritz Georg Gus Hans Harry Henry Igor Ivan Jack Jakob Jonas Karl Kurt Lars Leo Linus Louis Lukas Max Milo
Moritz Nils Noah Oliver Oscar Otto Paul Peter Quentin Ralf Robin Rolf Sam Simon Stefan Theo Tim Tom Victor Willi"""
GIRLS, BOYS = GIRLS.split(), BOYS.split()

KINDS = """fox bear hare mole otter badger squirrel hedgehog beaver raven sparrow swan stork heron lynx deer
donkey goat lamb mouse rat cat dog puppy kitten pony calf frog toad newt lizard turtle snail beetle cricket
butterfly firefly spider bat owl eagle pigeon duckling penguin seal whale dolphin crab dragon giant dwarf
goblin troll witch wizard knight prince princess robot pirate sailor miller baker smith tailor shepherd
fisher gardener painter clown juggler tinker weaver carpenter girl boy elephant tiger lion monkey zebra giraffe
camel kangaroo koala panda walrus octopus lobster salmon trout goose rooster turkey peacock parrot woodpecker
nightingale hawk falcon crow magpie wasp bee ant moth caterpillar grasshopper dragonfly worm salamander crocodile
mermaid unicorn phoenix ghost vampire fairy elf gnome monk nun judge lawyer soldier captain cook waiter dancer
singer poet inventor explorer hermit beggar merchant blacksmith cobbler cooper chimneysweep postman milkmaid
grandmother grandfather uncle aunt twin orphan""".split()
FEMALE = ["girl", "princess", "witch", "mermaid", "nun", "milkmaid", "grandmother", "aunt"]
MALE = ["boy", "prince", "wizard", "knight", "monk", "grandfather", "uncle", "postman"]
ADJ = """little brave clever shy curious kind gentle lonely cheerful stubborn quick quiet lazy proud honest
patient clumsy hungry sleepy grumpy friendly careful bold polite noisy dreamy young old tiny tall thin round
merry playful silly wise fearless faithful jolly restless thoughtful generous greedy jealous timid cunning dizzy
elegant fluffy freckled furry gloomy graceful handsome humble hasty joyful limping messy modest nimble peaceful
plump pale ragged rough scruffy serious sharp sleek solemn sturdy tender truthful ugly vain wild weary witty
zealous mighty wrinkled barefoot blind bearded""".split()
PLACES = [
    ("in", "a green valley"), ("in", "a deep forest"), ("by", "a silver lake"), ("on", "a windy hill"),
    ("in", "a small village"), ("in", "an old castle"), ("near", "the stone bridge"), ("by", "the sea"),
    ("on", "a rocky island"), ("in", "a sunny meadow"), ("under", "a tall oak tree"), ("in", "a dusty attic"),
    ("in", "a busy harbour"), ("on", "a quiet farm"), ("in", "a snowy mountain hut"), ("behind", "the old mill"),
    ("in", "a crooked tower"), ("on", "the edge of the desert"), ("in", "a hidden garden"), ("at", "the inn"),
    ("in", "a warm cave"), ("by", "a cold river"), ("in", "the royal palace"), ("on", "a wooden ship"),
    ("in", "a foggy swamp"), ("beside", "the railway"), ("in", "the market square"), ("near", "a waterfall"),
    ("in", "a cottage of straw"), ("in", "an empty lighthouse"), ("below", "the great cliff"),
    ("in", "a narrow street"), ("in", "the town of clocks"), ("on", "the cloud mountain"),
    ("in", "a field of sunflowers"), ("in", "the night market"),
]
THINGS = """lantern key drum violin kite compass map mirror teapot spoon ladder rope bucket basket blanket
pillow candle bell whistle trumpet flute ring crown necklace button needle thread hammer anvil nail saw wheel
cart sled boat paddle net hook lamp clock watch letter book pencil brush painting puppet doll ball marble coin
purse hat scarf glove boot coat umbrella bottle jar plate cup kettle pan broom shovel rake seed acorn apple
pear plum nut cake loaf pie cookie pumpkin feather shell pearl stone crystal egg nest flag sword shield
telescope ticket bicycle chair table carpet box chest barrel sack trunk suitcase wagon saddle bridle horseshoe
chain lock bolt hinge pulley spring gear lever axe spade fork knife sickle scythe plough wheelbarrow bench stool
cradle bed mattress curtain cushion quilt towel sponge soap comb ribbon bracelet brooch medal locket amulet wand
potion cauldron scroll diary parchment quill inkwell stamp envelope postcard newspaper harp fiddle banjo accordion
piano tambourine xylophone gong hourglass sundial thermometer magnet lens spyglass anchor sail mast oar raft canoe
lifebelt fishbone snowball icicle pinecone chestnut mushroom turnip cabbage carrot onion melon cherry peach lemon
orange walnut pretzel pancake waffle muffin honeycomb jam cheese sausage lollipop balloon rattle yo-yo puzzle domino
dice chessboard marionette mask cape apron sandal slipper sock mitten belt buckle cane crutch lampshade doorknob
birdcage beehive flowerpot fountain statue""".split()
THING_ADJ = """golden silver wooden old new red blue green yellow shiny rusty broken tiny huge heavy light
magic strange beautiful simple cracked painted warm soft round striped precious secret""".split()
WEATHER = ["The sun was shining", "A cold wind was blowing", "Snow was falling", "It was raining softly",
           "Thick fog lay over the land", "The moon stood high", "It was a hot afternoon",
           "Thunder rolled in the distance", "The first leaves were falling", "It was a clear morning",
           "Grey clouds filled the sky", "The stars were out"]
OPEN = ["Once upon a time there was", "Long ago there lived", "There once was", "Many years ago there lived",
        "One spring there was", "In the old days there lived", "Not so long ago there was",
        "Far away from here there lived"]
LIKES = ["sing old songs", "count the stars", "bake small cakes", "climb the highest tree", "collect shells",
         "listen to the rain", "tell jokes", "watch the clouds", "dance in the morning", "swim in the river",
         "draw pictures in the sand", "read by the fire", "build towers of stones", "play the flute",
         "sleep until noon", "plant flowers", "help the neighbours", "chase butterflies", "ask questions",
         "walk along the shore", "cook soup for everyone", "repair old clocks", "whistle to the birds",
         "bathe in the moonlight", "braid long ropes", "study old maps", "polish copper pots", "juggle three plums",
         "practise handstands", "gather firewood", "roast potatoes", "invent machines", "recite poems", "feed the sparrows",
         "mend torn nets", "peel oranges", "sweep the yard", "balance on fences", "imitate owls", "skip over puddles",
         "trade stamps", "knit long socks", "sketch castles", "tickle the goats", "yodel in the hills",
         "carve little animals", "race the wind", "hide behind the barn", "learn new words", "ride on the cart"]
FEEL_BAD = ["sad", "worried", "angry", "afraid", "tired", "puzzled", "upset", "ashamed", "nervous", "alone"]
FEEL_GOOD = ["happy", "proud", "glad", "calm", "thankful", "full of joy", "relieved", "delighted", "warm inside"]
SAID = ["said", "cried", "whispered", "answered", "called", "shouted", "murmured", "replied"]
MOVE = ["ran", "walked", "hurried", "crept", "rushed", "wandered", "marched", "tiptoed", "climbed", "travelled"]
GOAL = ["to the village", "over the hill", "through the forest", "along the river", "to the market",
        "across the bridge", "down the lane", "around the pond", "up the mountain", "past the mill",
        "into the valley", "to the harbour"]
TIMES = ["One day", "One morning", "One evening", "One night", "The next day", "On a Sunday", "In the autumn",
         "Early one morning", "Just before winter", "That summer", "After supper", "At noon"]
MORALS = ["A friend is worth more than gold.", "Small steps lead far.", "It is good to ask for help.",
          "Kindness always comes back.", "Patience opens many doors.", "Nobody is too small to help.",
          "A shared meal tastes better.", "The truth is the shortest way.", "Courage begins with one step.",
          "Those who listen learn the most.", "Even a giant needs a friend.", "Work done together is light.",
          "A promise should be kept.", "Every storm comes to an end."]
GARMENTS = """jacket cloak shirt skirt dress vest sweater bonnet cap helmet kilt robe shawl overcoat tunic turban
veil waistcoat pyjamas raincoat""".split()
HUES = "red blue green yellow purple orange white black brown pink grey crimson golden silver turquoise violet " \
       "scarlet ivory emerald amber".split()
SMELLS = """cinnamon lavender smoke pine honey seaweed leather garlic vanilla thyme mint roses tar hay ginger coffee
lilac moss rain pepper""".split()
SOUNDS = ["a hammer", "a distant bell", "a choir", "a waterwheel", "a flock of geese", "an organ", "a creaking gate",
          "a snoring giant", "a kettle", "an echo", "a hundred crickets", "a squeaking wheel", "a lonely horn",
          "a bubbling brook", "a rattling cart", "a purring engine", "a crackling stove", "a howling wolf"]
PLANTS = """birch willow maple beech cedar fir larch elm ash hazel poplar linden ivy fern thistle poppy daisy tulip
rose violet clover nettle bramble heather reed""".split()
DISHES = """soup stew porridge bread butter pudding omelette noodles beans lentils rice salad custard dumplings gravy
toast marmalade cocoa lemonade cider tea milk biscuits gingerbread""".split()
DETAILS = ["{He} wore {a1} {hue} {garment} in every weather.", "The air smelled of {smell} and {smell2}.",
           "From far away came the sound of {sound}.", "By the door grew an ancient {plant}.",
           "For breakfast there was {dish}, and for supper {dish2}.", "Everybody knew {his} {hue} {garment}.",
           "In spring the {plant} bloomed, and the nights smelled of {smell}.",
           "Sometimes the wind brought the sound of {sound}.", "{His} favourite meal was {dish} with {dish2}.",
           "{He} kept a dried {plant} leaf in the pocket of {his} {hue} {garment}."]
ENDS = ["From that day on they were the best of friends.", "They laughed until the stars came out.",
        "That night everyone slept well.", "And so the day ended with a feast.",
        "They lived in peace for many years.", "The whole village talked about it for weeks.",
        "They shared bread and honey by the fire.", "And if you listen closely, you can still hear them sing.",
        "Nobody ever forgot that day.", "Then they went home together under the moon.",
        "They danced until the candles burned down.", "It was the best day of the year."]

# A plot is a list of beats; a beat is a list of forms. Slots: {N} hero's name, {he} {his} {him}, {K} hero's
# kind, {T} the thing, {aT} the thing with article and adjective, {H} helper's name, {h} helper's kind with
# article, {bad} {good} feelings, {move} {goal} {said} {w} weather, {where} place with preposition.
PLOTS = {
    "lost": [
        ["{time} {N} lost {his} {T}.", "{time} the {T} was gone.", "{time} {N} could not find {his} {T} anywhere."],
        ["{He} looked under the bed and behind the door, but it was not there.",
         "{He} searched every corner, but found only dust.", "{He} turned every stone, but the {T} did not appear."],
        ["{N} met {h} called {H}. \"Have you seen my {T}?\" {N} asked.",
         "Then {h} called {H} came by. \"Why are you so {bad}?\" {H} asked."],
        ["\"I saw it {goal2},\" {said} {H}. \"Follow me!\"", "\"Let us look together,\" {said} {H}."],
        ["They {move} {goal}, and there, in the tall grass, lay the {T}.",
         "They {move} {goal} and found the {T} under a bush.",
         "At last they found the {T} in the hollow of a tree."],
        ["{N} was {good} and gave {H} a big hug.", "{N} was {good} and thanked {H} three times."]],
    "broken": [
        ["{time} the {T} broke into two pieces.", "{time} {N} dropped the {T}, and it broke.",
         "{time} the {T} stopped working."],
        ["{N} tried to mend it with glue, but it fell apart again.", "{N} tried to fix it with string, but it was no use.",
         "{He} shook it and kicked it, but nothing helped."],
        ["{N} felt {bad}. {H}, {h} who lived next door, heard the noise.",
         "{N} sat down and felt {bad}. Then {H}, {h} from the next house, knocked at the door."],
        ["\"Do not worry,\" {said} {H}. \"I have a good hammer and steady hands.\"",
         "\"Give it to me,\" {said} {H}. \"I know how such things are made.\""],
        ["{H} worked all night, and in the morning the {T} was as good as new.",
         "They worked side by side until the {T} was whole again."],
        ["{N} was {good}. {He} promised to be more careful.", "{N} was {good} and baked a cake for {H}."]],
    "stranger": [
        ["{time} a stranger came. It was {h} called {H}.", "{time} {h} called {H} knocked at the door."],
        ["{H} was cold and hungry. {N} was {bad} at first.", "Nobody wanted to talk to {H}. {N} was a little {bad} too."],
        ["\"May I warm myself?\" {said} {H}.", "\"I have walked {goal} all day,\" {said} {H}."],
        ["{N} thought for a moment and then opened the door.", "{N} made room by the fire and shared {his} supper."],
        ["To say thank you, {H} gave {him} {aT}.", "In the morning {H} was gone, but on the table lay {aT}."],
        ["{N} was {good} and kept the {T} for the rest of {his} life.",
         "{N} was {good}. The {T} always reminded {him} of {his} guest."]],
    "storm": [
        ["{time} a great storm came.", "{time} the wind grew stronger and stronger."],
        ["Trees fell and roofs flew away. {N} was {bad}.", "The water rose and the sky turned black. {N} was {bad}."],
        ["In the storm {he} heard a cry. It was {H}, {h} who was stuck in the mud.",
         "Outside, {h} called {H} was holding on to a branch."],
        ["{N} took the {T} and {move} into the rain.", "Without waiting {N} took {his} {T} and went out."],
        ["With the {T} {he} pulled {H} to safety.", "Thanks to the {T} {he} could save {H}."],
        ["When the storm was over, both were wet but {good}.", "In the morning the sky was blue, and {N} was {good}."]],
    "contest": [
        ["{time} there was a contest. The prize was {aT}.", "{time} the mayor called for a race, and the prize was {aT}."],
        ["{N} wanted to win, but {he} was {bad}.", "Everyone laughed at {N}, and {he} felt {bad}."],
        ["{H}, {h} with long legs, was the fastest of all.", "{H}, {h} from the next town, had never lost."],
        ["In the middle of the race {H} fell into a ditch. {N} stopped to help.",
         "Near the end {H} hurt a foot, and {N} turned back to help."],
        ["They crossed the line together, arm in arm.", "So they came in last, but side by side."],
        ["The judges gave the {T} to both of them. {N} was {good}.",
         "\"You are the true winner,\" {said} {H}, and gave {him} the {T}. {N} was {good}."]],
    "thief": [
        ["{time} somebody stole the {T}.", "{time} the {T} was missing, and there were footprints on the floor."],
        ["{N} was {bad} and {move} {goal} to find the thief.", "{N} was {bad}. {He} followed the footprints {goal}."],
        ["Behind a rock sat {h} called {H}, holding the {T}.", "At the end of the trail was {h} called {H}, with the {T}."],
        ["\"I am sorry,\" {said} {H}. \"I never had anything so beautiful.\"",
         "\"I only wanted to look at it,\" {said} {H}."],
        ["{N} was silent for a while. \"You can visit me and use it every day,\" {he} said.",
         "\"Next time just ask,\" said {N}, and they shook hands."],
        ["{H} gave the {T} back and was {good}.", "{H} never stole again, and {N} was {good}."]],
    "dark": [
        ["{time} all the lights went out.", "{time} the fire died, and it was dark everywhere."],
        ["{N} could see nothing and felt {bad}.", "The children cried, and {N} was {bad}."],
        ["{He} remembered {his} {T}.", "\"I still have my {T},\" {he} thought."],
        ["With the {T} {he} {move} {goal} to find {H}, {h} who kept the last spark.",
         "{He} took the {T} and {move} {goal}, where {H}, {h} with bright eyes, guarded a flame."],
        ["\"I will trade my flame for your {T},\" {said} {H}.", "\"Take the flame,\" {said} {H}, \"but come back and tell me a story.\""],
        ["{N} carried the light home, and everyone was {good}.", "Soon every window was bright again, and {N} was {good}."]],
    "wish": [
        ["{time} {N} found {aT} on the road.", "{time} {N} dug in the garden and found {aT}."],
        ["It was magic. \"You have one wish,\" it said.", "When {he} touched it, a voice said: \"Make a wish!\""],
        ["{N} thought of gold and cakes, but then {he} saw {H}, {h} who was {bad}.",
         "{N} wanted a palace. Then {h} called {H} came by and looked {bad}."],
        ["\"What is wrong?\" {N} asked. \"I have lost my way home,\" {said} {H}.",
         "\"What do you need?\" {N} asked. \"Only a friend,\" {said} {H}."],
        ["So {N} wished for {H} to be happy.", "So {N} gave the wish away."],
        ["The {T} turned to dust, but {N} was {good}.", "The magic was gone, but {N} and {H} were {good}."]],
    "garden": [
        ["{time} nothing grew in the garden any more.", "{time} {N} planted a seed, but nothing happened."],
        ["{N} gave it water and sang to it, but it did not help.", "{N} was {bad} and sat down on {his} {T}."],
        ["{H}, {h} with muddy feet, looked over the fence.", "Then {H}, {h} who knew all about roots, came along."],
        ["\"Plants need time,\" {said} {H}. \"Wait for the rain.\"", "\"The soil is too hard,\" {said} {H}. \"Use your {T} to dig.\""],
        ["They waited together, and after seven days a green leaf came up.",
         "They dug and watered, and soon a flower opened."],
        ["{N} was {good} and named the flower after {H}.", "{N} was {good}, and the garden was full of bees."]],
    "secret": [
        ["{time} {N} found a door that nobody knew.", "{time} {N} heard a strange noise behind an old door."],
        ["It was locked. {N} pushed and pulled, but it stayed shut.", "{N} was {bad}, but also curious."],
        ["\"Try the {T},\" {said} a small voice. It was {H}, {h} who lived in the wall.",
         "{H}, {h} with dusty ears, looked out of a hole. \"You need the {T},\" {he2} said."],
        ["{N} took the {T}, and with a click the door opened.", "With the {T} it was easy, and the door swung open."],
        ["Behind it was a room full of {things}.", "Inside they found a mountain of {things}."],
        ["They kept the secret together, and {N} was {good}.", "{N} was {good} and shared everything with {H}."]],
    "song": [
        ["{time} {N} forgot the words of {his} song.", "{time} {N} lost {his} voice."],
        ["{He} tried again and again, but no sound came.", "Without the song the days were long, and {N} was {bad}."],
        ["{He} {move} {goal} and met {h} called {H}.", "There came {h} called {H}, who carried {aT}."],
        ["\"I remember the tune,\" {said} {H} and began to hum.", "\"Then let the {T} sing for you,\" {said} {H}."],
        ["Slowly the words came back, one after the other.", "{N} listened, and the music filled {his} heart."],
        ["They sang together, and {N} was {good}.", "The whole land heard the song, and {N} was {good}."]],
    "bridge": [
        ["{time} the bridge was gone. The river had taken it.", "{time} {N} had to cross the river, but there was no bridge."],
        ["On the other side waited {H}, {h} who had not eaten for two days.",
         "On the other side {N} saw {H}, {h} who was waving and calling."],
        ["{N} had only {his} {T}. {He} was {bad}.", "{N} looked at {his} {T} and thought hard."],
        ["\"I have an idea!\" {he} {said}. {He} tied the {T} to a long branch.", "Then {he} pushed a fallen tree over the water, with the {T} as a lever."],
        ["Step by step {he} crossed the cold water.", "It was slow work, but at last {he} reached the other side."],
        ["{H} was {good}, and they built a new bridge together.", "{H} laughed and cried, and {N} was {good}."]],
}
PLOT_NAMES = list(PLOTS)


def article(word):
    return "an" if word[0] in "aeiou" and word != "unicorn" or word in ("honest", "hourglass") else "a"


def plural(word):
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    if word in ("loaf",):
        return "loaves"
    return word + "s"


def skeleton(rng, split, kind=None, thing=None, place=None):
    """Draw (kind, place, thing, plot) that belongs to the split, with some of it given; None if none does."""
    for _ in range(200):
        k = kind or rng.choice(KINDS)
        p = place or rng.choice(PLACES)
        t = thing or rng.choice(THINGS)
        plot = rng.choice(PLOT_NAMES)
        if split.ok("story", k, p[1], t, plot):
            return k, p, t, plot
    return None


def story(rng, split, kind=None, thing=None, place=None, name=None):
    """One story: (title, text, skeleton), or None if the split has none with what is given."""
    bones = skeleton(rng, split, kind, thing, place)
    if bones is None:
        return None
    k, (prep, place_name), t, plot = bones
    she = rng.random() < 0.5 if k not in MALE + FEMALE else k in FEMALE
    n = name or rng.choice(GIRLS if she else BOYS)
    helper = rng.choice(GIRLS + BOYS)
    while helper == n:
        helper = rng.choice(GIRLS + BOYS)
    helper_kind = rng.choice(KINDS)
    while helper_kind == k:
        helper_kind = rng.choice(KINDS)
    hadj, adj, tadj = rng.choice(ADJ), rng.choice(ADJ), rng.choice(THING_ADJ)
    slots = {
        "N": n, "K": k, "T": t, "aT": f"{article(tadj)} {tadj} {t}", "H": helper,
        "h": f"{article(hadj)} {hadj} {helper_kind}", "he": "she" if she else "he", "He": "She" if she else "He",
        "his": "her" if she else "his", "His": "Her" if she else "His", "him": "her" if she else "him", "he2": "the " + helper_kind,
        "where": f"{prep} {place_name}"}

    def fill(form):
        return form.format(**slots, bad=rng.choice(FEEL_BAD), good=rng.choice(FEEL_GOOD), said=rng.choice(SAID),
                           move=rng.choice(MOVE), goal=rng.choice(GOAL), goal2=rng.choice(GOAL),
                           time=rng.choice(TIMES), things=plural(rng.choice(THINGS)))

    out = []
    if rng.random() < 0.5:
        out.append(f"{rng.choice(OPEN)} {article(adj)} {adj} {k} called {n}. {slots['He']} lived {slots['where']}.")
    else:
        out.append(f"{rng.choice(OPEN)} {article(adj)} {adj} {k} {slots['where']}. {slots['his'].capitalize()} name was {n}.")
    r = rng.random()
    if r < 0.4:
        likes = rng.sample(LIKES, 2)
        out.append(f"{n} liked to {likes[0]} and to {likes[1]}.")
    elif r < 0.6:
        out.append(f"Every day {slots['he']} liked to {rng.choice(LIKES)}.")
    elif r < 0.8 and plot not in ("stranger", "contest", "wish"):
        out.append(f"{slots['He']} owned {slots['aT']} and liked to {rng.choice(LIKES)}.")
    if rng.random() < 0.5:
        hue, (smell, smell2), (dish, dish2) = rng.choice(HUES), rng.sample(SMELLS, 2), rng.sample(DISHES, 2)
        out.append(rng.choice(DETAILS).format(
            **slots, hue=hue, a1=article(hue), garment=rng.choice(GARMENTS), smell=smell, smell2=smell2,
            sound=rng.choice(SOUNDS), plant=rng.choice(PLANTS), dish=dish, dish2=dish2))
    if rng.random() < 0.4:
        out.append(rng.choice(WEATHER) + ".")
    for beat in PLOTS[plot]:
        out.append(fill(rng.choice(beat)))
    if t not in " ".join(out):                  # some forms do without the thing
        out.insert(1, f"{slots['He']} owned {slots['aT']}.")
    if rng.random() < 0.6:
        out.append(rng.choice(ENDS))
    if rng.random() < 0.5:
        out.append(rng.choice(MORALS))
    title = rng.choice([f"The {k.capitalize()} and the {t.capitalize()}", f"{n} the {k.capitalize()}",
                        f"{n} and the {t.capitalize()}", f"The {adj.capitalize()} {k.capitalize()}"])
    return title, " ".join(out), (k, place_name, t, plot)
