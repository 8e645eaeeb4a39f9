"""Pictures and clips that know their own facts, and questions about them.

A scene is a list of marks (shapes, letters, bars) on a plain ground, placed in units
of a *cell*, the square that one picture token stands for; a clip is two or four
scenes in which one thing may move. `canvas.py` draws them from an atlas of small masks.

Questions have one right answer each. Some phrasings, some pairs of shape and colour
and some numbers are never used in training (`HELD_OUT_PAIRS`, `is_held_out`).
Deliberately absent: torch, models, tokens, photographs.
"""

import functools
import random

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLOURS = {
    "red": (214, 40, 40),
    "green": (42, 157, 70),
    "blue": (40, 84, 214),
    "yellow": (250, 214, 40),
    "orange": (245, 130, 32),
    "purple": (130, 50, 170),
    "pink": (250, 140, 190),
    "brown": (120, 75, 40),
}
NAMES = tuple(COLOURS)
GROUNDS = np.array(
    [(255, 255, 255), (235, 235, 235), (250, 245, 225), (20, 20, 20), (60, 60, 66)], np.float32
)
WORDS = (
    "cat dog sun moon tree fish bird boat ball kite star king milk cake frog bear duck lion book door hand hat "
    "bed cup egg ant bee fox cow pig car bus red big yes no home good rain snow"
).split()
# Five columns and seven rows a letter; a row is a digit of base 32.
FONT = {
    **dict(
        zip("ABCDEFGHI", "EHHVHHH UHHUHHU EHGGGHE UHHHHHU VGGUGGV VGGUGGG EHGNHHF HHHVHHH E44444E".split())
    ),
    **dict(
        zip("JKLMNOPQR", "72222IC HIKOKIH GGGGGGV HRLLHHH HPPLJJH EHHHHHE UHHUGGG EHHHLID UHHUKIH".split())
    ),
    **dict(zip("STUVWXYZ", "FGGE11U V444444 HHHHHHE HHHHHA4 HHHLLRH HHA4AHH HHA4444 V1248GV".split())),
    **dict(
        zip(
            "0123456789",
            "EHJLPHE 4C4444E EH168GV U11E11U 26AIV22 VGU11HE 68GUHHE V124888 EHHEHHE EHHF12C".split(),
        )
    ),
}
LETTERS = tuple(FONT)
# Masks of the atlas: nothing, the shapes, the letters, a filled box. A kind is an index.
KINDS = 2 + len(SHAPES) + len(LETTERS)
BOX = KINDS - 1
MORE = 1 + 9 + 4 * 6  # nothing, the spots of shapes, the bars by height
SIDE = 128  # of a mask, in pixels
MARKS = 26  # most marks of a scene
FRAMES = (1, 2, 4)
HELD_OUT_PAIRS = frozenset((s, NAMES[-i % len(NAMES)]) for i, s in enumerate(SHAPES))

