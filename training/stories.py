"""Little stories from a grammar, with the facts that each of them contains.

Spintax: `[a|b|c]` picks one and may nest; `{x}` is a slot of the context. A plot
fills the context and returns its beats and its facts, so that a reading question
has an exact answer. Everything here is our own work and may be used freely
(CC0-1.0).

Deliberately absent: chat formats and tokens (`chat.py`), other exercises
(`exercises.py`).
"""

import random
import re

BOYS = "Tom Ben Max Sam Leo Jack Tim Finn Oscar Noah Eli Hugo Theo Milo Omar Ravi Kofi Luca Felix Jonas Diego Kenji Arlo Otto Nico Adam Joel Pablo Emil Musa".split()
GIRLS = "Lily Mia Anna Zoe Lucy Ella Nora Ruby Ava Ivy Rosa Maya Sara Amy Clara Nina Tara Elsa June Leila Priya Hana Greta Iris Alma Wren Freya Olive Esme Tilda".split()
ANIMALS = "rabbit fox bear mouse owl duck frog turtle squirrel hedgehog kitten puppy elephant penguin deer goat lamb beaver otter badger robin sparrow monkey pony seal crab snail mole parrot panda".split()
PETNAMES = "Pip Momo Biscuit Hazel Bramble Nibbles Tuft Dot Pepper Clover Button Waffle Sunny Misty Maple Pebble Poppy Rusty Tansy Fudge Willow Bubbles Acorn Cricket Honey Puddle Twig Moss Breezy Mango Olly Fern Juniper Ziggy Toffee Marble Smudge Comet Pickle Dusty".split()
PLACES = [
    ("the park", "in the park"),
    ("the forest", "in the forest"),
    ("the beach", "on the beach"),
    ("the garden", "in the garden"),
    ("the meadow", "in the meadow"),
    ("the river", "by the river"),
    ("the pond", "by the pond"),
    ("the market", "at the market"),
    ("the farm", "on the farm"),
    ("the hill", "on the hill"),
    ("the old barn", "in the old barn"),
    ("the library", "in the library"),
    ("the lake", "by the lake"),
    ("the playground", "on the playground"),
    ("the orchard", "in the orchard"),
    ("the village square", "in the village square"),
]
HIDE = [
    "under a bench",
    "behind a tall tree",
    "under a pile of leaves",
    "inside an old boot",
    "between two big rocks",
    "in a bush",
    "on top of the fence",
    "next to the well",
    "under the bridge",
    "in the long grass",
    "behind the shed",
    "in an empty basket",
    "at the bottom of the bag",
    "beside the pond",
    "under the bed",
    "on the window sill",
]
COLORS = "red blue green yellow purple orange pink white brown silver golden".split()
THINGS = "kite ball drum map lantern key shell button boat book hat bell umbrella scarf basket whistle puzzle feather ribbon marble spoon flute coin mitten balloon bucket train paintbrush blanket".split()
FOODS = [
    "an apple",
    "a cookie",
    "a slice of bread",
    "a bowl of soup",
    "a pear",
    "a bun",
    "some cheese",
    "a carrot",
    "a handful of berries",
    "a pancake",
    "a plum",
    "a piece of cake",
    "some nuts",
    "a sandwich",
    "a muffin",
]
WEATHER = [
    "The sun was [bright|warm|high in the sky]",
    "A soft wind blew",
    "The sky was [blue|clear|full of small white clouds]",
    "It was a [cool|warm|quiet|lovely] [morning|afternoon]",
    "Birds were singing",
    "The air smelled [sweet|of fresh grass|of rain]",
]
TRAITS = {
    "kind": "always thought of others",
    "curious": "asked questions about everything",
    "brave": "was not afraid to try",
    "shy": "did not say much",
    "cheerful": "smiled all day long",
    "careful": "looked twice before every step",
    "clever": "liked to solve puzzles",
    "patient": "could wait a long time",
    "playful": "turned everything into a game",
    "stubborn": "never liked to give up",
    "gentle": "never hurt even a fly",
    "lazy": "liked to sleep late",
    "proud": "liked to talk about {his} own tricks",
    "hopeful": "believed that good things would come",
}
GROWN = [
    ("mother", "she"),
    ("father", "he"),
    ("grandmother", "she"),
    ("grandfather", "he"),
    ("aunt", "she"),
    ("uncle", "he"),
    ("teacher", "she"),
]
WISE = [
    ("an old owl", "the old owl"),
    ("an old turtle", "the old turtle"),
    ("a wise toad", "the wise toad"),
    ("an old farmer", "the old farmer"),
    ("a kind baker", "the kind baker"),
    ("a grey goose", "the grey goose"),
    ("an old sailor", "the old sailor"),
    ("a tall heron", "the tall heron"),
]


def spin(s, r):
    """expand innermost [..|..] until none is left"""
    while True:
        m = re.search(r"\[([^\[\]]*)\]", s)
        if not m:
            return s
        s = s[: m.start()] + r.choice(m.group(1).split("|")) + s[m.end() :]


class Who:
    def __init__(s, r, kind=None, avoid=()):
        s.kind = kind or r.choice(["child"] * 5 + ["animal"] * 6)
        s.g = r.choice("mf")
        if s.kind == "child":
            s.name = r.choice([n for n in (BOYS if s.g == "m" else GIRLS) if n not in avoid])
            s.noun = r.choice(["boy", "little boy"]) if s.g == "m" else r.choice(["girl", "little girl"])
            s.bare = "boy" if s.g == "m" else "girl"
        else:
            s.name = r.choice([n for n in PETNAMES if n not in avoid])
            s.bare = r.choice(ANIMALS)
            s.noun = r.choice(["", "little ", "young ", "small "]) + s.bare
        s.he, s.him, s.his = ("he", "him", "his") if s.g == "m" else ("she", "her", "her")

    def slots(s, p):
        c = lambda x: x[0].upper() + x[1:]
        return {
            p: s.name,
            p + "_noun": s.noun,
            p + "_bare": s.bare,
            p + "_he": s.he,
            p + "_him": s.him,
            p + "_his": s.his,
            p + "_He": c(s.he),
            p + "_His": c(s.his),
            p + "the": s.name if s.kind == "child" else "%s the %s" % (s.name, s.bare),
        }


class Ctx(dict):
    def __missing__(s, k):
        raise KeyError(k)


