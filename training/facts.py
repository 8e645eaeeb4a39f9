"""Short lists of facts, and questions that look one of them up.

A picture tower shows a finished decoder several things at once, and the decoder has to
name a property of the one that is asked for. So training shows it the scenes of
`pictures.py` as text, in many forms, with the same questions and the same answers, and
lists of who has what. Held-out phrasings, pairs and numbers stay held out.

Everything here is our own work and may be used freely (CC0-1.0).
Deliberately absent: pixels, and kinds of scene that need no look-up (numbers, words, clips).
"""

import pictures
from pictures import a, listing, place
from stories import BOYS, GIRLS

# How often a list is of shapes, of bars, of people.
SHARES = (0.76, 0.12, 0.12)
# Questions about one list: as often one as two to four.
MOST_ASKS = 4
INTROS = ("", "", "", "", "In the picture: ", "The picture shows this: ", "I see this: ", "Look at this. ")
# What stands between the facts and the question.
BREAKS = ("\n", "\n", "\n\n", " ")
NEEDS_PLACES = ("describe", "place", "side")
NOTHING = ("nothing", "empty", "-")
THINGS = "ball kite book hat cup drum lamp bag coat boat bell box key flag chair bike cake rope".split()


def spot_name(spot):
    """A place without its `in the`."""
    return place(spot).removeprefix("in the ")


def sentences(parts):
    return " ".join(part[0].upper() + part[1:] + "." for part in parts)


def grid(placed, r):
    """All nine spots, row by row."""
    held, nothing = dict(placed), r.choice(NOTHING)
    cells = [" ".join(reversed(held[spot])) if spot in held else nothing for spot in range(9)]
    cell, row = r.choice(((", ", "\n"), (", ", "; "), (" | ", "\n"), (" ", "\n")))
    return row.join(cell.join(cells[3 * i : 3 * i + 3]) for i in range(3))


# Forms of a list of `(spot, shape, colour)` that say places, and those that do not.
WITH_PLACES = (
    lambda x, r: listing([a(f"{c} {s} {place(spot)}") for spot, s, c in x]),
    lambda x, r: sentences([f"there is {a(f'{c} {s}')} {place(spot)}" for spot, s, c in x]),
    lambda x, r: sentences([f"the {c} {s} is {place(spot)}" for spot, s, c in x]),
    lambda x, r: sentences([f"the {s} {place(spot)} is {c}" for spot, s, c in x]),
    lambda x, r: sentences([f"{place(spot)} is {a(f'{c} {s}')}" for spot, s, c in x]),
    lambda x, r: r.choice((", ", "; ", "\n", " ")).join(f"{c} {s} {spot_name(spot)}" for spot, s, c in x),
    lambda x, r: r.choice((", ", "; ", "\n")).join(f"{spot_name(spot)}: {c} {s}" for spot, s, c in x),
    lambda x, r: r.choice(("; ", "\n", " ")).join(f"{s} {c} {spot_name(spot)}" for spot, s, c in x),
)
WITHOUT_PLACES = (
    lambda x, r: listing([a(f"{c} {s}") for _, s, c in x]),
    lambda x, r: sentences([f"the {s} is {c}" for _, s, c in x]),
    lambda x, r: sentences([f"there is {a(f'{c} {s}')}" for _, s, c in x]),
    lambda x, r: r.choice((", ", "; ", "\n", " ")).join(f"{c} {s}" for _, s, c in x),
    lambda x, r: r.choice((", ", "; ", "\n")).join(f"{s} {c}" for _, s, c in x),
)
BAR_FORMS = (
    lambda x, r: listing([f"bar {b} is {t} and {h} high" for b, t, h in x]),
    lambda x, r: sentences([f"bar {b} is {t}" for b, t, _ in x] + [f"bar {b} is {h} high" for b, _, h in x]),
    lambda x, r: r.choice(("; ", "\n", " ")).join(f"{b}: {t}, {h}" for b, t, h in x),
    lambda x, r: r.choice((", ", "\n", " ")).join(f"{b} {h} {t}" for b, t, h in x),
)


def shapes(r):
    """A list of shapes and what it answers."""
    found, placed = pictures.arrangement(r, False)
    asks = pictures.shape_asks(found, placed, False, r)
    if r.random() < 0.15:
        return grid(placed, r), asks
    facts = [(spot, shape, colour) for spot, (shape, colour) in placed]
    if r.random() < 0.7:
        if r.random() < 0.35:
            r.shuffle(facts)
        return r.choice(WITH_PLACES)(facts, r), asks
    # In reading order, which is that of the answers.
    return r.choice(WITHOUT_PLACES)(facts, r), [x for x in asks if x[0] not in NEEDS_PLACES]


def bars(r):
    heights, tints = pictures.heights_of_bars(r)
    facts = list(zip("ABCD", tints, heights))
    return r.choice(BAR_FORMS)(facts, r), pictures.chart_asks(heights, tints)


def people(r):
    """Who has what: whole questions instead of the slots of `pictures.PHRASES`."""
    n = r.randint(2, 6)
    names, things = r.sample(sorted({*BOYS, *GIRLS}), n), r.sample(THINGS, n)
    facts = [(name, r.choice(pictures.NAMES), thing) for name, thing in zip(names, things)]
    asks = []
    for name, colour, thing in facts:
        anybodys = r.choice(things)
        asks += [
            (f"What does {name} have?", f"{name} has {a(f'{colour} {thing}')}."),
            (f"Who has the {thing}?", f"{name} has the {thing}."),
            (f"What colour is the {thing}?", f"The {thing} is {colour}."),
            (f"Does {name} have {a(thing)}?", "Yes."),
            (f"Does {name} have {a(anybodys)}?", "Yes." if anybodys == thing else "No."),
        ]
    asks.append((r.choice(("How many people are there?", "How many people have something?")), f"{n}."))
    text = sentences([f"{name} has {a(f'{colour} {thing}')}" for name, colour, thing in facts])
    return text, asks


def turns(r, n_asks=None):
    """The turns of a conversation about one list: facts and a question, an answer, more of them."""
    make = r.choices((shapes, bars, people), SHARES)[0]
    n = n_asks or (1 if r.random() < 0.5 else r.randint(2, MOST_ASKS))
    facts, asks = make(r)
    if make is people:
        picked = r.sample(asks, n)
    else:
        picked = [(question, answer) for _, question, answer in pictures.asked(asks, n, r, pictures.WEIGHTS)]
    found = [text for pair in picked for text in pair]
    found[0] = r.choice(INTROS) + facts + r.choice(BREAKS) + found[0]
    return found