# Per kind of question: phrasings of training, and those that only evaluation uses.
PHRASES = {
    "what": (
        "What is in this picture?|What do you see?|What can you see in the picture?|"
        "What is in the picture?|What things are in this picture?|Tell me what you see.|"
        "Which shapes are here?|Name the shapes.|What does the picture show?|What is here?",
        "What is shown here?|Tell me what is in the picture.|What can you see here?",
    ),
    "describe": (
        "Describe the picture.|Describe this picture.|Where are the shapes?|Tell me about the picture.|"
        "What is in the picture, and where?|Describe what you see.|What do you see, and where?|"
        "Say what is where.",
        "Can you describe the picture?|Tell me what is where.|Describe the shapes.",
    ),
    "colour": (
        "What colour is the {}?|What color is the {}?|Which colour does the {} have?|"
        "What is the colour of the {}?|Which color is the {}?|Name the colour of the {}.|"
        "Tell me what colour the {} is.|The {} is what colour?|Can you tell me the color of the {}?|"
        "What colour does the {} have?",
        "Tell me the colour of the {}.|Which colour is the {}?|What colour do you see on the {}?",
    ),
    "shape": (
        "What is {}?|Which shape is {}?|What thing is {} here?|Which thing is {}?|What is the {} thing?|"
        "Name the {} shape.|What kind of shape is {}?|Which shape has the colour {}?|Tell me what is {}.|"
        "What is the shape of the {} thing?",
        "What shape is the {} one?|Tell me which shape is {}.|What do you see that is {}?",
    ),
    "count": (
        "How many shapes are there?|How many things are in the picture?|Count the shapes.|"
        "How many shapes are here?|How many things do you see?|Count the things.|"
        "Tell me how many shapes there are.|What is the number of shapes?|How many shapes can you see?|"
        "How many shapes does the picture have?",
        "How many shapes do you see?|Count all the shapes.|How many things are there?",
    ),
    "count of": (
        "How many {}s are there?|Count the {}s.|How many {}s can you see?|"
        "How many {}s are in the picture?|Tell me how many {}s there are.|What is the number of {}s?|"
        "How many {}s are here?|How many {}s does the picture have?",
        "How many {}s do you see?|Count all the {}s.|How many {}s does this picture have?",
    ),
    "place": (
        "Where is the {}?|Where in the picture is the {}?|Where can I find the {}?|"
        "Tell me where the {} is.|In which part of the picture is the {}?|Where can you see the {}?|"
        "Find the {}.|What is the place of the {}?|The {} is where?|Look for the {}. Where is it?",
        "Where do you see the {}?|Can you tell me where the {} is?|Where is the {} in this picture?",
    ),
    "side": (
        "Is the {} {} the {}?|Do you see the {} {} the {}?|Tell me if the {} is {} the {}.|"
        "Can you see the {} {} the {}?|Look: is the {} {} the {}?|Is it true that the {} is {} the {}?|"
        "Would you say the {} is {} the {}?|The {} is {} the {}, right?",
        "In this picture, is the {} {} the {}?|Is the {} really {} the {}?",
    ),
    "there": (
        "Is there a {}?|Do you see a {}?|Can you see a {}?|Is there a {} in the picture?|Is a {} here?|"
        "Does the picture have a {}?|Tell me if there is a {}.|Can you find a {}?|Is there a {} here?",
        "Is a {} in the picture?|Do you see a {} here?|Does this picture show a {}?",
    ),
    "number": (
        "What number is this?|Which number do you see?|Read the number.|What is the number?|"
        "Which number is this?|Tell me the number.|What number can you see?|What number is here?",
        "What number is in the picture?|Can you read the number?|Which number is shown?",
    ),
    "word": (
        "What does it say?|Which word is this?|Read the word.|What is the word?|What word is this?|"
        "Tell me the word.|Which word can you see?|What does the picture say?",
        "What word do you see?|Can you read the word?|Which word is written here?",
    ),
    "bars": (
        "Describe the chart.|Describe the bars.|What does the chart show?|Tell me about the chart.|"
        "Tell me about the bars.|Read the chart.|What are the bars like?|Read all the bars.",
        "Can you describe the chart?|Describe all the bars.|What do the bars show?",
    ),
    "tallest": (
        "Which bar is the tallest?|Which bar is the highest?|What is the tallest bar?|"
        "What is the highest bar?|Name the tallest bar.|Which is the tallest bar?|Find the tallest bar.|"
        "Which bar is the biggest?|Tell me which bar is the highest.",
        "Tell me the tallest bar.|Which is the highest bar?|Of the bars, which is the tallest?",
    ),
    "smallest": (
        "Which bar is the smallest?|Which bar is the lowest?|What is the smallest bar?|"
        "What is the lowest bar?|Name the smallest bar.|Which is the smallest bar?|"
        "Find the smallest bar.|Which bar is the shortest?|Tell me which bar is the lowest.",
        "Tell me the smallest bar.|Which is the lowest bar?|Of the bars, which is the smallest?",
    ),
    "height": (
        "How high is bar {}?|How tall is bar {}?|What is the height of bar {}?|How high is the bar {}?|"
        "Read bar {}.|What number does bar {} show?|How many steps high is bar {}?|How big is bar {}?|"
        "Tell me how high bar {} is.",
        "Tell me the height of bar {}.|How tall is the bar {}?|What height does bar {} have?",
    ),
    "bar colour": (
        "What colour is bar {}?|What color is bar {}?|What is the colour of bar {}?|"
        "Which colour is bar {}?|Which color does bar {} have?|Name the colour of bar {}.|"
        "Tell me what colour bar {} is.|Bar {} is what colour?",
        "Tell me the colour of bar {}.|What colour does bar {} have?|What colour is the bar {}?",
    ),
    "moves": (
        "What moves?|What moved?|Which thing moves?|Which shape moves?|What is moving here?|"
        "Tell me what moves.|Which shape moved?|Does anything move?",
        "What is moving?|Which thing is moving?|Tell me what moved.",
    ),
    "way": (
        "Which way does the {} move?|Where does the {} go?|Where did the {} go?|How does the {} move?|"
        "Which way does the {} go?|Which way did the {} move?|Tell me where the {} goes.|"
        "In which direction does the {} move?",
        "Where does the {} move?|Which way is the {} going?|Tell me which way the {} moves.",
    ),
}
PHRASES = {kind: (usual.split("|"), new.split("|")) for kind, (usual, new) in PHRASES.items()}
SHARES = {"shapes": 0.54, "number": 0.11, "word": 0.09, "chart": 0.26}
# How often training asks for a kind; 1 if it is not here.
WEIGHTS = {
    "describe": 3,
    "bars": 2,
    "colour": 2,
    "place": 2,
    "shape": 2,
    "side": 2,
    "there": 2,
    "count of": 2,
}
ASKS = 3  # questions about a picture in training