def fill(t, c, r):
    out = spin(t, r).format_map(c)
    while "[" in out or "{" in out:
        out = spin(out, r).format_map(c)
    return out


def fix(t):
    t = re.sub(r"\s+([,.!?])", r"\1", re.sub(r"[ \t]+", " ", t))
    t = re.sub(r"\b([Aa]) (?=(?:[aeiou]|hour|honest)(?!ne\b|niform|seful|nicorn|ni))", r"\1n ", t)
    t = re.sub(r"\b([Aa])n (?=[^aeiouAEIOUhH\W])", r"\1 ", t)
    t = re.sub(r"(^|[.!?] |\n)([a-z])", lambda m: m.group(1) + m.group(2).upper(), t)
    t = re.sub(r"((?:^|[.!?] |[.!?]\" |\n)\")([a-z])", lambda m: m.group(1) + m.group(2).upper(), t)
    return t.strip()


OPEN = [
    "[Once upon a time|Long ago|Once upon a time, in a land {far}|A long time ago], [there was|there lived] a {h_noun} [named|called] {h}. {h} [lived {home}|lived {home} with {h_his} family] and {trait_does}.",
    "{h} was a {trait} {h_noun} who lived {home}. {h_He} {trait_does}.",
    "[There was once|Once there was] a {h_noun} [named|called] {h}. {h_He} was very {trait}. {h_He} {trait_does}.",
    "In a [small house|quiet village|green valley|little town] {far}, there lived a {h_noun} [named|called] {h}. Everyone said that {h} was {trait}, because {h_he} {trait_does}.",
]
HOMES = [
    "near a big forest",
    "by the sea",
    "at the edge of a village",
    "on a green hill",
    "in a tall tree house",
    "next to a river",
    "in a cosy cottage",
    "near an old mill",
    "on a small farm",
    "at the end of a long road",
]
FAR = ["by the sea", "far away", "behind the hills", "near the woods", "beside a lake"]
WALK = [
    "[{h} set off|{h} started out|{h} went out] [early|after breakfast|with a smile|with a little song]. {weather}.",
    "{weather}, so {h} [decided to go|went] to {place}.",
    "{weather}. It was a [perfect|good|fine] day to go to {place}.",
    "After [breakfast|lunch], {h} [ran|walked|hurried|skipped] to {place}. {weather}.",
]
HAPPY = [
    "{h} [smiled|laughed|clapped {h_his} hands|jumped for joy|felt warm inside].",
    "{h} was [so happy|very glad|full of joy] that {h_he} [could not stop smiling|wanted to sing|danced a little dance].",
    "It was the best [day|feeling] of all.",
]
END = [
    "From that day on, {h} [always remembered|never forgot] [to {lesson}|that it is good to {lesson}].",
    "And [so|that is how] {h} learned [to {lesson}|that it is good to {lesson}].",
    "That night, {h} [went to bed|fell asleep|lay in bed] with a smile, because {h_he} had learned to {lesson}.",
    "{h} knew now that it is [good|wise|important] to {lesson}.",
    "The end.",
]


def base(r, kind=None, fkind=None):
    h = Who(r, kind)
    f = Who(r, fkind, avoid=(h.name,))
    c = Ctx()
    while f.name == h.name or (f.kind == "animal" and f.bare == h.bare):
        f = Who(r, fkind, avoid=(h.name,))
    c.update(h.slots("h"))
    c.update(f.slots("f"))
    tr = r.choice([t for t in TRAITS if t not in ("lazy", "proud")])
    c["trait"] = tr
    c["trait_does"] = TRAITS[tr].replace("{his}", h.his)
    pl, at = r.choice(PLACES)
    pl2, at2 = r.choice([p for p in PLACES if p[0] != pl])
    c.update(place=pl, at=at, place2=pl2, at2=at2)
    col, th = r.choice(COLORS), r.choice(THINGS)
    c.update(color=col, thing=th, obj="%s %s" % (col, th))
    g, gh = r.choice(GROWN)
    c.update(
        grown=g,
        g_he=gh,
        g_He=gh.capitalize(),
        g_his="his" if gh == "he" else "her",
        g_him="him" if gh == "he" else "her",
    )
    w, w2 = r.choice(WISE)
    c.update(wise=w, wise2=w2, Wise2=w2[0].upper() + w2[1:])
    c.update(home=r.choice(HOMES), far=r.choice(FAR), food=r.choice(FOODS), hide=r.choice(HIDE))
    c["weather"] = spin(r.choice(WEATHER), r)
    c["num"] = r.choice(["two", "three", "four", "five", "six"])
    c["lesson"] = "be kind"
    return c, h, f


def P(*beats):
    return list(beats)


PLOTS = {}


def plot(f):
    PLOTS[f.__name__] = f
    return f


@plot
def lost_thing(c, r):
    c["lesson"] = r.choice(
        ["ask for help", "stay calm and look carefully", "take good care of {h_his} things"]
    ).format_map(c)
    h1, h2, h3 = r.sample(HIDE, 3)
    c.update(h1=h1, h2=h2, h3=h3)
    facts = [
        ("What did %s lose?" % c["h"], "%s lost a %s." % (c["h"], c["obj"])),
        ("Where was the %s?" % c["thing"], "The %s was %s." % (c["thing"], h3)),
        ("Who helped %s look for the %s?" % (c["h"], c["thing"]), "%s helped." % (c["fthe"],)),
    ]
    return (
        P(
            "{h}'s favourite thing in the world was a {obj}. {h_He} [took|carried] it everywhere.",
            '[One day|One morning|One afternoon], {h} [looked for|wanted to play with] the {thing}, but it was [gone|not there|nowhere to be seen]. "Oh no! Where is my {thing}?" {h_he} [cried|said|asked]. {h_He} felt [very sad|worried|a lump in {h_his} throat].',
            '{h}\'s friend {fthe} [came by|heard {h_him}|saw {h_his} sad face]. "[Don\'t cry|Don\'t worry|Do not be sad], {h}," said {f}. "[Let us look together|I will help you find it|Two can look better than one]."',
            '[First|At first], they looked {h1}, but [there was only {junk}|they found only {junk}]. Then they looked {h2}, but [the {thing} was not there|there was nothing]. {h} [wanted to give up|began to feel tired|sat down and sighed]. "[Think|Try to remember]," said {f}. "Where [were you|did you play] yesterday?"',
            '{h} thought [hard|for a while]. "I was {at}!" {h_he} [said|shouted]. They [ran|hurried] to {place}, and there, {h3}, was the {obj}! "[Hooray|We found it|There it is]!" [they both shouted|shouted {f}].',
            '{h} hugged {f}. "Thank you for helping me," {h_he} said. "[You are a true friend|I could not have done it alone]." '
            + r.choice(HAPPY),
        ),
        facts,
    )


