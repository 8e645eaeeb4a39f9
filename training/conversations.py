"""Conversations with system turns, thoughts, tool calls and tool results.

A conversation is `{"messages": [...], "tools": [...], "thinking": bool}` in the
shape of the chat APIs: a message has a `role` (`system`, `user`, `assistant`,
`tool`) and a `content`; an assistant's may also have a `reasoning` and
`tool_calls` (`{"name", "arguments"}`), a tool's has the `name` it answers for.
`chat.py` writes them in the words of each family. Everything here is our own
work and may be used freely (CC0-1.0).
"""

import json

import exercises
import facts
import stories
from exercises import NAME, NAMES, WORDS

SYSTEM_PLAIN = [
    f"You are {NAME}, a small and friendly assistant.",
    "You are a helpful assistant.",
    f"You are {NAME}. You like short and simple answers.",
    "You are a kind teacher who talks to children.",
    "You are a storyteller. You tell short stories with a good ending.",
    "Be brief and friendly.",
]
CITIES = (
    "Paris London Rome Berlin Madrid Oslo Vienna Dublin Lisbon Athens Tokyo Cairo Lima Nairobi Sydney".split()
)
TOPICS = "owls ships stars gardens trains castles whales robots rivers bread music horses maps clocks".split()
ROOMS = "kitchen bedroom garage hall attic bathroom office cellar".split()
NOTES = [
    "I will be late.",
    "Dinner is ready.",
    "See you at noon.",
    "Happy birthday!",
    "Where are you?",
    "The train is late.",
    "Thank you for the book.",
]
SONGS = ["Moon River", "Morning Walk", "The Little Boat", "Summer Rain", "Golden Hour", "Silent Hill"]
CURRENCIES = "EUR USD GBP JPY CHF".split()


def user(text):
    return {"role": "user", "content": text}


def assistant(text, reasoning=None, tool_calls=None):
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def conversation(messages, tools=None, thinking=False):
    return {"messages": messages, "tools": tools or [], "thinking": thinking}


def from_record(record):
    """A conversation of a neutral record `{prompt, response}` or `{turns}`."""
    turns = record.get("turns") or [record["prompt"], record["response"]]
    return conversation([(user, assistant)[i % 2](text) for i, text in enumerate(turns)])


def with_system(text, talk):
    talk["messages"].insert(0, {"role": "system", "content": text})
    return talk


# ---------------------------------------------------------------- system turns


def capitals(r):
    talk = from_record(exercises.qa(r.choice([exercises.SMALL, exercises.ID, exercises.E]), r))
    talk["messages"][-1]["content"] = talk["messages"][-1]["content"].upper()
    return with_system(r.choice(["Answer in capital letters.", "Always write in capital letters."]), talk)


def sums(r):
    """A few plain sums and differences of numbers up to 99, one after another."""
    messages = []
    for _ in range(r.randint(1, 3)):
        a, b = r.randint(0, 99), r.randint(0, 99)
        sign, word, value = ("+", "plus", a + b)
        if r.random() < 0.3:
            a, b = max(a, b), min(a, b)
            sign, word, value = ("-", "minus", a - b)
        asks = [
            f"What is {a} {sign} {b}?",
            f"What is {a} {word} {b}?",
            f"{a} {sign} {b} = ?",
            f"{a} {sign} {b}",
        ]
        answers = [f"{a} {sign} {b} = {value}", f"{a} {word} {b} is {value}.", f"The answer is {value}."]
        messages += [user(r.choice(asks)), assistant(r.choice(answers))]
    return conversation(messages)


def greeted(r):
    """A greeting and a question about the assistant in one breath."""
    record = exercises.qa(exercises.ID, r)
    hello = r.choice(["Hello!", "Hi!", "Hi there.", "Good day!", "Hey,"])
    back = r.choice(["Hello! ", "Hi! ", ""])
    return conversation([user(f"{hello} {record['prompt']}"), assistant(back + record["response"])])


def number_only(r):
    a, b = r.randint(0, 99), r.randint(0, 99)
    ask = r.choice([f"What is {a} + {b}?", f"{a} + {b} = ?", f"How much is {a} plus {b}?"])
    talk = conversation([user(ask), assistant(str(a + b))])
    return with_system(r.choice(["Answer with the number only.", "Give only the number."]), talk)


def given_name(r):
    name = r.choice(NAMES)
    ask = r.choice(["What is your name?", "Who are you?", "What should I call you?"])
    answer = r.choice([f"My name is {name}.", f"I am {name}.", f"You can call me {name}."])
    return with_system(
        r.choice([f"Your name is {name}.", f"You are {name}, a helpful assistant."]),
        conversation([user(ask), assistant(answer)]),
    )