def is_held_out(number):
    """Numbers that training never shows."""
    return number % 9 == 4


@functools.cache
def atlas():
    """The masks `[KINDS, SIDE, SIDE]`, float32 in [0, 1]."""
    fine = 4
    t = (np.arange(SIDE * fine, dtype=np.float32) + 0.5) / (SIDE * fine) * 2 - 1
    x, y = t[None], -t[:, None]  # y upwards
    turn = np.arange(10) * np.pi / 5
    r = np.where(np.arange(10) % 2, 0.42, 1.0)
    star = np.stack([r * np.sin(turn), r * np.cos(turn)], -1)
    inside = {
        "circle": x * x + y * y < 0.98,
        "square": np.maximum(abs(x), abs(y)) < 0.9,
        "triangle": (y > -0.9) & (y < 0.95 - 1.95 * abs(x)),
        "star": polygon(star, x, y),
        "cross": (np.minimum(abs(x), abs(y)) < 0.32) & (np.maximum(abs(x), abs(y)) < 0.95),
        "heart": ((1.25 * x) ** 2 + (1.2 * y) ** 2 - 1) ** 3 < (1.25 * x) ** 2 * (1.2 * y) ** 3,
    }
    masks = [np.zeros((SIDE, SIDE), np.float32)]
    masks += [inside[s].astype(np.float32).reshape(SIDE, fine, SIDE, fine).mean((1, 3)) for s in SHAPES]
    at = np.arange(SIDE)
    for letter in LETTERS:
        rows = np.array([[int(c, 32) >> (4 - i) & 1 for i in range(5)] for c in FONT[letter]], np.float32)
        masks.append(rows[at * 7 // SIDE][:, at * 5 // SIDE])
    masks.append(np.ones((SIDE, SIDE), np.float32))
    return np.stack(masks)


def polygon(corners, x, y):
    """Whether points lie in a polygon, by the parity of crossings."""
    odd = np.zeros(np.broadcast_shapes(x.shape, y.shape), bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0)):
        if ay != by:
            odd ^= ((ay > y) != (by > y)) & (x < ax + (y - ay) / (by - ay) * (bx - ax))
    return odd


class Scene:
    """Marks `(kind, x, y, width, height, colour)` and what the cells of the grid hold."""

    def __init__(self, grid, r):
        self.grid, self.r, self.marks, self.cells = grid, r, [], []
        self.ground = GROUNDS[r.randrange(len(GROUNDS))]

    def paint(self, name):
        """A shade of a named colour."""
        return [c + self.r.uniform(-16, 16) for c in COLOURS[name]]

    def contrast(self):
        """Nearly black or nearly white, whichever shows."""
        return (25.0,) * 3 if self.ground.mean() > 128 else (235.0,) * 3

    def add(self, kind, x, y, w, h, rgb, colour=0, more=0, seen=True):
        """Places a mark by its centre. `seen` marks are facts of the cell of their centre."""
        self.marks.append((kind, x, y, w, h, *rgb))
        if seen:
            rows, columns = self.grid
            at = min(int(y), rows - 1) * columns + min(int(x), columns - 1)
            self.cells.append((at, kind, colour, more))


def a(thing):
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def listing(things):
    """`"A x, a y and a z."` of things with their articles."""
    text = " and ".join(filter(None, [", ".join(things[:-1]), things[-1]]))
    return text[0].upper() + text[1:] + "."


def place(spot):
    """Row before column, so that every word depends on one direction alone."""
    row, column = ("top", "middle", "bottom")[spot // 3], ("left", "middle", "right")[spot % 3]
    return "in the middle" if row == column == "middle" else f"in the {row} {column}"


def put(scene, spot, shape, colour, size, shift, rgb):
    """A shape in one of the nine spots of the picture."""
    rows, columns = scene.grid
    x = (spot % 3 + 0.5 + shift[0]) * columns / 3
    y = (spot // 3 + 0.5 + shift[1]) * rows / 3
    side = size * min(rows, columns) / 3
    scene.add(1 + SHAPES.index(shape), x, y, side, side, rgb, 1 + NAMES.index(colour), 1 + spot)


def looks(r):
    """Size and shift of a shape within its spot."""
    return r.uniform(0.5, 0.85), (r.uniform(-0.07, 0.07), r.uniform(-0.07, 0.07))


def pairs(r, n, rare):
    """`n` pairs of shape and colour; with `rare` the first is one of the held-out ones."""
    found = [r.choice(sorted(HELD_OUT_PAIRS))] if rare else []
    while len(found) < n:
        pair = (r.choice(SHAPES), r.choice(NAMES))
        if pair not in HELD_OUT_PAIRS:
            found.append(pair)
    return found


def arrangement(r, rare):
    """One to five pairs of shape and colour, the first of them a held-out one if `rare`;
    and the same with their spots, `[(spot, pair)]` in reading order."""
    n = r.choices((1, 2, 3, 4, 5), (3, 4, 4, 3, 2))[0]
    found = pairs(r, n, rare)
    if n > 2 and r.random() < 0.5:
        # Something to count: another one of a shape or a colour.
        other = (found[1][0], r.choice(NAMES)) if r.random() < 0.5 else (r.choice(SHAPES), found[1][1])
        found[-1] = other if other not in HELD_OUT_PAIRS else found[-1]
    return found, sorted(zip(r.sample(range(9), n), found))


def shapes(grid, r, rare):
    scene = Scene(grid, r)
    found, placed = arrangement(r, rare)
    for spot, (shape, colour) in placed:
        put(scene, spot, shape, colour, *looks(r), scene.paint(colour))
    return [scene], shape_asks(found, placed, rare, r)


def shape_asks(found, placed, rare, r):
    """What an arrangement answers, `[(kind of question, slots, answer)]`."""
    n, first = len(found), found[0]
    kinds, tints = [p[0] for p in found], [p[1] for p in found]
    # A rare pair is what the question is about; else anything may be.
    about = [first] if rare else found
    single = [p for p in about if found.count(p) == 1]
    asks = []
    if n <= 3:
        asks.append(("what", (), listing([a(f"{c} {s}") for _, (s, c) in placed])))
        asks.append(("describe", (), listing([a(f"{c} {s} {place(spot)}") for spot, (s, c) in placed])))
    asks += [("colour", (s,), f"The {s} is {c}.") for s, c in about if kinds.count(s) == 1]
    asks += [("shape", (c,), f"The {c} thing is {a(s)}.") for s, c in about if tints.count(c) == 1]
    if not rare:
        asks.append(("count", (), f"{n}."))
        for thing, many in (
            (s := r.choice(kinds), kinds.count(s)),
            (f"{(c := r.choice(tints))} shape", tints.count(c)),
        ):
            asks.append(("count of", (thing,), f"The number of {thing}s is {many}."))
    for s, c in single:
        spot = next(k for k, p in placed if p == (s, c))
        asks.append(("place", (f"{c} {s}",), f"The {c} {s} is {place(spot)}."))
        for other, (s2, c2) in placed:
            if found.count((s2, c2)) > 1:
                continue
            dx, dy = spot % 3 - other % 3, spot // 3 - other // 3
            d = dx if dx and (not dy or r.random() < 0.5) else dy
            if d:
                sides = ("left of", "right of") if d is dx and dx else ("above", "below")
                side = r.randrange(2)
                asks.append(
                    (
                        "side",
                        (f"{c} {s}", sides[side], f"{c2} {s2}"),
                        "Yes." if (d > 0) == bool(side) else "No.",
                    )
                )
                break
    if rare or r.random() < 0.5:
        s, c = r.choice(about)
        asks.append(("there", (f"{c} {s}",), "Yes."))
    else:
        # Absent, but its shape or its colour may well be there.
        s, c = r.choice([*kinds, r.choice(SHAPES)]), r.choice([*tints, r.choice(NAMES)])
        if (s, c) not in found and (s, c) not in HELD_OUT_PAIRS:
            asks.append(("there", (f"{c} {s}",), "No."))
    return asks


def write(scene, text, rgb, x, y, pitch, colour=0):
    """Letters of width `0.8·pitch` from left to right, centred on `(x, y)`."""
    for i, letter in enumerate(text):
        at = x + (i - (len(text) - 1) / 2) * pitch
        scene.add(1 + len(SHAPES) + LETTERS.index(letter), at, y, 0.8 * pitch, 1.12 * pitch, rgb, colour)


def written(text, grid, r):
    scene = Scene(grid, r)
    rows, columns = grid
    pitch = min(columns / (len(text) + 0.3), rows / 1.6, 3.0) * r.uniform(0.62, 1.0)
    colour = r.choice(NAMES) if r.random() < 0.7 else None
    rgb = scene.paint(colour) if colour else scene.contrast()
    free_x, free_y = (columns - len(text) * pitch) / 2, (rows - 1.2 * pitch) / 2
    x, y = columns / 2 + r.uniform(-free_x, free_x), rows / 2 + r.uniform(-free_y, free_y)
    write(scene, text, rgb, x, y, pitch, 1 + NAMES.index(colour) if colour else 0)
    return scene


def number(grid, r, rare):
    while True:
        n = r.randrange(10 ** r.choice((1, 2, 2, 3)))
        if is_held_out(n) == rare:
            return [written(str(n), grid, r)], [("number", (), f"{n}.")]


def word(grid, r, rare):
    w = r.choice(WORDS)
    return [written(w.upper(), grid, r)], [("word", (), f"{w}.")]


def heights_of_bars(r):
    """Heights and colours of three or four bars, no two alike."""
    n = r.choice((3, 4))
    return r.sample(range(1, 7), n), r.sample(NAMES, n)


def chart(grid, r, rare):
    scene = Scene(grid, r)
    rows, columns = grid
    heights, tints = heights_of_bars(r)
    unit, base, pitch = (rows - 2.2) / 6, rows - 1.3, (columns - 0.8) / len(heights)
    line = [c * 0.7 + 128 * 0.3 for c in scene.ground]
    for k in range(7):
        scene.add(BOX, columns / 2, base - k * unit, columns - 0.6, 0.06, line, seen=False)
    for i, (height, tint) in enumerate(zip(heights, tints)):
        x, h = 0.4 + (i + 0.5) * pitch, height * unit
        scene.add(BOX, x, base - h / 2, 0.6 * pitch, h, scene.paint(tint), seen=False)
        rows_of_top = min(int(base - h + 0.3), rows - 1) * columns + min(int(x), columns - 1)
        scene.cells.append((rows_of_top, BOX, 1 + NAMES.index(tint), 10 + 6 * i + height - 1))
        write(scene, "ABCD"[i], scene.contrast(), x, rows - 0.6, 0.8)
    return [scene], chart_asks(heights, tints)


def chart_asks(heights, tints):
    """What a chart answers, as `shape_asks`."""
    bars = [f"bar {b} is {t} and {h} high" for b, t, h in zip("ABCD", tints, heights)]
    asks = [
        ("bars", (), listing(bars)),
        ("tallest", (), f"The tallest bar is bar {'ABCD'[heights.index(max(heights))]}."),
        ("smallest", (), f"The smallest bar is bar {'ABCD'[heights.index(min(heights))]}."),
    ]
    for bar, tint, height in zip("ABCD", tints, heights):
        asks.append(("height", (bar,), f"Bar {bar} is {height} high."))
        asks.append(("bar colour", (bar,), f"Bar {bar} is {tint}."))
    return asks


def clip(grid, r, rare, n_frames):
    """One or two shapes, of which one moves steadily or none does."""
    found = pairs(r, r.choice((1, 2)), rare)
    if len(set(found)) < len(found):
        found = found[:1]
    way = r.choice(("left", "right", "up", "down", None))
    steps = {"left": -1, "right": 1, "up": -3, "down": 3, None: 0}
    fits = {
        "left": lambda s: s % 3 > 0,
        "right": lambda s: s % 3 < 2,
        "up": lambda s: s > 2,
        "down": lambda s: s < 6,
        None: lambda s: True,
    }[way]
    start = r.choice([s for s in range(9) if fits(s)])
    end = start + steps[way]
    if way and r.random() < 0.4 and fits(end):
        end += steps[way]
    taken = {start, end, (start + end) // 2}
    spots = [start] + r.sample([s for s in range(9) if s not in taken], len(found) - 1)
    look = [looks(r) for _ in found]
    first = Scene(grid, r)
    paints = [first.paint(c) for _, c in found]
    frames = []
    for f in range(n_frames):
        scene = Scene(grid, r)
        scene.ground = first.ground
        for i, (shape, colour) in enumerate(found):
            size, (dx, dy) = look[i]
            if i == 0:
                share = f / (n_frames - 1)
                dx += share * (end % 3 - start % 3)
                dy += share * (end // 3 - start // 3)
            put(scene, spots[i], shape, colour, size, (dx, dy), paints[i])
        frames.append(scene)
    s, c = found[0]
    answer = {
        "left": "To the left.",
        "right": "To the right.",
        "up": "Up.",
        "down": "Down.",
        None: "It does not move.",
    }
    moves = ("moves", (), f"The {c} {s}." if way else "Nothing moves.")
    return frames, [moves, ("way", (f"{c} {s}",), answer[way])]


def chosen(asks, n, r, weights):
    """`n` of the questions that a picture answers: first a kind by weight, then one of it."""
    kinds = sorted({x[0] for x in asks})
    picked = r.choices(kinds, [weights.get(k, 1) for k in kinds], k=n)
    return [r.choice([x for x in asks if x[0] == kind]) for kind in picked]


def example(grid, r, n_frames=1, split="train", n_asks=1):
    """`(frames, [(kind of question, question, answer)])`. The split is "train", "pictures" (as
    in training), "phrasing" (a new one) or "combination" (a held-out pair or number)."""
    rare = split == "combination"
    if n_frames > 1:
        frames, asks = clip(grid, r, rare, n_frames)
    else:
        makers = {"shapes": shapes, "number": number, "word": word, "chart": chart}
        kinds = ("shapes", "number") if rare else tuple(SHARES)
        make = makers[r.choices(kinds, [SHARES[k] for k in kinds])[0]]
        frames, asks = make(grid, r, rare)
    weights = WEIGHTS if split == "train" else {}
    return frames, asked(asks, n_asks, r, weights, split == "phrasing")


def asked(asks, n, r, weights, new=False):
    """`[(kind of question, question, answer)]` of `n` of the `asks`, `new` phrasings or usual ones."""
    result = []
    for kind, slots, answer in chosen(asks, n, r, weights):
        question = r.choice(PHRASES[kind][new]).format(*slots)
        for vowel in "aeiou":
            question = question.replace(f" a {vowel}", f" an {vowel}")
        result.append((kind, question, answer))
    return result


def arrays(scenes):
    """What `draw` takes, for scenes of one grid: marks `[n, MARKS, 8]`, grounds `[n, 3]`;
    and the facts of every cell, `[n, cells, 3]`: kind, colour, and the spot of a shape or
    the letter and height of a bar."""
    marks = np.zeros((len(scenes), MARKS, 8), np.float32)
    rows, columns = scenes[0].grid
    facts = np.zeros((len(scenes), rows * columns, 3), np.int64)
    for i, scene in enumerate(scenes):
        marks[i, : len(scene.marks)] = scene.marks
        for at, *known in scene.cells:
            facts[i, at] = known
    return marks, np.stack([s.ground for s in scenes]).astype(np.float32), facts


def rng(seed):
    return random.Random(seed)