@plot
def sharing(c, r):
    c["lesson"] = r.choice(["share", "share with others", "share what you have"])
    many = r.choice(
        [
            "a basket of sweet berries",
            "a big bag of nuts",
            "a warm apple pie",
            "a box of crayons",
            "a bag of cookies",
            "six ripe pears",
            "a jar of honey",
            "a big bowl of cherries",
        ]
    )
    c["many"] = many
    facts = [
        ("What did %s have?" % c["h"], "%s had %s." % (c["h"], many)),
        (
            "Why did %s feel lonely?" % c["h"],
            "%s felt lonely because %s did not share." % (c["h"], c["h_he"]),
        ),
        ("What is the lesson of the story?", "The lesson is that it is good to %s." % c["lesson"]),
    ]
    return (
        P(
            'One day, {h} [got|was given] {many}. "[These are all mine|This is all for me|I will not give any away]," {h_he} [thought|said to {h_him}self].',
            '{h} [sat down|went to sit] {at} to enjoy it. [Soon|After a while], {fthe} came along. "[May I have some|Could I have a little, please|Will you share with me], {h}?" asked {f}. "I have not had [breakfast|anything nice] today."',
            '"No," said {h}. "It is mine." {f} [looked at the ground|was quiet for a moment] and [walked away|went home] [slowly|sadly].',
            "{h} [kept everything for {h_him}self|went on alone], but [somehow it was not much fun|it did not feel as good as {h_he} had hoped]. There was nobody to [laugh with|talk to|play with]. {h_He} felt [lonely|sorry|a little ashamed].",
            'So {h} [got up|jumped up] and ran after {f}. "Wait!" {h_he} [called|shouted]. "I am sorry. [Please have some|Half of it is for you|Let us share it]." {f}\'s [eyes lit up|face became bright]. "[Thank you|How kind of you], {h}!"',
            "They sat side by side {at} and [shared everything|ate and talked and laughed] until the sun went down. "
            + r.choice(
                [
                    "It tasted twice as good.",
                    "Everything was better together.",
                    "{h} had never had so much fun.",
                ]
            ),
        ),
        facts,
    )


@plot
def stuck(c, r):
    where, how = r.choice(
        [
            ("in the mud", "pushed a long branch under {f_him} and pulled"),
            ("in a tall tree", "leaned a ladder against the trunk and climbed up"),
            ("in a thorny bush", "bent the branches back one by one"),
            ("in a deep hole", "let down a rope"),
            ("under a fallen branch", "lifted the branch with a strong stick"),
            ("inside a hollow log", "rolled the log gently to one side"),
            ("on a rock in the middle of the stream", "laid a plank across the water"),
        ]
    )
    c["where"], c["how"] = where, how.format_map(c)
    c["lesson"] = r.choice(["help those in need", "think before giving up", "help others"])
    facts = [
        ("Where was %s stuck?" % c["f"], "%s was stuck %s." % (c["f"], where)),
        ("How did %s help?" % c["h"], "%s %s." % (c["h"], c["how"])),
        ("Who was stuck?", "%s was stuck." % (c["fthe"],)),
    ]
    return (
        P(
            r.choice(WALK),
            '[Suddenly|On the way|After a while], {h} heard a [small|quiet|sad] voice. "Help! [Please help me|Is anyone there|Can somebody help me]!" {h} [followed the sound|looked all around|ran to see]. It was {f}, a {f_noun}, and {f_he} was stuck {where}!',
            '"[Hold on|Do not be afraid|Stay still]!" said {h}. "[I will get you out|I will help you|We will find a way]." {h_He} pulled and pulled, but {f} [did not move|was still stuck]. {h} [stopped to think|scratched {h_his} head|took a deep breath].',
            "Then {h} had an idea. {h_He} {how}. [Slowly, slowly|Little by little|With one last pull], {f} came free!",
            '"You [saved me|did it]!" [cried|said] {f}. "How can I [ever thank you|thank you]?" "[You do not have to|Just be my friend|A smile is enough]," said {h}.',
            "[From then on|After that], {h} and {f} [were best friends|played together every day|visited each other often]. [And whenever one was in trouble, the other came to help.|]",
        ),
        facts,
    )


@plot
def fear(c, r):
    what, small, why = r.choice(
        [
            ("the dark", "turned off the lamp", "the shadows were only the coats on the wall"),
            ("thunder", "listened to the rain", "thunder is only the sky making noise"),
            ("deep water", "put one foot into the lake", "the water could hold {h_him} up"),
            ("the tall slide", "climbed the first step", "going down felt like flying"),
            ("loud noises", "covered {h_his} ears and then let go", "the noise was only the old mill wheel"),
            ("the big dog next door", "held out {h_his} hand", "the dog only wanted to play"),
            ("high places", "climbed one branch up", "the view from the top was beautiful"),
            ("singing in front of others", "sang one short line", "everyone was listening kindly"),
        ]
    )
    c.update(what=what, small=small.format_map(c), why=why.format_map(c))
    c["lesson"] = r.choice(["be brave", "try, even when you are afraid", "take one small step at a time"])
    facts = [
        ("What was %s afraid of?" % c["h"], "%s was afraid of %s." % (c["h"], what)),
        ("Who helped %s to be brave?" % c["h"], "%s's %s helped %s." % (c["h"], c["grown"], c["h_him"])),
        ("What did %s learn?" % c["h"], "%s learned to %s." % (c["h"], c["lesson"])),
    ]
    return (
        P(
            "There was [only one thing|just one thing] that {h} did not like: {h_he} was afraid of {what}. [Whenever {h_he} thought of it|Just thinking about it], {h_his} [heart went thump, thump, thump|knees began to shake|tummy felt strange].",
            'One [day|evening], {h_his} {grown} [saw {h_his} worried face|sat down next to {h_him}]. "What is the matter, {h}?" {g_he} asked. "I am afraid of {what}," {h} [whispered|said softly].',
            '"[Everyone is afraid of something|I was afraid of that too when I was small|Being brave does not mean you are never afraid]," said {h_his} {grown}. "[It means you try anyway|Let us try it together|We can take one small step]. [I will hold your hand|I am right here with you]."',
            "So {h} [took a deep breath|counted to three|closed {h_his} eyes for a moment] and {small}. [Nothing bad happened|It was not so bad]. {h_He} tried again, and this time it was [easier|a little better]. Soon {h} found out that {why}.",
            '"I did it!" {h} [shouted|laughed]. {h_His} {grown} gave {h_him} a big hug. "I am so proud of you," {g_he} said. '
            + r.choice(HAPPY),
        ),
        facts,
    )