def signed(r):
    closing = r.choice(["Have a nice day!", "I hope this helps.", "Ask me again any time."])
    talk = from_record(exercises.qa(r.choice([exercises.SMALL, exercises.E, exercises.ID]), r))
    talk["messages"][-1]["content"] += " " + closing
    return with_system(f'End every answer with "{closing}"', talk)


def plain_system(r):
    return with_system(r.choice(SYSTEM_PLAIN), from_record(exercises.gen(r)))


# -------------------------------------------------------------------- thinking


def think_sum(r):
    """Column addition and subtraction, done aloud in the thought."""
    a, b = r.randint(10, 99), r.randint(10, 99)
    if r.random() < 0.4:
        a, b = max(a, b), min(a, b)
        tens = b // 10 * 10
        thought = f"I take away {tens} first: {a} - {tens} = {a - tens}. Then {b % 10} more: {a - tens} - {b % 10} = {a - b}."
        ask = r.choice([f"What is {a} - {b}?", f"What is {a} minus {b}?", f"{a} - {b} = ?"])
        return (
            thought,
            ask,
            r.choice([f"{a} - {b} = {a - b}", f"The answer is {a - b}.", f"{a} minus {b} is {a - b}."]),
        )
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    thought = f"Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. Ones: {a % 10} + {b % 10} = {ones}. Together {tens} + {ones} = {a + b}."
    ask = r.choice([f"What is {a} + {b}?", f"What is {a} plus {b}?", f"{a} + {b} = ?"])
    return (
        thought,
        ask,
        r.choice([f"{a} + {b} = {a + b}", f"The answer is {a + b}.", f"{a} plus {b} is {a + b}."]),
    )


def think_product(r):
    a, b = r.randint(11, 40), r.randint(2, 9)
    thought = f"I split {a} into {a // 10 * 10} and {a % 10}. {a // 10 * 10} x {b} = {a // 10 * 10 * b} and {a % 10} x {b} = {a % 10 * b}. The sum is {a * b}."
    return thought, r.choice([f"What is {a} x {b}?", f"What is {a} times {b}?"]), f"{a} x {b} = {a * b}"


def think_problem(r):
    """A word problem; the thought is its working, the answer its last line."""
    while True:
        record = exercises.arith(r)
        lines = record["response"].split("\n")
        if len(lines) > 1:
            return (
                " ".join(line if line.endswith(".") else line + "." for line in lines[:-1]),
                record["prompt"],
                lines[-1],
            )


def think_story(r):
    text, _, meta = stories.story(r)
    thing = f" There is a {meta['obj']}." if meta["obj"] else ""
    thought = r.choice(
        [
            f"The hero is {meta['hero']}, a {meta['bare']}. The friend is {meta['friend']}.{thing} The lesson: {meta['lesson']}.",
            f"I will write about {meta['hero']} the {meta['bare']} and {meta['friend']}.{thing} In the end someone learns to {meta['lesson']}.",
        ]
    )
    return stories.fix(thought), stories.prompt(meta, r), text


def think_reading(r):
    while True:
        text, facts, _ = stories.story(r)
        if len(text) <= 1500:
            break
    ask, answer = r.choice(facts)
    thought = f"I look for the answer in the story. {answer}"
    return thought, f"Read the story and answer the question.\n\n{text}\n\nQuestion: {ask}", answer


def think_letters(r):
    word = r.choice(WORDS)
    spelled = ", ".join(f"{c} ({i + 1})" for i, c in enumerate(word))
    return (
        f"I count the letters: {spelled}.",
        f"How many letters are in the word {word}?",
        f"The word {word} has {len(word)} letters.",
    )


def think_question(r):
    record = exercises.qa(r.choice([exercises.E, exercises.ID, exercises.SMALL]), r)
    thought = r.choice(
        [
            "This is a simple question. I will answer it in a few words.",
            "The user wants a short answer. I know this one.",
            "I will be friendly and brief.",
        ]
    )
    return thought, record["prompt"], record["response"]


THOUGHTS = [
    (think_sum, 5),
    (think_product, 2),
    (think_problem, 3),
    (think_story, 5),
    (think_reading, 3),
    (think_letters, 1),
    (think_question, 3),
]


