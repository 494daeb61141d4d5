"""Draws the pictures that the tiny model with an image tower is trained on and tested with: one digit, or one to five
equal shapes of a colour, on a plain background. Needs nothing but Python.

A picture is (width, height, rgb bytes, what), where what has "kind" (a shape, or "digit"), "colour", "count" and, for
digits, "digit".
"""
import math
import struct
import zlib

COLOURS = {"red": (215, 35, 35), "orange": (250, 140, 20), "yellow": (245, 220, 30), "green": (40, 160, 60),
           "blue": (40, 80, 220), "purple": (130, 50, 170), "pink": (250, 130, 190), "brown": (130, 80, 40),
           "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross")


def arc(cx, cy, rx, ry, start, end, n=14):
    """Points of an ellipse's arc; degrees run clockwise from the right, as y grows downwards."""
    return [(cx + rx * math.cos(math.radians(start + (end - start) * i / n)),
             cy + ry * math.sin(math.radians(start + (end - start) * i / n))) for i in range(n + 1)]


# Strokes in a box of width 0.6 (-0.3 to 0.3) and height 1 (-0.5 to 0.5).
DIGITS = {
    0: [arc(0, 0, .28, .48, 0, 360, 28)],
    1: [[(-.16, -.3), (.04, -.48), (.04, .48)]],
    2: [arc(0, -.22, .27, .26, 190, 395) + [(-.27, .48), (.28, .48)]],
    3: [arc(-.02, -.25, .26, .23, 200, 450) + arc(-.02, .23, .28, .25, 270, 520)],
    4: [[(.1, .48), (.1, -.48), (-.28, .18), (.28, .18)]],
    5: [[(.24, -.47), (-.2, -.47), (-.22, -.06)] + arc(-.01, .19, .28, .29, 225, 510)],
    6: [[(.16, -.46), (-.02, -.34), (-.16, -.14), (-.25, .1)], arc(0, .2, .26, .27, 0, 360, 24)],
    7: [[(-.27, -.47), (.27, -.47), (-.06, .48)]],
    8: [arc(0, -.24, .22, .23, 0, 360, 24), arc(0, .23, .27, .25, 0, 360, 24)],
    9: [arc(0, -.2, .26, .27, 0, 360, 24), [(.26, -.16), (.24, .08), (.14, .3), (-.06, .47)]],
}


def outline(shape):
    """A shape's corners, about within radius 1."""
    if shape == "circle":
        return arc(0, 0, .9, .9, 0, 360, 28)[:-1]
    if shape == "square":
        return [(-.78, -.78), (.78, -.78), (.78, .78), (-.78, .78)]
    if shape == "triangle":
        return [(0, -.95), (.9, .7), (-.9, .7)]
    if shape == "star":
        return [(r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5))
                for i in range(10) for r in [.42 if i % 2 else 1.0]]
    if shape == "heart":
        return [(math.sin(t) ** 3 * .92, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) -
                                           math.cos(4 * t)) / 17.5)
                for t in [2 * math.pi * i / 28 for i in range(28)]]
    a = .32
    return [(-a, -.9), (a, -.9), (a, -a), (.9, -a), (.9, a), (a, a), (a, .9), (-a, .9), (-a, a), (-.9, a), (-.9, -a),
            (-a, -a)]