@plot
def seed(c, r):
    plant, col = r.choice(
        [
            ("sunflower", "golden"),
            ("apple tree", "green"),
            ("pumpkin", "orange"),
            ("rose", "red"),
            ("bean plant", "tall green"),
            ("tulip", "purple"),
            ("strawberry plant", "bright red"),
        ]
    )
    c.update(plant=plant, pcol=col)
    c["lesson"] = r.choice(["be patient", "wait and care for things", "take care of small things"])
    facts = [
        ("What grew from the seed?", "A %s grew from the seed." % plant),
        ("Who gave %s the seed?" % c["h"], "%s gave %s the seed." % (c["Wise2"], c["h_him"])),
        ("What did %s learn?" % c["h"], "%s learned to %s." % (c["h"], c["lesson"])),
    ]
    return (
        P(
            'One [spring morning|day in spring], {h} met {wise} {at}. {Wise2} gave {h_him} a tiny seed. "[Plant this and take care of it|Put it in the ground and be patient]," said {wise2}. "[Something wonderful will grow|You will see a surprise]."',
            "{h} [ran home|hurried home] and dug a small hole. {h_He} put the seed in, covered it with [soft|dark] earth, and gave it [some water|a drink of water]. Then {h_he} [sat down to watch|waited]. [Nothing happened.|But nothing happened at all.]",
            'The next day {h} looked again. Still nothing! "[Maybe the seed is broken|This seed is too slow|It will never grow]," {h_he} said to {fthe}. "[Seeds need time|Good things take time|Give it sun and water, and wait]," said {f}.',
            "So every morning {h} [watered the seed|gave the seed water] and [told it a little story|sang it a song|pulled out the weeds]. One day passed, then {num}, then a whole week.",
            'And then, one [bright|sunny] morning, there was a tiny green [leaf|shoot]! It grew and grew, until a [beautiful|big], {pcol} {plant} stood in the garden. "[You were right to wait|Look what you grew]!" said {f}. '
            + r.choice(HAPPY),
        ),
        facts,
    )


@plot
def truth(c, r):
    item, how = r.choice(
        [
            ("the blue vase", "while playing with a ball in the house"),
            ("the big window", "with a stone"),
            ("the best cup", "while washing the dishes"),
            ("the clock", "while trying to see how it worked"),
            ("the flower pot", "while running too fast"),
            ("the garden gate", "by swinging on it"),
            ("the picture on the wall", "while jumping on the bed"),
        ]
    )
    c.update(item=item, how=how)
    c["lesson"] = r.choice(["tell the truth", "be honest", "say sorry and tell the truth"])
    facts = [
        ("What did %s break?" % c["h"], "%s broke %s." % (c["h"], item)),
        ("What did %s do at the end?" % c["h"], "%s told the truth and said sorry." % c["h"]),
        (
            "Was %s's %s angry at the end?" % (c["h"], c["grown"]),
            "No, %s was glad that %s told the truth." % (c["g_he"], c["h"]),
        ),
    ]
    return (
        P(
            "One [rainy|quiet|long] afternoon, {h} broke {item} {how}. Crash! {h} [looked at the pieces|stood very still]. {h_His} {grown} loved {item}.",
            '{h} was [afraid|scared]. {h_He} [hid the pieces under a blanket|swept everything behind the door|ran to {h_his} room]. When {h_his} {grown} came home, {g_he} asked, "[What happened to {item}|Do you know who broke {item}]?" "I do not know," said {h}. ["Maybe it was the wind."|"Maybe it was the cat."|]',
            "But [that night|at dinner], {h} could not [sleep|eat]. {h_His} tummy [hurt|felt heavy as a stone]. The little lie [seemed to grow bigger and bigger|would not go away].",
            'At last {h} [went to {h_his} {grown}|got up]. "I [have to tell you something|did not tell the truth]," {h_he} said with tears in {h_his} eyes. "I broke {item}. I am [so|very] sorry."',
            '{h_His} {grown} [was quiet for a moment|took {h_his} hand] and then [smiled|gave {h_him} a hug]. "[Thank you for telling me the truth|That was brave of you]. {item_c} can be [fixed|mended]. [A lie is much harder to fix.|I am glad you told me.]" Together they [glued the pieces|cleaned up], and {h} felt [as light as a feather|much better].',
        ),
        facts,
    )


@plot
def new_friend(c, r):
    game = r.choice(
        [
            "hide and seek",
            "tag",
            "a game with a ball",
            "pirates",
            "jump rope",
            "a treasure hunt",
            "building a tower",
            "drawing with chalk",
        ]
    )
    c["game"] = game
    c["lesson"] = r.choice(["be friendly to someone new", "make new friends", "be kind to everyone"])
    facts = [
        ("Who was new?", "%s was new." % (c["fthe"],)),
        ("What did they play?", "They played %s." % game),
        ("How did %s feel at first?" % c["f"], "%s felt shy and alone at first." % c["f"]),
    ]
    return (
        P(
            "One day, somebody new came to {place}. It was {f}, a {f_noun}. {f} [stood alone by the gate|sat alone on a stone|looked at the ground] and did not say a word.",
            '"[Who is that|Why is {f_he} so quiet]?" the others asked. [Some of them laughed.|Nobody went to talk to {f_him}.] But {h} [remembered how it feels to be alone|thought that {f} looked sad].',
            'So {h} walked over. "Hello! I am {h}," {h_he} said. "What is your name?" "I am {f}," {f_he} said in a very small voice. "[We just moved here|I do not know anyone here|Everything is new for me]." "Well, [now you know me|now you have one friend]," said {h}. "Do you want to play {game}?"',
            '{f} [looked up|smiled a tiny smile]. "I [love|like] {game}!" {f_he} said. They played {game} [all afternoon|until the sun went down]. {f} was [very good at it|so funny that everyone laughed]. Soon the others came to [play too|join in].',
            'At the end of the day, {f} [waved and said|said], "Thank you, {h}. [I was so afraid this morning|You made my day]. Will you play with me tomorrow?" "[Of course|Yes|Every day]!" said {h}.',
        ),
        facts,
    )


