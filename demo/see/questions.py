"""Questions about a picture of pictures.py, and their answers."""
NUMBERS = ("no", "one", "two", "three", "four", "five")

WAYS = {
    "what": ("What is this?", "What is that?", "what is this", "What's this?", "What do you see?", "What can you see?",
             "What is in this picture?", "What is in the picture?", "What is in this image?", "What does the image show?",
             "What does this picture show?", "Describe this picture.", "Describe the image.", "Describe this image.",
             "What is shown here?", "Tell me what you see.", "describe it", "Describe this."),
    "colour": ("What colour is it?", "What color is it?", "What colour is this?", "What color is this?",
               "Which colour is it?", "Which color do you see?", "what colour is it", "Name the colour.",
               "What is the colour?", "What colour are they?", "What is its colour?"),
    "shape": ("What shape is it?", "What shape is this?", "Which shape is it?", "What shape do you see?",
              "which shape is this", "Name the shape.", "What shapes are there?", "What kind of shape is this?"),
    "count": ("How many are there?", "How many shapes are there?", "How many shapes do you see?", "How many shapes?",
              "how many are there", "Count the shapes.", "How many things are in the picture?", "How many do you see?"),
    "digit": ("Which digit is this?", "What digit is this?", "Which digit is it?", "What number is this?",
              "Which number do you see?", "what digit is it", "Which number is this?", "Read the digit.",
              "What is the number?"),
}


def plural(shape, count):
    return shape if count == 1 else shape + ("es" if shape == "cross" else "s")


def answer(kind, what):
    """The answer to a question of a kind; None if the picture has none."""
    count, shape = what["count"], what["kind"]
    digit = shape == "digit"
    some = ("an " if what["colour"] == "orange" else "a ") if count == 1 else NUMBERS[count] + " "
    if kind == "what":
        text = f"the digit {what['digit']} in {what['colour']}" if digit else \
            f"{some}{what['colour']} {plural(shape, count)}"
    elif kind == "colour":
        text = what["colour"]
    elif kind == "shape":
        text = None if digit else ("a " if count == 1 else "") + plural(shape, count)
    elif kind == "count":
        text = NUMBERS[count]
    else:
        text = str(what["digit"]) if digit else None
    return text and text[0].upper() + text[1:] + "."


def kinds(what):
    return ("what", "colour", "digit", "count") if what["kind"] == "digit" else ("what", "colour", "shape", "count")


BLIND = "I see no picture."