def thinking(r):
    make = r.choices([t[0] for t in THOUGHTS], [t[1] for t in THOUGHTS])[0]
    thought, ask, answer = make(r)
    talk = conversation([user(ask), assistant(answer, thought)], thinking=True)
    return with_system(r.choice(SYSTEM_PLAIN), talk) if r.random() < 0.25 else talk


# ----------------------------------------------------------------------- tools


def schema(name, description, required=None, **properties):
    """A function declaration in the shape of the chat APIs."""
    fields = {key: {"type": kind, "description": about} for key, (kind, about) in properties.items()}
    parameters = {
        "type": "object",
        "properties": fields,
        "required": list(properties) if required is None else required,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def weather(r):
    city, degrees, sky = (
        r.choice(CITIES),
        r.randint(-5, 35),
        r.choice(["sunny", "cloudy", "rainy", "windy", "snowy"]),
    )
    ask = r.choice(
        [
            f"What is the weather in {city}?",
            f"How warm is it in {city} today?",
            f"Is it raining in {city}?",
            f"Do I need a coat in {city}?",
        ]
    )
    return (
        {"city": city},
        ask,
        {"temperature": degrees, "sky": sky},
        f"It is {sky} in {city}, with {degrees} degrees.",
    )


def add(r):
    a, b = r.randint(1, 999), r.randint(1, 999)
    ask = r.choice(
        [f"Use the calculator: {a} + {b}", f"Please add {a} and {b} with the tool.", f"What is {a} plus {b}?"]
    )
    return {"a": a, "b": b}, ask, {"result": a + b}, f"{a} + {b} = {a + b}"


def multiply(r):
    a, b = r.randint(2, 99), r.randint(2, 99)
    ask = r.choice(
        [
            f"Use the calculator: {a} x {b}",
            f"Please multiply {a} by {b} with the tool.",
            f"What is {a} times {b}?",
        ]
    )
    return {"a": a, "b": b}, ask, {"result": a * b}, f"{a} x {b} = {a * b}"


def timer(r):
    minutes = r.randint(1, 60)
    ask = r.choice(
        [
            f"Set a timer for {minutes} minutes.",
            f"Remind me in {minutes} minutes.",
            f"Wake me in {minutes} minutes.",
        ]
    )
    return {"minutes": minutes}, ask, {"status": "ok"}, f"The timer is set for {minutes} minutes."


def books(r):
    topic, author = r.choice(TOPICS), r.choice(NAMES)
    title = r.choice(
        [
            f"The Book of {topic.capitalize()}",
            f"All About {topic.capitalize()}",
            f"A World of {topic.capitalize()}",
        ]
    )
    ask = r.choice(
        [f"Find a book about {topic}.", f"Search for books about {topic}.", f"I want to read about {topic}."]
    )
    return {"query": topic}, ask, {"title": title, "author": author}, f'I found "{title}" by {author}.'


def message(r):
    to, text = r.choice(NAMES), r.choice(NOTES)
    ask = r.choice([f"Send {to} a message: {text}", f"Tell {to}: {text}", f"Write to {to}: {text}"])
    return {"to": to, "text": text}, ask, {"status": "sent"}, f"I sent your message to {to}."


def light(r):
    room, on = r.choice(ROOMS), r.random() < 0.6
    word = "on" if on else "off"
    ask = r.choice([f"Turn {word} the light in the {room}.", f"Please switch the {room} light {word}."])
    return {"room": room, "on": on}, ask, {"status": "ok"}, f"The light in the {room} is {word} now."


def clock(r):
    city, hour, minute = r.choice(CITIES), r.randint(0, 23), r.randint(0, 59)
    ask = r.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
    return (
        {"city": city},
        ask,
        {"time": f"{hour:02d}:{minute:02d}"},
        f"It is {hour:02d}:{minute:02d} in {city}.",
    )


def money(r):
    amount, rate = r.randint(1, 500), r.randint(2, 9)
    source, target = r.sample(CURRENCIES, 2)
    ask = r.choice([f"Convert {amount} {source} to {target}.", f"How much is {amount} {source} in {target}?"])
    return (
        {"amount": amount, "from": source, "to": target},
        ask,
        {"result": amount * rate},
        f"{amount} {source} is {amount * rate} {target}.",
    )


def song(r):
    title = r.choice(SONGS)
    ask = r.choice([f'Play the song "{title}".', f"I want to hear {title}.", f"Please play {title}."])
    return {"title": title}, ask, {"status": "playing"}, f'Now playing "{title}".'


def dice(r):
    sides = r.choice([4, 6, 8, 10, 12, 20])
    face = r.randint(1, sides)
    ask = r.choice([f"Roll a dice with {sides} sides.", f"Throw a {sides}-sided dice for me."])
    return {"sides": sides}, ask, {"face": face}, f"You rolled a {face}."


def table(r):
    people, hour = r.randint(2, 8), r.randint(17, 21)
    ask = r.choice(
        [f"Book a table for {people} at {hour}:00.", f"I need a table for {people} people at {hour}:00."]
    )
    return (
        {"people": people, "time": f"{hour}:00"},
        ask,
        {"status": "booked"},
        f"Your table for {people} is booked at {hour}:00.",
    )


# Each tool: its declaration and the function that makes a call, its question,
# its result and the final answer.
TOOLS = [
    (schema("get_weather", "Get the weather of a city.", city=("string", "The city.")), weather),
    (schema("add", "Add two numbers.", a=("number", "First number."), b=("number", "Second number.")), add),
    (
        schema(
            "multiply", "Multiply two numbers.", a=("number", "First number."), b=("number", "Second number.")
        ),
        multiply,
    ),
    (schema("set_timer", "Set a timer.", minutes=("integer", "Minutes to wait.")), timer),
    (schema("search_books", "Search for books.", query=("string", "What to look for.")), books),
    (
        schema(
            "send_message", "Send a message.", to=("string", "Who gets it."), text=("string", "The message.")
        ),
        message,
    ),
    (
        schema("set_light", "Switch a light.", room=("string", "The room."), on=("boolean", "On or off.")),
        light,
    ),
    (schema("get_time", "Get the time in a city.", city=("string", "The city.")), clock),
    (
        schema(
            "convert_money",
            "Convert money.",
            amount=("number", "How much."),
            **{"from": ("string", "Currency to sell."), "to": ("string", "Currency to buy.")},
        ),
        money,
    ),
    (schema("play_song", "Play a song.", title=("string", "The title.")), song),
    (schema("roll_dice", "Roll a dice.", sides=("integer", "Number of sides.")), dice),
    (
        schema(
            "book_table",
            "Book a table.",
            people=("integer", "How many people."),
            time=("string", "The time."),
        ),
        table,
    ),
]


def offered(r, chosen):
    """The chosen declaration among up to two others, in random order."""
    others = r.sample([t for t in TOOLS if t[0] is not chosen], r.randint(0, 2))
    declarations = [chosen] + [t[0] for t in others]
    r.shuffle(declarations)
    return declarations


def bare(declaration):
    """The declaration without descriptions, as many clients send it."""
    function = declaration["function"]
    fields = {k: {"type": v["type"]} for k, v in function["parameters"]["properties"].items()}
    parameters = {**function["parameters"], "properties": fields}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def tool(r):
    """A call, and in three of four cases its result and the final answer."""
    chosen, make = r.choice(TOOLS)
    arguments, ask, result, answer = make(r)
    name = chosen["function"]["name"]
    thinks = r.random() < 0.25
    thought = (
        r.choice([f"I can use {name} for this.", f"The tool {name} fits. I will call it."])
        if thinks
        else None
    )
    messages = [user(ask), assistant("", thought, [{"name": name, "arguments": arguments}])]
    if r.random() < 0.75:
        content = (
            json.dumps(result) if r.random() < 0.8 else ", ".join(f"{k}: {v}" for k, v in result.items())
        )
        messages += [{"role": "tool", "name": name, "content": content}, assistant(answer)]
    tools = offered(r, chosen)
    if r.random() < 0.4:
        tools = [bare(t) for t in tools]
    talk = conversation(messages, tools, thinks)
    return with_system(r.choice(SYSTEM_PLAIN), talk) if r.random() < 0.25 else talk


def idle_tool(r):
    """Tools are offered, but the question needs none of them."""
    talk = from_record(exercises.qa(r.choice([exercises.SMALL, exercises.ID, exercises.E]), r))
    talk["tools"] = offered(r, r.choice(TOOLS)[0])
    return talk


def ordinary(r):
    return from_record(exercises.gen(r))


def lookups(r, n_asks=None):
    return from_record({"turns": facts.turns(r, n_asks)})


MIX = [
    (ordinary, 60),
    (sums, 12),
    (greeted, 3),
    (plain_system, 8),
    (thinking, 14),
    (tool, 14),
    (idle_tool, 2),
    (number_only, 1),
    (capitals, 1),
    (given_name, 1),
    (signed, 1),
    (lookups, 44),
]


def generate(r):
    """One random conversation of the synthetic mix."""
    return r.choices([m[0] for m in MIX], [m[1] for m in MIX])[0](r)
