"""What belongs to the held-out split, decided by a hash of the thing itself and never by chance.

A key (an operand pair, a fact with the number of its question, a story's skeleton, a tool's name, a made-up
word...) is held out or it is not, for every seed and every run. Generators ask `Split.ok(key)`: a training
split says yes to the keys that are not held out, a held-out split to those that are. Must know no text.
"""
import zlib

SHARE = {"pair": 12, "fact": 8, "yesno": 8, "story": 8, "word": 8, "tool": 8, "style": 8, "schema": 8,
         "talk": 6}


def held_out(kind, *parts):
    text = "\x1f".join([kind, *map(str, parts)])
    return zlib.crc32(text.encode()) % SHARE[kind] == 0


class Split:
    def __init__(self, held):
        self.held = held

    def ok(self, kind, *parts):
        return held_out(kind, *parts) == self.held