@plot
def race(c, r):
    prize = r.choice(["a silver cup", "a big cake", "a golden ribbon", "a basket of fruit", "a shiny medal"])
    c["prize"] = prize
    c["lesson"] = r.choice(
        ["help a friend", "be kind, even in a race", "care more about friends than about prizes"]
    )
    facts = [
        ("What was the prize?", "The prize was %s." % prize),
        ("Why did %s stop?" % c["h"], "%s stopped to help %s." % (c["h"], c["f"])),
        ("Who fell down?", "%s fell down." % (c["fthe"],)),
    ]
    return (
        P(
            "One day there was a [big|great] race {at}. The winner would get {prize}. {h} [wanted to win more than anything|had been running every morning to get ready]. {h_His} friend {fthe} was in the race too.",
            '"Ready, steady, go!" [called|shouted] {wise2}, and [off they went|everyone began to run]. {h} ran [fast|like the wind]. {h_He} passed one runner, then {num} more. [Soon {h_he} was in front|Only {f} was still ahead of {h_him}].',
            "Then {h} heard a cry. {f} had [fallen|tripped over a stone] and [hurt {f_his} foot|could not get up]. {h} looked at the [finish line|end of the road]. It was so close! [If {h_he} kept running, {h_he} would win.|{h_He} could almost touch the prize.]",
            'But {h} stopped and [turned around|ran back]. "[Lean on me|Give me your hand]," {h_he} said. "[We will finish together|I will not leave you]." Slowly, step by step, the two friends went over the line. They were the very last.',
            'Yet everyone [clapped and cheered|cheered louder than before]. {Wise2} [smiled|nodded]. "[You did not win the race|You were last today]," {wise2} said, "but you have [the biggest heart|shown us all what a friend is]." And [everyone shared the prize|the prize was shared by all].',
        ),
        facts,
    )


@plot
def gift(c, r):
    g, mess = r.choice(
        [
            ("a birthday cake", "the flour went everywhere"),
            ("a drawing", "the paint ran down the paper"),
            ("a warm scarf", "the wool got all tangled"),
            ("a bunch of wild flowers", "the wind blew half of them away"),
            ("a little song", "{h_he} forgot the words"),
            ("a wooden bird house", "the roof was crooked"),
            ("a card with gold stars", "the glue stuck to {h_his} fingers"),
        ]
    )
    c.update(g=g, mess=mess.format_map(c))
    c["lesson"] = "give with love" if r.random() < 0.5 else "do things with love"
    facts = [
        ("What did %s make?" % c["h"], "%s made %s." % (c["h"], g)),
        ("Who was the gift for?", "The gift was for %s's %s." % (c["h"], c["grown"])),
        ("What went wrong?", "%s." % (c["mess"][0].upper() + c["mess"][1:])),
    ]
    return (
        P(
            'It was [almost|nearly] the birthday of {h}\'s {grown}, and {h} wanted to give {g_him} something [special|very nice]. But {h} had no money. "I will make {g}," {h_he} [said|decided].',
            "{h} [asked {fthe} to help|called {h_his} friend {fthe}], and they [went to work|started at once]. But [it was not easy|nothing went right]. First, {mess}. Then [it began to rain|they had to start again|everything fell on the floor].",
            '"It is [ugly|not good enough|all wrong]," said {h}, and [a tear rolled down {h_his} nose|{h_he} sat down sadly]. "[It is made with love|You worked so hard]," said {f}. "[That is what counts|Your {grown} will see that]."',
            'In the [evening|morning], {h} gave {g} to {h_his} {grown}. "I made it for you," {h_he} said [quietly|shyly]. "[It is not perfect.|I am sorry it is not better.]"',
            '{h_His} {grown} [looked at it for a long time|smiled from ear to ear]. "[It is the best present I ever got|I love it], because [you made it yourself|it comes from you]," {g_he} said and gave {h} a [big|warm|long] hug. '
            + r.choice(HAPPY),
        ),
        facts,
    )


@plot
def storm(c, r):
    c["lesson"] = r.choice(["open the door to others", "help each other", "make room for friends"])
    a = r.sample([x for x in ANIMALS if x not in (c["h_bare"], c["f_bare"])], 2)
    c.update(a1=a[0], a2=a[1])
    facts = [
        ("Who came to the door first?", "%s came first." % (c["fthe"],)),
        ("Why did they come to %s's house?" % c["h"], "They came because of the storm."),
        ("Which animals came after %s?" % c["f"], "A %s and a %s came." % (a[0], a[1])),
    ]
    return (
        P(
            "One [night|evening], a [great|terrible|wild] storm came. The wind [howled|blew], the rain [fell in buckets|beat on the roof], and the trees [bent low|shook]. {h} was [warm and dry at home|safe in bed].",
            'Knock, knock! {h} opened the door. There stood {f}, a {f_noun}, wet [from head to toe|and cold]. "My [roof|home] [blew away|is full of water]," said {f}. "May I [come in|stay with you tonight]?" "[Of course|Come in, come in]!" said {h}.',
            '[Soon|A little later] there was another knock, and then another. A {a1} and a {a2} [needed a dry place too|were standing in the rain]. {h}\'s [home|house] was small. "There is no room for [all of us|so many]," [said|thought] {f}.',
            '"There is always room for [friends|one more]," said {h}. They [moved the table|pushed the chairs away] and sat close together. {h} made [a big pot of soup|hot tea for everyone]. They [told stories|sang songs] while the storm [roared outside|went on].',
            'In the morning the sun [came out|was shining]. Everyone went to [mend the broken roof|clean up], and with so many hands it was done [in no time|before lunch]. "[Thank you for letting us in|You kept us safe], {h}," they said.',
        ),
        facts,
    )