class Canvas:
    def __init__(self, width, height, colour):
        self.width, self.height = width, height
        self.rgb = bytearray(bytes(colour) * (width * height))

    def fill(self, points, colour):
        """A polygon, by the even-odd rule at the middles of rows."""
        rows = {}
        for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1]):
            if y0 > y1:
                x0, y0, x1, y1 = x1, y1, x0, y0
            first, last = max(0, math.ceil(y0 - .5)), min(self.height - 1, math.ceil(y1 - .5) - 1)
            slope = (x1 - x0) / (y1 - y0) if y1 > y0 else 0
            for y in range(first, last + 1):
                rows.setdefault(y, []).append(x0 + (y + .5 - y0) * slope)
        pixel = bytes(colour)
        for y, cuts in rows.items():
            cuts.sort()
            for a, b in zip(cuts[::2], cuts[1::2]):
                a, b = max(0, round(a)), min(self.width, round(b))
                if b > a:
                    at = (y * self.width + a) * 3
                    self.rgb[at:at + (b - a) * 3] = pixel * (b - a)

    def stroke(self, points, wide, colour):
        r = wide / 2
        for (x0, y0), (x1, y1) in zip(points, points[1:]):
            n = math.hypot(x1 - x0, y1 - y0) or 1
            dx, dy = (x1 - x0) / n * r, (y1 - y0) / n * r
            self.fill([(x0 - dy, y0 + dx), (x1 - dy, y1 + dx), (x1 + dy, y1 - dx), (x0 + dy, y0 - dx)], colour)
        for x, y in points:
            self.fill([(x + r * c, y + r * s) for c, s in ROUND], colour)


ROUND = [(math.cos(math.pi * i / 5), math.sin(math.pi * i / 5)) for i in range(10)]


def turn(points, x, y, sx, sy, angle, slant=0.0):
    c, s = math.cos(angle), math.sin(angle)
    return [(x + c * (px * sx - py * slant * sy) - s * py * sy, y + s * (px * sx - py * slant * sy) + c * py * sy)
            for px, py in points]


def near(rng, colour, by):
    return tuple(min(255, max(0, v + rng.randint(-by, by))) for v in colour)


def background(rng, colour):
    kind = rng.random()
    if kind < .5:
        return (255, 255, 255)
    if kind < .9 or colour in ("black", "brown", "purple", "blue"):
        grey = rng.randint(225, 250)
        return near(rng, (grey, grey, grey), 6)
    return near(rng, (25, 25, 30), 12)


def places(rng, count, width, height):
    """(x, y, radius) of shapes that do not touch."""
    least = min(width, height)
    while True:
        r = least * (rng.uniform(.22, .44) if count == 1 else rng.uniform(.12, .26 - .02 * count))
        found = []
        for _ in range(60):
            size = r * rng.uniform(.9, 1.1)
            if 2 * size + 2 >= least:
                break
            x, y = rng.uniform(size + 1, width - size - 1), rng.uniform(size + 1, height - size - 1)
            if all(math.hypot(x - a, y - b) > 1.12 * (size + c) + 2 for a, b, c in found):
                found.append((x, y, size))
            if len(found) == count:
                return found


def draw(rng, smallest=80, largest=320):
    """A picture; rng is a random.Random."""
    width = rng.randint(smallest, largest)
    height = min(largest, max(smallest, round(width * rng.choice((1, 1, rng.uniform(.7, 1.4))))))
    name = rng.choice(list(COLOURS))
    colour = near(rng, COLOURS[name], 12)
    canvas = Canvas(width, height, background(rng, name))
    if rng.random() < .42:
        digit = rng.randint(0, 9)
        tall = min(height, width * 1.4) * rng.uniform(.45, .85)
        wide = tall * rng.uniform(.8, 1.15)
        x = width / 2 + rng.uniform(-1, 1) * max(0, width / 2 - wide * .42)
        y = height / 2 + rng.uniform(-1, 1) * max(0, height / 2 - tall * .58)
        angle, slant, thick = rng.uniform(-.1, .1), rng.uniform(-.05, .2), tall * rng.uniform(.09, .17)
        for line in DIGITS[digit]:
            canvas.stroke(turn(line, x, y, wide, tall, angle, slant), thick, colour)
        what = {"kind": "digit", "colour": name, "count": 1, "digit": digit}
    else:
        shape, count = rng.choice(SHAPES), rng.choice((1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5))
        for x, y, r in places(rng, count, width, height):
            angle = rng.uniform(-.2, .2)
            canvas.fill(turn(outline(shape), x, y, r, r, angle), colour)
        what = {"kind": shape, "colour": name, "count": count}
    return width, height, bytes(canvas.rgb), what


def png(width, height, rgb):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + rgb[y * width * 3:(y + 1) * width * 3] for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows, 6)) + chunk(b"IEND", b""))