@plot
def noise(c, r):
    src, snd = r.choice(
        [
            ("a tiny kitten", "meow"),
            ("a baby owl", "hoo"),
            ("a little hedgehog", "sniff, sniff"),
            ("a loose door", "creak"),
            ("a branch on the window", "tap, tap"),
            ("a hungry mouse", "scratch, scratch"),
            ("an old clock", "tick, tock"),
            ("a small frog", "ribbit"),
        ]
    )
    c.update(src=src, snd=snd)
    c["lesson"] = r.choice(["look before being afraid", "be curious and brave", "find out what is true"])
    facts = [
        ("What made the noise?", "%s made the noise." % (src[0].upper() + src[1:])),
        ("What did the noise sound like?", 'It went "%s".' % snd),
        ("Who went with %s?" % c["h"], "%s went with %s." % (c["fthe"], c["h_him"])),
    ]
    return (
        P(
            'One [dark|quiet|windy] night, {h} woke up. There was a [strange|funny] noise. "{snd_c}!" it went. "{snd_c}!" {h} pulled the blanket over {h_his} [head|nose].',
            '"[What can it be|Is it a monster]?" {h} [wondered|whispered]. {h_He} [tiptoed|went] to wake {fthe}, who was [sleeping|staying the night]. "{f}, do you hear that?" "{snd_c}!" went the noise. "I hear it," said {f}. "[Let us go and see|We should look together]."',
            'They took a [small lamp|candle|flashlight] and went [down the stairs|through the hall|to the door]. Step by step they came closer. "{snd_c}!" The noise was [very loud now|right behind the door].',
            "{h} [counted to three|took a deep breath] and opened the door. And what did they see? It was only {src}! {h} and {f} looked at each other and [began to laugh|laughed until their sides hurt].",
            '"[We were afraid of almost nothing|And I thought it was a monster]!" said {h}. They [went back to bed|drank some warm milk], and soon [both were fast asleep|they were sleeping again].',
        ),
        facts,
    )


@plot
def build(c, r):
    thing, parts = r.choice(
        [
            ("a raft", ["strong logs", "a long rope", "a flag"]),
            ("a tree house", ["wooden boards", "a box of nails", "a rope ladder"]),
            ("a snowman", ["three big balls of snow", "a carrot", "an old hat"]),
            ("a bridge over the stream", ["flat stones", "thick branches", "some rope"]),
            ("a cart", ["four wheels", "a wooden box", "a handle"]),
            ("a sand castle", ["wet sand", "shells", "a little flag"]),
            ("a kite", ["two sticks", "colourful paper", "a ball of string"]),
        ]
    )
    pl = {
        "a raft": ("the river", "by the river"),
        "a tree house": ("the forest", "in the forest"),
        "a snowman": ("the garden", "in the garden"),
        "a bridge over the stream": ("the meadow", "in the meadow"),
        "a sand castle": ("the beach", "on the beach"),
    }.get(thing)
    if pl:
        c.update(place=pl[0], at=pl[1])
    c.update(th=thing, p1=parts[0], p2=parts[1], p3=parts[2])
    c["lesson"] = r.choice(["work together", "make a plan and work as a team", "listen to each other"])
    facts = [
        ("What did they build?", "They built %s." % thing),
        ("What did they need?", "They needed %s, %s and %s." % tuple(parts)),
        (
            "Why did it fall apart the first time?",
            "It fall apart because they did not work together.".replace("fall", "fell"),
        ),
    ]
    return (
        P(
            '{h} and {h_his} friend {fthe} wanted to build {th} {at}. "I know how to do it!" said {h}. "No, I know!" said {f}. [Both began at once.|Each of them worked alone.]',
            '{h} [worked on one side|pulled this way], and {f} [worked on the other|pulled that way]. [Soon|Before long], crash! Everything fell apart. "It is your fault!" they both [shouted|said].',
            '{Wise2} [had seen everything|came by]. "[Why not make a plan|Two heads are better than one]," {wise2} said. "[First listen, then build|One can hold while the other ties]."',
            "So {h} and {f} sat down and made a plan. First, they [found|got] {p1}. Second, they [looked for|brought] {p2}. Third, they [added|found] {p3}. {h} [held everything tight|did the heavy work], and {f} [tied the knots|checked every corner]. They [talked and listened|helped each other].",
            'By [evening|noon], {th} was [finished|ready]. It was [strong and beautiful|even better than they had dreamed]. "[We did it together|What a team we are]!" said {f}, and they [shook hands|danced around it].',
        ),
        facts,
    )


@plot
def proud(c, r):
    skill, prob = r.choice(
        [
            ("run faster than anyone", "the path was full of mud"),
            ("jump higher than anyone", "the branch was too thin"),
            ("sing louder than anyone", "nobody could hear the warning bell"),
            ("swim better than anyone", "the river was too strong"),
            ("climb any tree", "the bark was wet and slippery"),
            ("find the way without a map", "fog covered the whole valley"),
        ]
    )
    c.update(skill=skill, prob=prob)
    c["lesson"] = r.choice(["be humble", "listen to good advice", "never laugh at others"])
    facts = [
        ("What could %s do?" % c["h"], "%s could %s." % (c["h"], skill)),
        ("Who helped %s?" % c["h"], "%s helped %s." % (c["fthe"], c["h_him"])),
        ("What did %s learn?" % c["h"], "%s learned to %s." % (c["h"], c["lesson"])),
    ]
    return (
        P(
            '{h} could {skill}, and {h_he} [told everybody about it|never stopped talking about it]. "[Look at me|Nobody is as good as I am]!" {h_he} would say. [{h_He} laughed at {fthe}, who was slow and quiet.|{h_He} made fun of {fthe}.]',
            '"[Be careful today|You should wait]," {f} said one morning. "[The weather is changing|It does not look safe]." But {h} only [laughed|shook {h_his} head]. "I do not need your advice. I can {skill}!" And off {h_he} went to {place}.',
            'But {f} was right: {prob}. {h} [slipped|tried and tried], and soon {h_he} [was in trouble|did not know what to do]. "Help!" {h_he} [called|cried].',
            "It was {f} who [came|heard {h_him}]. {f} was [slow, but steady|not fast, but very careful]. Step by step, {f_he} [showed {h} the way|led {h} back to safe ground].",
            '{h} [looked at the ground|felt ashamed]. "I laughed at you, and you helped me anyway," {h_he} said. "I am sorry." "[That is all right|Everyone is good at something]," said {f} with a smile.',
        ),
        facts,
    )


@plot
def lost_baby(c, r):
    baby, home = r.choice(
        [
            ("duckling", "the pond"),
            ("lamb", "the farm"),
            ("baby bird", "the nest in the oak tree"),
            ("fawn", "the clearing in the woods"),
            ("baby turtle", "the sea"),
            ("kitten", "the yellow house"),
            ("little bee", "the hive"),
        ]
    )
    c.update(baby=baby, bhome=home)
    c["lesson"] = r.choice(["help little ones", "be gentle", "care for others"])
    q = r.sample(["a cow", "a postman", "a fisherman", "a goose", "a gardener", "a horse", "a baker"], 2)
    c.update(q1=q[0], q2=q[1])
    facts = [
        ("What did %s find?" % c["h"], "%s found a lost %s." % (c["h"], baby)),
        ("Where was the %s's home?" % baby, "Its home was %s." % home),
        ("Whom did %s ask first?" % c["h"], "%s asked %s first." % (c["h"], q[0])),
    ]
    return (
        P(
            r.choice(WALK),
            '[There|On the way], {h} saw a tiny {baby}. It was all alone, and it was crying. "[What is wrong, little one|Are you lost]?" asked {h}. "I cannot find my mother," said the {baby}.',
            '"[Do not cry|I will help you]," said {h}. "[We will find her together|Let us look for her]." {h_He} picked up the {baby} very gently and [began to walk|set off].',
            'First they met {q1}. "Have you seen this {baby}\'s mother?" asked {h}. "No, [I am sorry|I have not]," was the answer. "[Try asking down the road|Maybe somebody else knows]." Then they met {q2}. "I [heard somebody calling|saw someone looking for a {baby}] near {bhome}," said {q2}.',
            '{h} [ran|hurried] to {bhome}. And there was the mother! "My baby!" she [cried|called]. The {baby} [ran into her arms|cuddled close to her]. "Thank you, {h}. [You brought my little one home|I was so worried]."',
            "{h} waved goodbye and walked home {slowly}. " + r.choice(HAPPY),
        ),
        facts,
    )


@plot
def wishes(c, r):
    w1 = r.choice(["a mountain of candy", "a house made of gold", "a hundred toys", "a crown with jewels"])
    c.update(w1=w1)
    c["lesson"] = r.choice(["be happy with what you have", "think before making a wish"])
    facts = [
        ("What did %s find?" % c["h"], "%s found a magic %s." % (c["h"], c["thing"])),
        ("What was the first wish?", "The first wish was %s." % w1),
        ("What was the last wish?", "The last wish was for everything to be as it was before."),
    ]
    return (
        P(
            '[One day|One morning], {h} found a {obj} {hide}. When {h_he} touched it, it began to [glow|shine]. "I am a magic {thing}," it said. "You may make three wishes."',
            '{h} [did not think for long|jumped up and down]. "I wish for {w1}!" Whoosh! There it was. [At first it was wonderful|{h} could not believe {h_his} eyes]. But soon [{h} grew tired of it|it was in the way].',
            '"Then I wish that [nobody could tell me what to do|I never had to work again]!" said {h}. Whoosh! Now [everything was quiet|nobody came to see {h_him}]. [Even {fthe} did not come to play.|There was nobody to talk to, not even {fthe}.] {h} felt [lonely|sad].',
            '{h} had one wish left. {h_He} thought [very carefully|all night long]. "I wish that everything was as it was before," {h_he} said at last.',
            'Whoosh! {h} was back at home. {f} was at the door with {food}. "Shall we share it?" {f} asked. {h} [laughed|hugged {f_him}]. "[This is better than any wish|I have everything I need]," {h_he} said.',
        ),
        facts,
    )


@plot
def guess_ahead(c, r):
    """speculative decoding as a fable"""
    job = r.choice(
        [
            ("the baker", "cakes", "bake"),
            ("the letter writer", "letters", "write"),
            ("the clock maker", "clocks", "build"),
            ("the story teller", "stories", "tell"),
            ("the bridge builder", "bridges", "build"),
        ]
    )
    c.update(master=job[0], goods=job[1])
    c["lesson"] = r.choice(["guess boldly and check carefully", "work fast together and still be right"])
    c["k"] = r.choice(["three", "four", "five"])
    facts = [
        ("What was %s's job?" % c["h"], "%s guessed ahead, so that the work went faster." % c["h"]),
        ("Who checked the guesses?", "%s checked the guesses." % (job[0][0].upper() + job[0][1:])),
        (
            "What happened to a wrong guess?",
            "A wrong guess was thrown away, and the right step took its place.",
        ),
    ]
    return (
        P(
            "{h} worked for {master}, who made the finest {goods} in the land. {Master} was [very careful|never wrong], but also very slow. {Master} did one step, thought about it, and only then did the next.",
            '"[May I help|I am quick]," said {h}. "I can guess your next {k} steps and get everything ready." "But what if you guess wrong?" asked {master}. "Then you [throw the wrong part away|keep only what is right]," said {h}. "[Looking is faster than making|You can check many steps with one look]."',
            "So they tried it. {h} guessed {k} steps ahead. {Master} looked at all of them at once. The first was right. The second was right. The third was [right too|wrong]. {Master} [kept the good ones|nodded], fixed the first wrong one, and {h} guessed again from there.",
            "[The work went twice as fast|By noon they had done a whole day's work], and the {goods} were [exactly as good as before|just as fine as ever], because {master} had checked every single step. {fthe} [could not tell the difference|looked for a mistake and found none].",
            '"[A quick helper and a careful master make a good team|You guess, and I check]," said {master}. {h} [smiled proudly|was very proud].',
        ),
        facts,
    )


@plot
def market(c, r):
    n1, n2 = r.randint(2, 9), r.randint(2, 9)
    fr, fr2 = r.sample(["apples", "pears", "eggs", "plums", "carrots", "onions", "buns", "lemons"], 2)
    c.update(n1=n1, n2=n2, s=n1 + n2, fr=fr, fr2=fr2)
    c["lesson"] = r.choice(["count carefully", "be honest", "listen well"])
    facts = [
        ("How many %s did %s buy?" % (fr, c["h"]), "%s bought %d %s." % (c["h"], n1, fr)),
        (
            "How many things did %s buy in all?" % c["h"],
            "%s bought %d things in all, because %d plus %d is %d." % (c["h"], n1 + n2, n1, n2, n1 + n2),
        ),
        ("Who went to the market with %s?" % c["h"], "%s went along." % (c["fthe"],)),
    ]
    return (
        P(
            '{h}\'s {grown} asked {h_him} to go to the market. "Please buy {n1} {fr} and {n2} {fr2}," {g_he} said, and gave {h} a basket and some coins. {fthe} [went along|came too].',
            "The market was [full of colours and smells|busy and loud]. There were [fish and flowers|bread and cheese|hats and shoes], and a man who played the [flute|violin]. {h} bought {n1} {fr} and put them in the basket, one by one. Then {h_he} bought {n2} {fr2}.",
            '"How many things do we have now?" asked {f}. {h} counted. "{n1} {fr} and {n2} {fr2}. That makes {s} things in all," {h_he} said.',
            'When {h} looked at the coins, there was one too many. The seller had [made a mistake|given back too much]. "[Nobody will see it|We could buy candy]," [whispered|said] {f}. But {h} [shook {h_his} head|went back]. "You gave me one coin too many," {h_he} told the seller.',
            '"[What an honest {h_bare}|Thank you]!" said the seller, and gave them each {food}. They [ate|shared it] on the way home. {h_His} {grown} was [very pleased|proud].',
        ),
        facts,
    )


@plot
def moon(c, r):
    c["lesson"] = r.choice(["dream", "look up at the stars", "enjoy quiet moments"])
    st = r.choice(
        ["a silver boat", "a sleepy cloud", "a shooting star", "a paper plane", "a soft white feather"]
    )
    c["st"] = st
    facts = [
        (
            "What carried %s into the sky?" % c["h"],
            "%s carried %s into the sky." % (st[0].upper() + st[1:], c["h_him"]),
        ),
        ("Who did %s meet in the sky?" % c["h"], "%s met the moon." % c["h"]),
        ("Was it a dream?", "It may have been a dream, but there was star dust on the pillow."),
    ]
    return (
        P(
            'One [night|clear night], {h} could not sleep. {h_He} looked out of the window at the [big round|bright|golden] moon. "I wish I could visit you," {h_he} [said|whispered].',
            'Then something [wonderful|strange] happened. Down came {st}. "Climb on," it said [softly|in a quiet voice]. {h} climbed on, and up, up, up they went, over the [roofs|hills|trees] and past the [clouds|sleeping birds].',
            '"Good evening, {h}," said the moon. "[I have been watching over you|I see you every night]. What would you like to know?" "[Are you ever lonely|Do you ever sleep|Who lights you up]?" asked {h}. The moon laughed. "[The stars keep me company|I sleep when the sun is awake|The sun lends me its light]," the moon said.',
            "They [talked for a long time|looked down at the sleeping world]. The moon showed {h} [the sea, shining like silver|all the small lights of the town|where the wind is born]. At last {h}'s eyes [grew heavy|began to close].",
            'When {h} woke up, {h_he} was in {h_his} own bed. "Was it only a dream?" {h_he} wondered. But on the pillow there was a little bit of star dust.',
        ),
        facts,
    )


def story(r, name=None):
    name = name or r.choice(list(PLOTS))
    c, h, f = base(r)
    c["junk"] = r.choice(
        [
            "an old sock",
            "a rusty spoon",
            "some dry leaves",
            "a sleepy snail",
            "a broken stick",
            "a shiny stone",
            "a lost glove",
        ]
    )
    c["slowly"] = r.choice(["slowly", "with a light heart", "under the evening sky", "humming a song"])
    beats, facts = PLOTS[name](c, r)
    for k in ("item", "snd", "master"):
        if k in c:
            c[k + "_c"] = c[k][0].upper() + c[k][1:]
    if "master" in c:
        c["Master"] = c["master_c"]
    paras = [fill(r.choice(OPEN), c, r)] + [fill(b, c, r) for b in beats]
    if r.random() < 0.85:
        paras.append(fill(r.choice(END), c, r))
    # join some beats into longer paragraphs
    out = [paras[0]]
    for p in paras[1:]:
        if r.random() < 0.28:
            out[-1] += " " + p
        else:
            out.append(p)
    txt = fix("\n\n".join(fix(p) for p in out))
    facts = [(q, fix(a)) for q, a in facts] + [
        ("Who is the main character?", fix("The main character is %s, a %s." % (c["h"], c["h_bare"]))),
        ("What is the moral of the story?", fix("The moral is that it is good to %s." % c["lesson"])),
    ]
    meta = dict(
        plot=name,
        hero=c["h"],
        bare=c["h_bare"],
        friend=c["f"],
        fbare=c["f_bare"],
        place=c["place"],
        lesson=c["lesson"],
        obj=c["obj"] if name in ("lost_thing", "wishes") else None,
        thing=c["thing"] if name in ("lost_thing", "wishes") else None,
    )
    return txt, facts, meta


TITLE = ["{h} and the {x}", "The {t} {b}", "{h} Learns to {l}", "A Story About {h}"]
PROMPTS = [
    "Tell me a [short |little |]story about a {b}.",
    "[Please write|Write|Can you write|Could you write] a [short|little] story about a {b} [named|called] {h}.",
    "Tell me a [bedtime |]story about {h} [the {b}|and {f}].",
    "I want to hear a story about a {b} and a {fb}.",
    "Write a story for children [about a {b}|with the moral: {l}|where someone learns to {l}].",
    "Make up a story that takes place {at}.",
    "Can you tell me a story about {h}?",
    "Tell me a [story|fairy tale|fable] with a happy ending.",
    "Tell me a story.",
    "Tell me a story in which a {b} learns to {l}.",
]
OBJECT_PROMPTS = [
    "[Tell me|Write] a [short |little |]story about a {b} and a {o}.",
    "[Tell me|Write|Please write] a story about a {b} [named|called] {h} and a {o}.",
    "Can you tell me a story about a {o}?",
    "I would like a story with a {b} and a {o} in it.",
]


def prompt(meta, r):
    c = Ctx(
        h=meta["hero"],
        b=meta["bare"],
        f=meta["friend"],
        fb=meta["fbare"],
        l=meta["lesson"],
        at=dict(PLACES)[meta["place"]],
    )
    t = fix(fill(r.choice(PROMPTS), c, r))
    if meta["obj"] and r.random() < 0.6:
        thing = meta["obj"] if r.random() < 0.5 else meta["thing"]
        ask = r.choice(OBJECT_PROMPTS).replace("{b}", meta["bare"]).replace("{o}", thing)
        t = fix(spin(ask.replace("{h}", meta["hero"]), r))
    if meta["plot"] == "guess_ahead" and r.random() < 0.5:
        t = spin(
            "[Tell me a story about guessing ahead.|Explain speculative decoding with a story.|Tell me a fable about a fast helper and a careful master.]",
            r,
        )
    return t
